"""What any verb needs to show texts of models and data on a terminal: nothing in them may drive it.

The one invariant: `safe` gives back no control character, no escape sequence and no mark that reorders text, except line breaks when
they are asked for.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence

_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_NAMES = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}
CELL = 60  # widest cell of a table, in columns of the terminal


def safe(text: str, *, lines: bool = False) -> str:
    """`text` with everything that could drive or deceive a terminal written as an escape; `lines` keeps line breaks and tabs."""

    def escaped(m: re.Match[str]) -> str:
        char = m[0]
        if lines and char in "\n\t":
            return char
        return _NAMES.get(char) or (f"\\x{ord(char):02x}" if ord(char) < 256 else f"\\u{ord(char):04x}")

    return _CONTROL.sub(escaped, text)


def width(text: str) -> int:
    """Columns of the terminal that `text` takes."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def cut(text: str, most: int = CELL) -> str:
    """`text`, or its beginning and an ellipsis, in at most `most` columns."""
    if len(text) <= most // 2 or width(text) <= most:
        return text
    kept, used = [], 1
    for char in text:
        used += width(char)
        if used > most:
            break
        kept.append(char)
    return "".join(kept) + "…"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[bool] = ()) -> Iterator[str]:
    """Lines of a table; cells are made safe and cut, columns of numbers (`right`) are aligned to the right."""
    cells = [[cut(safe(c)) for c in row] for row in (heads, *rows)]
    wide = [max(width(row[i]) for row in cells) for i in range(len(heads))]
    side = [*right, *([False] * (len(heads) - len(right)))]
    for row in cells:
        parts = [(" " * (w - width(c)) + c) if r else (c + " " * (w - width(c))) for c, w, r in zip(row, wide, side, strict=True)]
        yield "  ".join(parts).rstrip()

"""SQLite's functions of texts that its own library computes in more than linear time, in linear
time.

A question is ended at its deadline between two steps, and one call of a function is one step: `LIKE
'%a%a%a%b'` on a thousand characters, or `instr` on two long texts, would never come to its end.
Invariant: results are those of SQLite.
"""

from __future__ import annotations

import math
import re
import sqlite3
from collections.abc import Callable
from functools import lru_cache
from typing import Any

# characters: a text is compared with a pattern in as many steps as both have together, multiplied
_MOST_PATTERN = 5000

_SMALL = {c: c + 32 for c in range(ord("A"), ord("Z") + 1)}  # of ASCII alone, as in SQLite


def install(connection: sqlite3.Connection) -> None:
    """Put them in the place of SQLite's."""
    functions: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
        "like": (_like, (2, 3)),
        "glob": (_glob, (2,)),
        "instr": (_instr, (2,)),
        "replace": (_replace, (3,)),
        "trim": (_stripped("strip"), (1, 2)),
        "ltrim": (_stripped("lstrip"), (1, 2)),
        "rtrim": (_stripped("rstrip"), (1, 2)),
    }
    for name, (function, counts) in functions.items():
        for count in counts:
            connection.create_function(name, count, function, deterministic=True)


def _text(value: Any) -> str:
    """As SQLite casts it."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, float) and math.isfinite(value):
        digits, _, exponent = f"{value:.15g}".partition("e")
        return (digits if "." in digits else f"{digits}.0") + (f"e{exponent}" if exponent else "")
    return value if isinstance(value, str) else str(value)


def _like(pattern: Any, text: Any, escape: Any = None) -> int | None:
    if isinstance(pattern, bytes) or isinstance(text, bytes):
        return 0
    if pattern is None or text is None:
        return None
    return _likes(_text(pattern), None if escape is None else _text(escape))(_text(text))


def _glob(pattern: Any, text: Any) -> int | None:
    if isinstance(pattern, bytes) or isinstance(text, bytes):
        return 0
    if pattern is None or text is None:
        return None
    return _globs(_text(pattern))(_text(text))


@lru_cache(64)
def _likes(pattern: str, escape: str | None) -> Callable[[str], int]:
    if escape is not None and len(escape) != 1:
        raise ValueError("ESCAPE expression must be a single character")
    within = pattern[1:-1]
    if escape is None and pattern == f"%{within}%" and not re.search("[%_]", within):
        small = within.translate(_SMALL)
        return lambda text: int(
            small in (text.lower() if text.isascii() else text.translate(_SMALL))
        )
    parts = [""]
    chars = iter(pattern)
    for char in chars:
        if char == escape:
            # one that escapes nothing matches nothing
            parts[-1] += re.escape(c) if (c := next(chars, "")) else "(?!)"
        elif char == "%":
            parts.append("")
        else:
            parts[-1] += "." if char == "_" else re.escape(char)
    return _joined(parts, pattern, re.IGNORECASE | re.ASCII | re.DOTALL)


@lru_cache(64)
def _globs(pattern: str) -> Callable[[str], int]:
    parts = [""]
    at = 0
    while at < len(pattern):
        char = pattern[at]
        at = at + 1
        if char == "*":
            parts.append("")
        elif char == "?":
            parts[-1] += "."
        elif char == "[":
            negated = pattern[at : at + 1] == "^"
            end = pattern.find("]", at + negated + 1)
            if end < 0:
                return lambda text: 0  # a set that is not closed matches nothing
            parts[-1] += _one_of(pattern[at + negated : end], negated)
            at = end + 1
        else:
            parts[-1] += re.escape(char)
    return _joined(parts, pattern, re.DOTALL)


def _one_of(chars: str, negated: bool) -> str:
    found = ""
    before = ""
    at = 0
    if chars.startswith("]"):
        found = r"\]"
        at = 1
    while at < len(chars):
        if chars[at] == "-" and before and at + 1 < len(chars):
            found += (
                f"{re.escape(before)}-{re.escape(chars[at + 1])}" if before <= chars[at + 1] else ""
            )
            before = ""
            at = at + 2
        else:
            found = found + re.escape(chars[at])
            before = chars[at]
            at = at + 1
    return f"[{'^' if negated else ''}{found}]" if found else "." if negated else "(?!)"


def _joined(parts: list[str], pattern: str, flags: int) -> Callable[[str], int]:
    """What stands between wild cards is taken where it is found first, and never given back; the
    last part stands at the end.
    """
    if len(pattern) > _MOST_PATTERN:
        raise ValueError("LIKE or GLOB pattern too complex")
    first, *rest = parts
    *middle, last = rest or [""]
    tail = f".*{last}" if rest else ""
    found = re.compile(
        f"(?>{first})" + "".join(f"(?>.*?{m})" for m in middle if m) + tail + r"\Z", flags
    )
    return lambda text: int(found.match(text) is not None)


def _instr(text: Any, part: Any) -> int | None:
    if text is None or part is None:
        return None
    both_blobs = isinstance(text, bytes) and isinstance(part, bytes)
    found: int = text.find(part) if both_blobs else _text(text).find(_text(part))
    return found + 1


def _replace(text: Any, part: Any, by: Any) -> Any:
    if text is None or part is None or by is None:
        return None
    return _text(text).replace(_text(part), _text(by)) if _text(part) else _text(text)


def _stripped(method: str) -> Callable[..., Any]:
    def strip(text: Any, chars: Any = " ") -> str | None:
        if text is None or chars is None:
            return None
        among = "".join(dict.fromkeys(_text(chars)))
        found: str = getattr(_text(text), method)(among)
        return found

    return strip

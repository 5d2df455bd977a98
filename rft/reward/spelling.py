"""Normalize texts that can be typed in several ways: width, accents, digits, dashes, quotes,
spaces.

Depends on no reward and no notation of numbers.
Invariant: a text is read once, so that no answer can make it slow.
"""

from __future__ import annotations

import re
import unicodedata

_RAISED = re.compile("[⁰¹²³⁴-⁹⁺⁻]+")
_LOWERED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-")
_VULGAR = re.compile("[¼-¾⅐-⅞↉]")
_BLANKS = re.compile(r"[^\S\n]+")
_LINES = re.compile(r" ?\n\s*")


class _Spelling(dict[int, str | None]):
    """For `str.translate`: the usual character for each that looks or means the same."""

    def __missing__(self, code: int) -> str | None:
        char = chr(code)
        kind = unicodedata.category(char)
        usual: str | None = char
        if kind == "Nd":
            usual = str(unicodedata.decimal(char))
        elif kind in ("Pd", "Zs"):
            usual = "-" if kind == "Pd" else " "
        elif kind == "Cf":
            usual = None  # invisible: joiners, direction marks, soft hyphens
        return self.setdefault(code, usual)


_SPELLING = _Spelling(
    zip(map(ord, "−⁄∕‘’‚‛ʼ‹›“”„‟«»٪٫٬、"), "-//'''''''\"\"\"\"\"\"%.,,", strict=True)
)


def normalized(text: str) -> str:
    """Return `text` in Unicode's NFKC, with ASCII digits, dashes and quotes, single spaces, 10² as
    10^2 and 1½ as 1 1/2.
    """
    if not text.isascii():
        text = _VULGAR.sub(lambda m: f" {m[0]}", text)
        text = _RAISED.sub(lambda m: f"^{m[0].translate(_LOWERED)}", text)
        text = unicodedata.normalize("NFKC", text).translate(_SPELLING)
    return _LINES.sub("\n", _BLANKS.sub(" ", text)).strip()

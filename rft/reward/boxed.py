"""Finding the last \\boxed{...} of an answer, braces counted.  Comparison is left to the math worker."""

from __future__ import annotations


def last_boxed(text: str) -> str | None:
    """Content of the last complete \\boxed{...} or \\fbox{...}; None without one."""
    for start in sorted((i for mark in ("\\boxed{", "\\fbox{") for i in _all(text, mark)), reverse=True):
        begin = text.index("{", start) + 1
        depth = 1
        for i in range(begin, len(text)):
            depth += {"{": 1, "}": -1}.get(text[i], 0)
            if depth == 0:
                return text[begin:i]
    return None


def _all(text: str, mark: str) -> list[int]:
    found, at = [], text.find(mark)
    while at >= 0:
        found.append(at)
        at = text.find(mark, at + 1)
    return found

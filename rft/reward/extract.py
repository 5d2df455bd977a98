"""Parts of an answer, found by their marks.  Invariant: each function reads a text once, so that no answer can make it slow."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

_BOX = re.compile(r"\\(?:boxed|fbox)\{|[{}]")
_LANGUAGE = re.compile(r"[ \t]*([\w+-]*)")
_TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def last_boxed(text: str) -> str | None:
    """Content of the last complete \\boxed{...} or \\fbox{...}; None without one."""
    opened: list[tuple[int, bool]] = []  # behind each brace that is open: where, and whether it is a box's
    begin = end = -1
    for mark in _BOX.finditer(text):
        if mark[0] != "}":
            opened.append((mark.end(), mark[0] != "{"))
        elif opened:
            inside, boxed = opened.pop()
            if boxed and inside > begin:
                begin, end = inside, mark.start()
    return text[begin:end] if begin >= 0 else None


def blocks(text: str, tag: str, *, ignore_case: bool = False) -> list[str]:
    """Contents of all <tag>...</tag>; a tag opened again inside belongs to the content."""
    found, begin = [], None
    for mark in _tag(tag, ignore_case).finditer(text):
        if not mark[1]:
            begin = mark.end() if begin is None else begin
        elif begin is not None:
            found.append(text[begin : mark.start()])
            begin = None
    return found


@cache
def _tag(name: str, ignore_case: bool) -> re.Pattern[str]:
    return re.compile(rf"<(/?){name}>", re.IGNORECASE if ignore_case else 0)


class FencedBlock(NamedTuple):
    """A block between ```; `language` is the first word of its first line, in lower case, `closed` whether it ends before the text does."""

    language: str
    body: str
    start: int
    end: int
    closed: bool


def fenced(text: str) -> Iterator[FencedBlock]:
    """The fenced blocks of a text, in order."""
    end, line = 0, -1
    while (start := text.find("```", end)) >= 0 and (line := line if line > start else text.find("\n", start)) >= 0:
        if (inline := text.find("```", start + 3, line)) >= 0:  # code within a line of words
            end = inline + 3
            continue
        language = _LANGUAGE.match(text, start + 3, line)
        close = text.find("```", line + 1)
        end = close + 3 if close >= 0 else len(text)
        body = text[line + 1 : close if close >= 0 else end]
        yield FencedBlock(language[1].lower() if language is not None else "", body, start, end, close >= 0)


def has_shape(text: str) -> bool:
    """Whether a text is one <think> block followed by one <answer> block, and nothing else."""
    text = text.strip()
    if any(text.count(tag) != 1 for tag in _TAGS) or not (text.startswith("<think>") and text.endswith("</answer>")):
        return False
    return text.partition("</think>")[2].lstrip().startswith("<answer>")


def thinks_first(text: str) -> bool:
    """Whether a text begins with a closed <think> block."""
    return text.lstrip().startswith("<think>") and "</think>" in text

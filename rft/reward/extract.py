"""Extract parts of an answer by their marks.

Invariant: each function reads a text once, so that no answer can make it slow.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

_BOX = re.compile(r"\\(?:boxed|fbox)\{|[{}]")
_FENCE = re.compile(
    r"(?<!`)`{3,}+[^\n`]++`{3,}+|(?P<fence>(?<!`)`{3,}+|(?<!~)~{3,}+)[ "
    r"\t]*+(?P<language>[\w+-]*+)[^\n`]*+\n"
)
_STATED = re.compile(
    r"(?:\banswer\b[^\n:.=]{0,40}?(?:\bis\b|[:=])|答案(?:是|为)?) ?[:：]?([^\n]*)", re.IGNORECASE
)
_ONE_FORMULA = r"(?:\$\$[^$]++\$\$|\$[^$\n]++\$|\\\((?:[^\\\n]|\\(?![()]))++\\\)|\\\[(?:[^\\]|\\(?![\[\]]))++\\\])"
_FORMULA = re.compile(rf"({_ONE_FORMULA}(?:(?:,? (?:or|and)|,) {_ONE_FORMULA})*)")
_OTHER_BOX = re.compile(r"\}\$?(?:,? (?:or|and)|,) \$?\\(?:boxed|fbox)\{$")
_DIGIT = re.compile(r"\d")
_TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def last_boxed(text: str) -> str | None:
    """Return the content of the last complete \\boxed{...} or \\fbox{...}; None without one."""
    place = _last_box(text)
    return None if place is None else text[slice(*place)]


def _last_box(text: str) -> tuple[int, int] | None:
    """Return the start and end of the last box's content."""
    # per open brace: the position after it, and whether it opens a box
    opened: list[tuple[int, bool]] = []
    begin = end = -1
    for mark in _BOX.finditer(text):
        if mark[0] != "}":
            opened.append((mark.end(), mark[0] != "{"))
        elif opened:
            inside, boxed = opened.pop()
            if boxed and inside > begin:
                begin = inside
                end = mark.start()
    return (begin, end) if begin >= 0 else None


def boxed_result(text: str) -> str | None:
    """Return `last_boxed`, or "1 or 2" for several results: \\boxed{1} or \\boxed{2}."""
    place = _last_box(text)
    if place is None:
        return None
    begin, end = place
    several = _OTHER_BOX.search(text, max(0, begin - 30), begin)
    return (
        text[begin:end] if several is None else f"{last_boxed(text[:begin])} or {text[begin:end]}"
    )


def blocks(text: str, tag: str, *, ignore_case: bool = False) -> list[str]:
    """Return the contents of all <tag>...</tag>; a nested opening tag belongs to the content."""
    contents = []
    begin = None
    for mark in _tag(tag, ignore_case).finditer(text):
        if not mark[1]:
            begin = mark.end() if begin is None else begin
        elif begin is not None:
            contents.append(text[begin : mark.start()])
            begin = None
    return contents


@cache
def _tag(name: str, ignore_case: bool) -> re.Pattern[str]:
    return re.compile(rf"<(/?){name}>", re.IGNORECASE if ignore_case else 0)


class FencedBlock(NamedTuple):
    """A block between ``` or ~~~.

    `language`: first word of its first line, in lower case; `closed`: it ends before the text does.
    """

    language: str
    body: str
    start: int
    end: int
    closed: bool


def fenced(text: str) -> Iterator[FencedBlock]:
    """Yield the fenced blocks of a text in order; lines of an indented block lose that indentation."""
    end = 0
    while (opened := _FENCE.search(text, end)) is not None:
        fence = opened["fence"]
        if fence is None:  # inline code
            end = opened.end()
            continue
        close = _closing(fence).search(text, opened.end())
        body = text[opened.end() : close.start() if close is not None else len(text)]
        end = close.end() if close is not None else len(text)
        indent = text[text.rfind("\n", 0, opened.start()) + 1 : opened.start()]
        if indent and not indent.strip(" "):
            body = re.sub(f"^ {{1,{len(indent)}}}", "", body, flags=re.MULTILINE)
        yield FencedBlock(opened["language"].lower(), body, opened.start(), end, close is not None)


@cache
def _closing(fence: str) -> re.Pattern[str]:
    """Return the pattern of a block's end: the same mark at least as often, at the start or end of
    a line.
    """
    run = f"{fence[0]}{{{len(fence)},}}+"
    return re.compile(rf"^[ \t]*+{run}|(?<!{fence[0]}){run}[ \t]*+$", re.MULTILINE)


def answer_block(text: str) -> str:
    """Return the content of the last <answer> block; the whole text without one."""
    tagged = blocks(text, "answer")
    return tagged[-1] if tagged else text


class Conclusion(NamedTuple):
    """The part of an answer that states its result; `formula`: it was marked as a formula, so no
    sentence surrounds it.
    """

    text: str
    formula: bool


def conclusion(text: str) -> Conclusion:
    """Return the last box, else the text after the last "answer is" or "Answer:" in a line, else
    the last formula not followed by a number, else the whole text.
    """
    if (boxed := boxed_result(text)) is not None:
        return Conclusion(boxed, True)
    stated = _last(_STATED, text)
    if stated is not None and stated[1].strip(" *$"):
        text = stated[1]
    formula = _last(_FORMULA, text)
    if formula is None or _DIGIT.search(text, formula.end()):
        return Conclusion(text, False)
    return Conclusion(formula[1], True)


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    matches = list(pattern.finditer(text))
    return matches[-1] if matches else None


def has_shape(text: str) -> bool:
    """Return whether a text is exactly one <think> block followed by one <answer> block."""
    text = text.strip()
    if any(text.count(tag) != 1 for tag in _TAGS) or not (
        text.startswith("<think>") and text.endswith("</answer>")
    ):
        return False
    return text.partition("</think>")[2].lstrip().startswith("<answer>")


def thinks_first(text: str) -> bool:
    """Return whether a text begins with a closed <think> block."""
    return text.lstrip().startswith("<think>") and "</think>" in text

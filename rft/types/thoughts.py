"""Splits an answer into its thought and what follows it, by the tags <think> and </think>.

Knows no template and no tokenizer.  Invariant: nothing before the last </think>, and nothing inside
a thought that is still open, is part of the answer.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import msgspec

THINK = "<think>"
THINK_END = "</think>"
# in an experience's `info`: true where its last answer went on with a thought of the prompt
KEY = "in_thought"
TAIL_TOKENS = 16  # of a prompt: in any vocabulary they hold the tag and the blanks behind it
# first: a tag in quotes, which is text
_TAGS = re.compile(r"""(?<![^\s([{:,])([`'"])</?think>\1|(</think>)""")
# elsewhere it is a word of a sentence
_BEGINS = re.compile(r"(?:\A|[\n.!?:>。！？：])[^\S\n]*(<think>)")


# whose arguments may hold a tag
_CALLS = re.compile(r"<tool_call>((?:(?!<tool_call>).)*?)</tool_call>", re.DOTALL)


class SplitAnswer(NamedTuple):
    """What a model wrote, in two parts.  `thought` includes its tags."""

    thought: str
    answer: str


def split_thought(text: str, *, opened: bool = False) -> SplitAnswer:
    """Split what a model wrote behind its last closed thought; a thought that is open at the end is
    no answer either.

    `opened`: the prompt ended inside a thought (`opens_thought`), with which `text` goes on.
    """
    calls = [
        call.span() for call in _CALLS.finditer(text) if THINK_END in call[1] and _is_json(call[1])
    ]
    tags = [tag for tag in _TAGS.finditer(text) if tag[2]]
    ends = [tag.end() for tag in tags if not any(start < tag.start() < end for start, end in calls)]
    if opened and not ends:
        return SplitAnswer(text, "")
    start = ends[-1] if ends else 0
    answer = text[start:]
    unclosed = _BEGINS.search(answer)
    if unclosed is None:
        return SplitAnswer(text[:start], answer)
    cut = unclosed.start(1)
    return SplitAnswer(text[:start] + answer[cut:], answer[:cut])


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


def closes(text: str, stop: str, *, opened: bool = False) -> bool:
    """Whether a stop text closes a tag or a brace that is open in `text`; `opened` as for
    `split_thought`.
    """
    mark = stop.strip()
    if mark.startswith("</"):
        return text.count(mark.replace("/", "", 1)) + (opened and mark == THINK_END) > text.count(
            mark
        )
    return mark == "}" and text.count("{") > text.count("}")


def was_opened(text: str) -> bool:
    """Whether a text whose prompt is not known goes on with a thought: it closes one that it has
    not opened.
    """
    before, closed, _ = text.partition(THINK_END)
    return bool(closed) and THINK not in before


def opens_thought(prompt: str) -> bool:
    """Whether a prompt, of which the end is enough, ends inside a thought that the answer goes on
    with.
    """
    return prompt.rstrip().endswith(THINK)

"""Split a text into thought and answer, by the tags <think> and </think>.

Depends on no template and no tokenizer.  Invariant: the answer holds nothing before the last
</think>, and nothing of an open thought.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import msgspec

THINK = "<think>"
THINK_END = "</think>"
# in an experience's `info`: its last answer continued a thought of the prompt
KEY = "in_thought"
TAIL_TOKENS = 16  # end of a prompt that holds the tag and blanks after it in any vocabulary
# a quoted tag, which is text, or a tag
_TAGS = re.compile(r"""(?<![^\s([{:,])([`'"])</?think>\1|(</think>)""")
# at the beginning of a line or sentence; elsewhere the tag is a word
_BEGINS = re.compile(r"(?:\A|[\n.!?:>。！？：])[^\S\n]*(<think>)")

# tool calls, whose arguments may hold a tag
_CALLS = re.compile(r"<tool_call>((?:(?!<tool_call>).)*?)</tool_call>", re.DOTALL)


class SplitAnswer(NamedTuple):
    """`thought` includes its tags."""

    thought: str
    answer: str


def split_thought(text: str, *, opened: bool = False) -> SplitAnswer:
    """Split a model's text after its last closed thought; an open thought at the end is no answer.

    `opened`: the prompt ended inside a thought (`opens_thought`), which `text` continues.
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
    """Return whether `stop` closes a tag or a brace of `text`; `opened` as for `split_thought`."""
    mark = stop.strip()
    if mark.startswith("</"):
        return text.count(mark.replace("/", "", 1)) + (opened and mark == THINK_END) > text.count(
            mark
        )
    return mark == "}" and text.count("{") > text.count("}")


def was_opened(text: str) -> bool:
    """Return whether a text closes a thought that it has not opened, so its unknown prompt did."""
    before, closed, _ = text.partition(THINK_END)
    return bool(closed) and THINK not in before


def opens_thought(prompt: str) -> bool:
    """Return whether a prompt, or its end, ends inside a thought that the answer continues."""
    return prompt.rstrip().endswith(THINK)

"""Find the parts of a conversation that a chat template writes, by marks in its messages.

Depends on no tokenizer.  `render` is a template with all its arguments but the messages.
Invariant: a mark is a number in no other text, so a template that trims, escapes or moves a text
keeps it.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

Message = Mapping[str, Any]
Render = Callable[[list[dict[str, Any]]], str]
Marks = tuple[str, ...]
_SHOWN_CHARS = 60
_ONCE = "write its text into the first message of the user, or use another chat_template"


class MessageLeftOut(ValueError):
    """The chat template drops a message or writes it twice; raised before generating."""


class Tail(NamedTuple):
    """Text that a template writes after an answer."""

    text: str
    ends: int  # length of the part of `text` that closes the answer: its calls and its turn
    called: bool  # `text` begins inside the answer's last call


def check_written(messages: Sequence[Message], render: Render) -> None:
    """Raise MessageLeftOut unless the template writes the text of each message."""
    marked, marks = _marked(messages)
    _places(messages, marks, range(len(messages)), render(marked))


def behind_answer(messages: Sequence[Message], at: int, render: Render) -> Tail:
    """Return the text that the template writes after the answer `messages[at]`.

    Raises MessageLeftOut if it drops a later message or repeats an earlier one.
    """
    mark = str(uuid.uuid4().int >> 65)  # a number of 63 bits
    for answer in _stand_ins(messages[at], mark):
        _, mark_found, text = render(
            [*map(dict, messages[:at]), answer, *map(dict, messages[at + 1 :])]
        ).rpartition(mark)
        if mark_found:
            break
    else:
        raise MessageLeftOut(
            "the chat template leaves out earlier answers, so a conversation cannot go on from its "
            "tokens; set another chat_template"
        )
    marked, marks = _marked(messages)
    marked[at] = answer
    shown = render(marked).rpartition(mark)[2]
    places = _places(messages, marks, range(at + 1, len(messages)), shown)
    for index in range(at):
        if messages[index].get("role") != "assistant" and any(
            mark in shown for each in marks[index] for mark in each
        ):
            raise MessageLeftOut(
                f"the chat template writes {_named(messages, index)} again behind an answer; "
                f"{_ONCE}"
            )
    return Tail(text, min([len(text), *places]), called="tool_calls" in answer)


def _stand_ins(answer: Message, mark: str) -> Iterator[dict[str, Any]]:
    """Put the mark into the answer's tool calls, then into its text, as templates write either."""
    if calls := answer.get("tool_calls"):
        yield {**answer, "content": "", "tool_calls": [_with_mark(call, mark) for call in calls]}
    yield {"role": "assistant", "content": mark}


def _with_mark(call: Message, mark: str) -> dict[str, Any]:
    arguments = {"argument": int(mark)}  # a number is written without quotes
    if "function" in call:
        return {**call, "function": {**call["function"], "arguments": arguments}}
    return {**call, "arguments": arguments}


def _marked(messages: Sequence[Message]) -> tuple[list[dict[str, Any]], list[list[Marks]]]:
    """Return messages with marks, and the marks of each message's text and of its calls."""
    marked: list[dict[str, Any]] = []
    marks: list[list[Marks]] = []
    stem = uuid.uuid4().int
    new = (f"{stem}{number:06}" for number in itertools.count())
    for original in messages:
        message = dict(original)
        own_marks: list[Marks] = []
        content = message.get("content")
        # templates leave out the thought before an answer, and the blanks around any text
        both_ends = message.get("role") != "assistant"
        if isinstance(content, str) and content.strip():
            message["content"], marks_of_text = _with_marks(content, new, both_ends=both_ends)
            own_marks.append(marks_of_text)
        elif isinstance(content, list):
            message["content"] = parts = [dict(part) for part in content]
            marks_of_text = ()
            for part in parts:
                if isinstance(text := part.get("text"), str) and text.strip():
                    part["text"], more = _with_marks(text, new, both_ends=both_ends)
                    marks_of_text += more
            own_marks += [marks_of_text] if marks_of_text else []
        if calls := message.get("tool_calls"):
            own_marks.append(tuple(itertools.islice(new, len(calls))))
            message["tool_calls"] = [
                _with_mark(call, mark) for call, mark in zip(calls, own_marks[-1], strict=True)
            ]
        marked.append(message)
        marks.append(own_marks)
    return marked, marks


def _with_marks(text: str, new: Iterator[str], *, both_ends: bool) -> tuple[str, Marks]:
    """Put marks at the end of a text and, with `both_ends`, at its beginning."""
    end = next(new)
    if not both_ends:
        return f"{text.strip()}{end}", (end,)
    begin = next(new)
    return f"{begin}{text.strip()}{end}", (begin, end)


def _places(
    messages: Sequence[Message], marks: Sequence[Sequence[Marks]], indexes: Iterable[int], text: str
) -> list[int]:
    """Return the positions in `text` of the marks of messages `indexes`.

    Raises MessageLeftOut for a message without text and calls there, or with some of its calls.
    """
    positions: list[int] = []
    for index in indexes:
        places = [[text.find(mark) for mark in each] for each in marks[index]]
        complete = [min(each) >= 0 for each in places]
        if (complete and not any(complete)) or any(min(each) < 0 <= max(each) for each in places):
            raise MessageLeftOut(
                f"the chat template does not write {_named(messages, index)}, so the model would "
                f"not see it; {way_out(messages)}"
            )
        positions += [place for each in places for place in each if place >= 0]
    return positions


def _named(messages: Sequence[Message], index: int) -> str:
    text = str(messages[index].get("content") or "its tool calls").strip()
    shown = text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
    return f"message {index} (role {messages[index].get('role')}: {shown!r})"


def way_out(messages: Sequence[Message]) -> str:
    """Say how to avoid messages that a template drops."""
    if not any(m.get("role") == "tool" for m in messages):
        return "use a role that it writes, or another chat_template"
    way = (
        "give results as messages of the user (tool_workflow: result_role: user), or use another "
        "chat_template"
    )
    if any(m.get("tool_calls") for m in messages):
        return way
    return (
        f"{way}.  Some templates write results behind tool_calls only: set "
        "explorer.rollout_model.tool_call_parser, and append answer.message"
    )

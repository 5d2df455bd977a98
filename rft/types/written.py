"""Finds out what a chat template writes of a conversation, by putting marks into its messages and
looking for them in the text.

Knows no tokenizer.  `render` is a template with everything but the messages.  Invariant: a mark is
a number that no other text has, so that a template which trims, escapes or moves a text still shows
it.
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
    """The chat template does not write a message, or writes it twice; raised before anything is
    generated.
    """


class Tail(NamedTuple):
    """The text that a template writes behind an answer."""

    text: str
    ends: int  # how much of `text` belongs to the answer: the end of its calls and of its turn
    called: bool  # `text` begins inside the answer's last call


def check_written(messages: Sequence[Message], render: Render) -> None:
    """Raise MessageLeftOut where the template does not write the text of each message."""
    marked, marks = _marked(messages)
    _places(messages, marks, range(len(messages)), render(marked))


def behind_answer(messages: Sequence[Message], at: int, render: Render) -> Tail:
    """What the template writes behind the answer `messages[at]`.

    Raises MessageLeftOut where that is not each message after it, or an earlier one again.
    """
    mark = str(uuid.uuid4().int)
    for answer in _stand_ins(messages[at], mark):
        _, found, text = render(
            [*map(dict, messages[:at]), answer, *map(dict, messages[at + 1 :])]
        ).rpartition(mark)
        if found:
            break
    else:
        raise MessageLeftOut(
            "the chat template leaves out earlier answers, so a conversation cannot go on from its "
            "tokens; set another chat_template"
        )
    marked, marks = _marked(messages)
    marked[at] = answer
    seen = render(marked).rpartition(mark)[2]
    places = _places(messages, marks, range(at + 1, len(messages)), seen)
    for index in range(at):
        if messages[index].get("role") != "assistant" and any(
            mark in seen for each in marks[index] for mark in each
        ):
            raise MessageLeftOut(
                f"the chat template writes {_named(messages, index)} again behind an answer; "
                f"{_ONCE}"
            )
    return Tail(text, min([len(text), *places]), called="tool_calls" in answer)


def _stand_ins(answer: Message, mark: str) -> Iterator[dict[str, Any]]:
    """The answer with the mark as near to its end as the template writes anything of it: in its
    last call, else as its text.
    """
    if calls := answer.get("tool_calls"):
        yield {**answer, "content": "", "tool_calls": [_with_mark(call, mark) for call in calls]}
    yield {"role": "assistant", "content": mark}


def _with_mark(call: Message, mark: str) -> dict[str, Any]:
    arguments = {"argument": int(mark)}  # a number stands in no quotes
    if "function" in call:
        return {**call, "function": {**call["function"], "arguments": arguments}}
    return {**call, "arguments": arguments}


def _marked(messages: Sequence[Message]) -> tuple[list[dict[str, Any]], list[list[Marks]]]:
    """The messages with marks, and the marks of each: that of its text, and those of its calls,
    where it has them.
    """
    marked: list[dict[str, Any]] = []
    marks: list[list[Marks]] = []
    stem = uuid.uuid4().int
    new = (f"{stem}{number:06}" for number in itertools.count())
    for original in messages:
        message = dict(original)
        found: list[Marks] = []
        text = message.get("content")
        if isinstance(text, str) and text.strip():
            end = next(new)
            # templates leave out the thought before an answer, and the blanks around any text
            begin = "" if message.get("role") == "assistant" else next(new)
            message["content"] = f"{begin}{text.strip()}{end}"
            found.append((begin, end) if begin else (end,))
        if calls := message.get("tool_calls"):
            found.append(tuple(itertools.islice(new, len(calls))))
            message["tool_calls"] = [
                _with_mark(call, mark) for call, mark in zip(calls, found[-1], strict=True)
            ]
        marked.append(message)
        marks.append(found)
    return marked, marks


def _places(
    messages: Sequence[Message], marks: Sequence[Sequence[Marks]], indexes: Iterable[int], text: str
) -> list[int]:
    """Where the messages `indexes` begin in `text`.

    Raises MessageLeftOut for one of which it has neither the text nor the calls, or some of the
    calls.
    """
    found: list[int] = []
    for index in indexes:
        places = [[text.find(mark) for mark in each] for each in marks[index]]
        whole = [min(each) >= 0 for each in places]
        if (whole and not any(whole)) or any(min(each) < 0 <= max(each) for each in places):
            raise MessageLeftOut(
                f"the chat template does not write {_named(messages, index)}, so the model would "
                f"not see it; {way_out(messages)}"
            )
        found += [place for each in places for place in each if place >= 0]
    return found


def _named(messages: Sequence[Message], index: int) -> str:
    text = str(messages[index].get("content") or "its tool calls").strip()
    shown = text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
    return f"message {index} (role {messages[index].get('role')}: {shown!r})"


def way_out(messages: Sequence[Message]) -> str:
    """What to do where a template does not take these messages."""
    if not any(m.get("role") == "tool" for m in messages):
        return "use a role that it writes, or another chat_template"
    way = (
        "give results as messages of the user (tool_workflow: result_role: user), or use another "
        "chat_template"
    )
    if any(m.get("tool_calls") for m in messages):
        return way
    return (
        f"{way}.  Some templates write results behind tool_calls only: set tool_call_parser and "
        f"enable_auto_tool_choice in "
        "explorer.rollout_model, and append answer.message"
    )

"""What judges were asked of one run and what they replied, kept beside the run for people.

Knows no judge and no run.  Invariant: what is kept is bounded, and has passed `redact`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from rft.secrets import redact

KEY = "judge"  # in an experience's `info`
MOST_CHARS = 8_000  # of a message, and of a reply
MOST_EXCHANGES = 8  # of one run
_WHY_CHARS = 500
_NOTED: ContextVar[list[dict[str, Any]] | None] = ContextVar("noted", default=None)


@contextmanager
def noted() -> Iterator[list[dict[str, Any]]]:
    """The list that exchanges are added to inside, by this task and by those that it starts."""
    found: list[dict[str, Any]] = []
    before = _NOTED.set(found)
    try:
        yield found
    finally:
        _NOTED.reset(before)


def note(judge: str, question: Sequence[Mapping[str, Any]], reply: str, why: str) -> None:
    """Keep an exchange: `why` says what went wrong with the reply, "" if nothing.  Outside of
    `noted` nothing is kept.
    """
    found = _NOTED.get()
    if found is not None and len(found) < MOST_EXCHANGES:
        asked = [
            {"role": str(m.get("role", "")), "content": _cut(str(m.get("content", "")))}
            for m in question
        ]
        found.append(
            {
                "judge": judge,
                "question": asked,
                "reply": _cut(reply),
                **({"why": _cut(why, _WHY_CHARS)} if why else {}),
            }
        )


def _cut(text: str, most: int = MOST_CHARS) -> str:
    text = redact(text)
    return text if len(text) <= most else f"{text[:most]}… ({len(text)} characters)"

"""Questions to judges and their replies during one run, kept with the run for display.

Depends on no judge and no run.
Invariant: the record is bounded, and has passed `redact`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from rft.secrets import redact
from rft.types.images import described

KEY = "judge"  # in an experience's `info`
MOST_CHARS = 8_000  # of a message or a reply
MOST_EXCHANGES = 8  # of one run
_WHY_CHARS = 500
_NOTED: ContextVar[list[dict[str, Any]] | None] = ContextVar("noted", default=None)


@contextmanager
def noted() -> Iterator[list[dict[str, Any]]]:
    """Yield the list that collects exchanges inside the block, of this task and of tasks it starts."""
    exchanges: list[dict[str, Any]] = []
    before = _NOTED.set(exchanges)
    try:
        yield exchanges
    finally:
        _NOTED.reset(before)


def note(judge: str, question: Sequence[Mapping[str, Any]], reply: str, reason: str) -> None:
    """Record an exchange; `reason`: error of the reply, "" if none.  Outside of `noted` nothing is
    kept.
    """
    exchanges = _NOTED.get()
    if exchanges is not None and len(exchanges) < MOST_EXCHANGES:
        messages = [
            {"role": str(m.get("role", "")), "content": _cut(described(m.get("content")))}
            for m in question
        ]
        exchanges.append(
            {
                "judge": judge,
                "question": messages,
                "reply": _cut(reply),
                **({"why": _cut(reason, _WHY_CHARS)} if reason else {}),
            }
        )


def _cut(text: str, most: int = MOST_CHARS) -> str:
    text = redact(text)
    return text if len(text) <= most else f"{text[:most]}… ({len(text)} characters)"

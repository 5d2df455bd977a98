"""Values that a reward reads in an answer and in the truth, recorded for `rft debug reward
--explain`.

Depends on no reward.
Invariant: an unreadable truth raises; no answer is ever compared with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from rft.types.task import Task


class UnreadableTruth(ValueError):
    """The truth of a row cannot be compared with any answer; `rft check` and `rft data audit`
    reject it.
    """


class AnswerReading(NamedTuple):
    """One comparison: `part` names the part of the answer, `text` is its text, `value` the value
    read (None: nothing).
    """

    part: str
    text: str | None
    value: object
    truth: object = None
    right: bool | None = None


_READINGS: ContextVar[list[AnswerReading] | None] = ContextVar("readings", default=None)


@contextmanager
def explained() -> Iterator[list[AnswerReading]]:
    """Yield the list that collects readings inside the block, of this task and of tasks it starts."""
    readings: list[AnswerReading] = []
    before = _READINGS.set(readings)
    try:
        yield readings
    finally:
        _READINGS.reset(before)


def note(
    part: str, text: str | None, value: object, truth: object = None, right: bool | None = None
) -> None:
    """Record an `AnswerReading`; outside of `explained` nothing is recorded."""
    readings = _READINGS.get()
    if readings is not None:
        readings.append(AnswerReading(part, text, value, truth, right))


def truth_of(task: Task) -> Any:
    """Return the gold answer of a row.  Raises UnreadableTruth without one."""
    if task.truth is None:
        raise UnreadableTruth(f"{where(task)} has no truth; name its column in format.response_key")
    return task.truth


def unreadable(task: Task, what: str) -> UnreadableTruth:
    """Return the error for a truth that is not `what`."""
    return UnreadableTruth(
        f"the truth of {where(task)} is {str(task.truth)[:80]!r}; it must be {what}"
    )


def where(task: Task) -> str:
    return f"task {task.taskset}[{task.index}]"

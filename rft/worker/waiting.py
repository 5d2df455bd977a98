"""Current activities of this process, for display: named, counted, and with their duration.

    works("train step 3")                    work of this process
    waits("question", "judge helpful")       one of many requests to an outside service
    idles("batch 3 waits for room")          a part waits for another part, which reports its own work

Depends on no run.  Invariant: of nested waits the innermost counts, but no wait inside an `opaque`
one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from msgspec import Struct

ACTIVITY_S = 2.0  # limit for a process to return its activities
_MOST = 4  # most entries of a line
Text = str | Callable[[], str]


class Activity(Struct, frozen=True):
    """Work `text`, or `count` of `noun` that wait for `text`; `seconds` since the first began."""

    text: str
    noun: str
    idle: bool  # waits for another part of the run
    count: int
    seconds: float


@dataclass(eq=False, slots=True)
class _Ongoing:
    text: Text
    noun: str = ""
    idle: bool = False
    count: int = 1
    opaque: bool = False
    since: float = 0.0
    inside: int = 0  # number of nested waits


_ONGOING: dict[_Ongoing, None] = {}
_INNERMOST: ContextVar[_Ongoing | None] = ContextVar("innermost", default=None)


def clock() -> float:
    """Return seconds of the event loop's clock, or of the process's without a loop."""
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:
        return time.monotonic()


@contextmanager
def _entered(entry: _Ongoing) -> Iterator[None]:
    entry.since = clock()
    _ONGOING[entry] = None
    try:
        yield
    finally:
        del _ONGOING[entry]


def works(text: Text) -> AbstractContextManager[None]:
    """Show work on `text` during the block; a callable is evaluated for each display."""
    return _entered(_Ongoing(text))


def idles(text: Text) -> AbstractContextManager[None]:
    """Show a part that waits for another part during the block."""
    return _entered(_Ongoing(text, idle=True))


@contextmanager
def waits(noun: str, whom: str, *, count: int = 1, opaque: bool = False) -> Iterator[None]:
    """Show `count` of `noun` that wait for `whom`; `opaque`: hide waits inside."""
    outer = _INNERMOST.get()
    if outer is not None and outer.opaque:
        yield
        return
    entry = _Ongoing(whom, noun, count=count, opaque=opaque)
    before = _INNERMOST.set(entry)
    if outer is not None:
        outer.inside += 1
    entry.since = clock()
    _ONGOING[entry] = None
    try:
        yield
    finally:
        del _ONGOING[entry]
        _INNERMOST.reset(before)
        if outer is not None:
            outer.inside -= 1


def activities() -> list[Activity]:
    """Return current activities of this process, oldest first."""
    now = clock()
    alike: dict[tuple[str, str, bool], list[_Ongoing]] = {}
    for entry in list(_ONGOING):
        if not entry.inside:
            text = entry.text if isinstance(entry.text, str) else entry.text()
            alike.setdefault((text, entry.noun, entry.idle), []).append(entry)
    counted = [
        Activity(*key, sum(e.count for e in same), now - min(e.since for e in same))
        for key, same in alike.items()
    ]
    return sorted(counted, key=lambda a: -a.seconds)


def sentence(current: Sequence[Activity]) -> str:
    """Describe in one line the work, then waits; without waits the idle parts."""
    named = [a for a in current if not a.noun and not a.idle]
    named += [a for a in current if a.noun] or [a for a in current if a.idle]
    more = [f"and {len(named) - _MOST} more"] if len(named) > _MOST else []
    return (
        "; ".join([*map(_words, named[:_MOST]), *more])
        or "no part of the run says what it waits for; see its logs"
    )


def _words(a: Activity) -> str:
    text = a.text
    if a.noun:
        verb = f"{a.noun} waits" if a.count == 1 else f"{a.noun}s wait"
        text = f"{a.count} {verb} for {a.text}"
    return f"{text}, {a.seconds:.0f} s"

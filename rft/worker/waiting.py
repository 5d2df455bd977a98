"""What this process works on and whom it waits for, for people who look on: named, counted, and
since when.

    works("train step 3")                    a piece of work of this process
    waits("question", "judge helpful")       one of perhaps many that somebody outside of the run's own order has to answer
    idles("batch 3 waits for room")          a part of the run waits for another one, which says itself what it works on

Knows nothing of the run.  Invariant: of waits inside each other the innermost counts, and none
inside one that is `whole`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from msgspec import Struct

ACTIVITY_S = 2.0  # for a process to say what it works on
_MOST = 4  # entries of a line
Text = str | Callable[[], str]


class Activity(Struct, frozen=True):
    """Work, or with a `noun` so many of them that wait for `text`; `seconds` of the first."""

    text: str
    noun: str
    idle: bool  # for another part of the run
    count: int
    seconds: float


@dataclass(eq=False, slots=True)
class _Ongoing:
    text: Text
    noun: str = ""
    idle: bool = False
    count: int = 1
    whole: bool = False
    since: float = 0.0
    inside: int = 0  # waits inside of this one


_ONGOING: dict[_Ongoing, None] = {}
_INNERMOST: ContextVar[_Ongoing | None] = ContextVar("innermost", default=None)


def clock() -> float:
    """Seconds of the event loop, or where there is none of the process."""
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
    """While this process works on `text`, or on what that returns at the moment."""
    return _entered(_Ongoing(text))


def idles(text: Text) -> AbstractContextManager[None]:
    """While a part of the run waits for another one."""
    return _entered(_Ongoing(text, idle=True))


@contextmanager
def waits(noun: str, whom: str, *, count: int = 1, whole: bool = False) -> Iterator[None]:
    """While `count` of `noun` wait for `whom`; `whole`: whatever that waits for in its turn."""
    outer = _INNERMOST.get()
    if outer is not None and outer.whole:
        yield
        return
    entry = _Ongoing(whom, noun, count=count, whole=whole)
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
    """Of this process at this moment; what began first comes first."""
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


def sentence(found: Sequence[Activity]) -> str:
    """One line: the work, then who is waited for; where nobody is, which part of the run waits for
    which.
    """
    named = [a for a in found if not a.noun and not a.idle]
    named += [a for a in found if a.noun] or [a for a in found if a.idle]
    more = [f"and {len(named) - _MOST} more"] if len(named) > _MOST else []
    return (
        "; ".join([*map(_words, named[:_MOST]), *more])
        or "no part of the run says what it waits for; see its logs"
    )


def _words(a: Activity) -> str:
    one = a.count == 1
    text = (
        f"{a.count} {a.noun}{'' if one else 's'} wait{'s' if one else ''} for {a.text}"
        if a.noun
        else a.text
    )
    return f"{text}, {a.seconds:.0f} s"

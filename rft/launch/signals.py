"""SIGINT and SIGTERM as events of a run's loop, and what stands for them where a run is in another
thread.

Knows no run.  Invariant: handlers are put back when the context ends.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Awaitable
from typing import Self, TypeVar

from rft.errors import Interrupted
from rft.launch.rundir import INTERRUPTED
from rft.sync.waits import race

T = TypeVar("T")
_OPEN: set[Signals] = set()


def interrupt() -> None:
    """As Ctrl-C does: ask the runs of other threads of this process to end."""
    for signals in list(_OPEN):
        signals.loop.call_soon_threadsafe(signals.arrived)


def _taken() -> tuple[int, ...]:
    return (
        (signal.SIGINT, signal.SIGTERM)
        if threading.current_thread() is threading.main_thread()
        else ()
    )


class Signals:
    """SIGINT and SIGTERM as events of this loop while the context is open; a second one is told
    apart from the first.

    In another thread than the main one, which gets no signals, `interrupt` stands for them.
    """

    def __init__(self) -> None:
        self._events = (asyncio.Event(), asyncio.Event())
        self.loop = asyncio.get_running_loop()

    def __enter__(self) -> Self:
        self.take()
        _OPEN.add(self)
        return self

    def take(self) -> None:
        """Takes the signals, also back from a library that has put its own handlers in place: Ray's
        ends the program at a second signal.
        """
        for number in _taken():
            self.loop.add_signal_handler(number, self.arrived)

    def __exit__(self, *_: object) -> None:
        _OPEN.discard(self)
        for number in _taken():
            self.loop.remove_signal_handler(number)

    def arrived(self) -> None:
        first, second = self._events
        (second if first.is_set() else first).set()

    async def wait(self, count: int = 1) -> None:
        """Until the first (or second) signal has arrived."""
        await self._events[count - 1].wait()

    async def guard(self, work: Awaitable[T]) -> T:
        """The result of `work`; raises Interrupted, after cancelling it, when a signal arrives
        first.
        """
        async with race(work, self.wait()) as (task, _):
            if not task.done():
                raise Interrupted(INTERRUPTED)
            result: T = task.result()
            return result

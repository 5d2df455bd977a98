"""SIGINT and SIGTERM as events of a run's loop, and `interrupt` for runs in other threads.

Depends on no run.  Invariant: handlers are restored when the context ends.
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
    """Ask the runs in other threads of this process to end, as Ctrl-C does."""
    for signals in list(_OPEN):
        signals.loop.call_soon_threadsafe(signals.arrived)


def _numbers() -> tuple[int, ...]:
    return (
        (signal.SIGINT, signal.SIGTERM)
        if threading.current_thread() is threading.main_thread()
        else ()
    )


class Signals:
    """The first and the second SIGINT or SIGTERM as events of this loop while the context is open.

    Only the main thread gets signals; in other threads `interrupt` replaces them.
    """

    def __init__(self) -> None:
        self._events = (asyncio.Event(), asyncio.Event())
        self.loop = asyncio.get_running_loop()

    def __enter__(self) -> Self:
        self.install()
        _OPEN.add(self)
        return self

    def install(self) -> None:
        """Install the handlers, also again after a library such as Ray installed its own."""
        for number in _numbers():
            self.loop.add_signal_handler(number, self.arrived)

    def __exit__(self, *_: object) -> None:
        _OPEN.discard(self)
        for number in _numbers():
            self.loop.remove_signal_handler(number)

    def arrived(self) -> None:
        first, second = self._events
        (second if first.is_set() else first).set()

    async def wait(self, count: int = 1) -> None:
        """Wait for the first (or second) signal."""
        await self._events[count - 1].wait()

    async def guard(self, work: Awaitable[T]) -> T:
        """Await `work`; on a signal, cancel it and raise Interrupted."""
        async with race(work, self.wait()) as (task, _):
            if not task.done():
                raise Interrupted(INTERRUPTED)
            result: T = task.result()
            return result

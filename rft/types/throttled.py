"""What a model client and its caller share while a call is under way.

Throttled: the clock of the caller's deadline, which is stopped while the request waits before it is
sent.  Resent: it is sent again although the server may have worked on it, so both may cost.
Unpaid: the last request costs nothing, because it did not arrive or was refused.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from rft.worker.threads import Clock


async def _free() -> None:
    """The caller pays nothing."""


def _unpaid() -> None:
    """The caller counts no costs."""


THROTTLED: ContextVar[Clock] = ContextVar("throttled", default=Clock())  # noqa: B039  # the default is nobody's
# awaited before the request is sent again; what it raises ends the call
RESENT: ContextVar[Callable[[], Awaitable[None]]] = ContextVar("resent", default=_free)
# called before the error is raised
UNPAID: ContextVar[Callable[[], None]] = ContextVar("unpaid", default=_unpaid)


@contextmanager
def calling(
    clock: Clock, resent: Callable[[], Awaitable[None]], unpaid: Callable[[], None]
) -> Iterator[None]:
    """While open, the model client that is called finds these."""
    hooks: tuple[tuple[ContextVar[Any], Any], ...] = (
        (THROTTLED, clock),
        (RESENT, resent),
        (UNPAID, unpaid),
    )
    before = [(var, var.set(hook)) for var, hook in hooks]
    try:
        yield
    finally:
        for var, token in before:
            var.reset(token)


class RateLimiter:
    """At most `per_minute` on average: a call may begin once the time of those before it has
    passed.
    """

    def __init__(self, per_minute: float | None) -> None:
        self._each_s = 0.0 if per_minute is None else 60.0 / per_minute
        self._next = 0.0

    async def acquire(self, amount: float) -> None:
        """Waits, throttled, until `amount` more may begin."""
        now = time.monotonic()
        mine = max(now, self._next)
        self._next = mine + amount * self._each_s
        if self._each_s and mine > now:
            with THROTTLED.get().stopped():
                await asyncio.sleep(mine - now)

    def correct(self, amount: float) -> None:
        """A call took `amount` more than it had acquired (or, negative, fewer)."""
        self._next += amount * self._each_s

"""Hooks that a caller gives a model client during a call, and a rate limiter.

THROTTLED: clock of the caller's deadline, stopped while a request waits before it is sent.  RESENT:
the request is sent again although the server may have processed it, so both may cost.  UNPAID: the
last request costs nothing, because it did not arrive or was refused.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from rft.worker.threads import Clock


async def _free() -> None: ...


def _unpaid() -> None: ...


THROTTLED: ContextVar[Clock] = ContextVar("throttled", default=Clock())  # noqa: B039  # the default is unused
# awaited before the request is sent again; its exception ends the call
RESENT: ContextVar[Callable[[], Awaitable[None]]] = ContextVar("resent", default=_free)
# called before the error is raised
UNPAID: ContextVar[Callable[[], None]] = ContextVar("unpaid", default=_unpaid)


@contextmanager
def calling(
    clock: Clock, resent: Callable[[], Awaitable[None]], unpaid: Callable[[], None]
) -> Iterator[None]:
    """Set the hooks of model calls inside the block."""
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
    """At most `per_minute` on average: each amount delays later calls by its share of a minute."""

    def __init__(self, per_minute: float | None) -> None:
        self._each_s = 0.0 if per_minute is None else 60.0 / per_minute
        self._next = 0.0

    async def acquire(self, amount: float) -> None:
        """Wait, throttled, until `amount` more may begin."""
        now = time.monotonic()
        start = max(now, self._next)
        self._next = start + amount * self._each_s
        if self._each_s and start > now:
            with THROTTLED.get().stopped():
                await asyncio.sleep(start - now)

    def correct(self, amount: float) -> None:
        """Correct the limiter: a call took `amount` more than acquired (fewer if negative)."""
        self._next += amount * self._each_s

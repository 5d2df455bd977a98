"""Which requests an engine takes while it is about to pause for new weights: those that can go
elsewhere do.

Knows no weights.  Invariant: a request that was refused has not begun, and one that may wait is
never refused.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from contextlib import contextmanager

from rft.types.ports import GenerateRequest


class Draining(Exception):
    """The engine is about to load weights; ask another one, or ask it again with `may_wait`."""


class Admission:
    """Counts what one engine has under way; `name` is the engine's."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.under_way = 0  # completions
        self._draining = False
        # of whoever waits for the last one
        self._idle: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    @contextmanager
    def of(self, request: GenerateRequest) -> Iterator[None]:
        """While `request` is answered.  Raises Draining."""
        if self._draining and not request.may_wait:
            raise Draining(f"{self._name} is about to load new weights")
        self.under_way += request.n
        try:
            yield
        finally:
            self.under_way -= request.n
            if not self.under_way and self._idle is not None:
                loop, event = self._idle
                loop.call_soon_threadsafe(event.set)

    async def drain(self, timeout_s: float) -> None:
        """From now on requests that need not wait are refused; returns when nothing is under way,
        or after `timeout_s` seconds.
        """
        self._draining = True
        if not self.under_way:
            return
        self._idle = asyncio.get_running_loop(), asyncio.Event()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle[1].wait()
        self._idle = None

    def admit(self) -> None:
        """Every request is taken again."""
        self._draining = False

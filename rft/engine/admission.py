"""Decide which requests an engine accepts before it pauses for new weights.

Requests that another engine can answer are refused.  Depends on no weights.  Invariant: a refused
request has not begun, and a request that may wait is never refused.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from contextlib import contextmanager

from rft.types.ports import GenerateRequest


class Draining(Exception):
    """The engine is about to load weights; send the request to another engine or set `may_wait`."""


class Admission:
    """Counts the requests in progress of the engine `name`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.under_way = 0  # completions
        self._draining = False
        # event loop and event of the caller of `drain`
        self._idle: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    @contextmanager
    def counted(self, request: GenerateRequest) -> Iterator[None]:
        """Count `request` as in progress inside the block.  Raises Draining."""
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
        """Refuse requests that need not wait; return when none is in progress or after `timeout_s`
        seconds.
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
        """Accept all requests again."""
        self._draining = False

"""Work that another task may end early, such as a service or an explorer.

Invariant: `stop` makes `run` return; a cancelled caller of `run` is cancelled after the work has
ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class StoppableWork:
    """One piece of work, started at most once."""

    def __init__(self) -> None:
        self._work: asyncio.Task[None] | None = None
        self._stopping = False

    async def run(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run the work and raise its errors; after `stop` nothing starts."""
        if self._stopping:
            return
        self._work = asyncio.create_task(work())
        try:
            await asyncio.shield(self._work)
        except asyncio.CancelledError:
            if not self._stopping:
                self._work.cancel()
                # further errors have no receiver
                await asyncio.gather(self._work, return_exceptions=True)
                raise

    async def stop(self) -> None:
        """Stop the work and return when it has ended."""
        self._stopping = True
        if self._work is not None:
            self._work.cancel()
            await asyncio.wait({self._work})

"""Work that another task may end early, as a service or an explorer is stopped.

Invariant: `stop` makes `run` return; a cancelled caller of `run` is cancelled once the work has
ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class StoppableWork:
    """One piece of work, begun at most once."""

    def __init__(self) -> None:
        self._work: asyncio.Task[None] | None = None
        self._stopping = False

    async def run(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Raises what the work raises; nothing begins after `stop`."""
        if self._stopping:
            return
        self._work = asyncio.create_task(work())
        try:
            await asyncio.shield(self._work)
        except asyncio.CancelledError:
            if not self._stopping:
                self._work.cancel()
                # nobody is there to hear what else went wrong
                await asyncio.gather(self._work, return_exceptions=True)
                raise

    async def stop(self) -> None:
        """Returns when the work has ended."""
        self._stopping = True
        if self._work is not None:
            self._work.cancel()
            await asyncio.wait({self._work})

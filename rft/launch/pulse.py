"""Whether the process behind calls under way still answers.  Knows no Ray: it is given a beat, which that process answers at once.

Invariant: a process is asked only while a call is under way, by one watcher however many calls there are.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from typing import TypeVar

import psutil

from rft.engine.watch import Usage, Watch, usage
from rft.errors import EngineStalled, RunFailed

log = logging.getLogger(__name__)
T = TypeVar("T")
Beat = Callable[[], Awaitable[tuple[str, int]]]
"""The machine's name and the process's number, from the process itself."""


class Pulse:
    """Of one process.  Limits as in `rft.engine.watch`: a step is an answer.  `error`, ending with `remedy`, says that it hangs."""

    def __init__(
        self,
        name: str,
        beat: Beat,
        stall_s: float | None,
        step_s: float | None,
        *,
        error: type[RunFailed] = EngineStalled,
        remedy: str = "",
    ) -> None:
        self._name, self._beat, self._limits, self._error, self._remedy = name, beat, (stall_s, step_s), error, remedy
        self._place: tuple[str, int] | None = None
        self._deadlines: set[asyncio.Timeout] = set()  # of the calls under way
        self._watching: asyncio.Task[None] | None = None
        self.hung = ""  # why it counts as hung since its last answer

    async def during(self, call: Awaitable[T]) -> T:
        """What `call` gives.  Raises `error` once the process counts as hung."""
        if self._watching is None or self._watching.done():
            self._watching = asyncio.ensure_future(self._watch())
        try:
            async with asyncio.timeout(None) as deadline:
                self._deadlines.add(deadline)
                try:
                    return await call
                finally:
                    self._deadlines.discard(deadline)
        except TimeoutError:
            if not deadline.expired():  # the call's own
                raise
            raise self._error(f"{self._name} hangs: {self.hung}{self._remedy}") from None

    async def _watch(self) -> None:
        """Until nothing is under way, the process has died (the calls say so themselves), or it hangs."""
        watch = Watch(*self._limits, self._usage)
        beat: asyncio.Future[tuple[str, int]] | None = None
        while self._deadlines:
            beat = beat or asyncio.ensure_future(self._beat())
            done, _ = await asyncio.wait({beat}, timeout=watch.interval_s)
            if done:
                if beat.cancelled() or beat.exception() is not None:
                    return
                self._place, beat, self.hung = beat.result(), None, ""
                await asyncio.sleep(watch.interval_s)
                watch.progress()
            elif why := await asyncio.to_thread(watch.look):
                self.hung = f"its process answers nothing, {why}"
                log.error("%s hangs: %s", self._name, self.hung)
                beat.add_done_callback(lambda b: b.cancelled() or b.exception())  # nobody waits for it any more
                for deadline in self._deadlines:
                    if not deadline.expired():
                        deadline.reschedule(0)
                return

    def _usage(self) -> Usage | None:
        """Of the process alone, not of those that it has started: they may be well.  None: not known, gone, or on another machine."""
        if self._place is None or self._place[0] != os.uname().nodename or not psutil.pid_exists(self._place[1]):
            return None
        return usage([self._place[1]], family=False)

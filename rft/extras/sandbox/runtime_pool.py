"""A bound on runtimes: work with them in threads, at most so many at a time.

Invariant: when `use` returns or raises, also when it is cancelled, the runtimes and snapshots of
its work are gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable
from typing import TypeVar

from rft.types.runtimes import AgentRuntime, RuntimeDriver, RuntimeFailed, RuntimeFiles, RuntimeSpec
from rft.worker.job_pool import JobPool

T = TypeVar("T")


class RuntimeLease:
    """The runtimes of one piece of work; it has one at a time."""

    def __init__(self, driver: RuntimeDriver) -> None:
        self._driver = driver
        self._lock = threading.Lock()
        self._runtime: AgentRuntime | None = None
        self._snapshots: list[RuntimeFiles] = []
        self._ended = False

    def start(self, spec: RuntimeSpec, *, files: RuntimeFiles | None = None) -> AgentRuntime:
        """Kill the present runtime and start another; see `RuntimeDriver.start`."""
        self._kill()
        runtime = self._driver.start(spec, files=files)
        with self._lock:
            self._runtime = runtime
            ended = self._ended
        if ended:
            self._kill()
            raise RuntimeFailed("the work has ended")
        return runtime

    def snapshot(self) -> RuntimeFiles:
        """Return a snapshot of the present runtime, dropped at the end of the work."""
        assert self._runtime is not None
        snapshot = self._runtime.snapshot()
        self._snapshots.append(snapshot)
        return snapshot

    def interrupt(self) -> None:
        """Kill the runtime, from any thread; the work fails."""
        with self._lock:
            self._ended = True
        self._kill()

    def end(self) -> None:
        with contextlib.ExitStack() as stack:
            for snapshot in self._snapshots:
                stack.callback(snapshot.drop)
            self._kill()

    def _kill(self) -> None:
        with self._lock:
            runtime, self._runtime = self._runtime, None
        if runtime is not None:
            runtime.kill()


class RuntimePool(JobPool):
    """At most `size` runtimes of a driver at a time.  Usable from any thread and event loop."""

    def __init__(self, driver: RuntimeDriver, *, size: int | None = None) -> None:
        super().__init__("runtimes", size=size or max(2, min(16, os.cpu_count() or 1)))
        self._driver = driver
        self._leases: set[RuntimeLease] = set()

    async def use(self, work: Callable[[RuntimeLease], T]) -> T:
        """Return `work(lease)`, from a thread; a cancelled call interrupts it and waits for its end."""
        lease = RuntimeLease(self._driver)
        working = asyncio.ensure_future(self._done(lambda: self._worked(work, lease)))
        try:
            return await asyncio.shield(working)
        except asyncio.CancelledError:
            await asyncio.shield(asyncio.to_thread(lease.interrupt))
            working.cancel()  # where it has not begun
            await asyncio.wait({working})
            raise

    def _worked(self, work: Callable[[RuntimeLease], T], lease: RuntimeLease) -> T:
        with self._lock:
            self.calls += 1
            self._leases.add(lease)
        try:
            return work(lease)
        finally:
            lease.end()
            with self._lock:
                self._leases.discard(lease)

    def close(self) -> None:
        """Interrupt all work and wait for its end.  The pool can be used again."""
        self._end_jobs(self._interrupt)

    def _interrupt(self) -> None:
        with self._lock:
            leases = list(self._leases)
        for lease in leases:
            lease.interrupt()

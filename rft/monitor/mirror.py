"""One tracker in one thread, fed through a queue.

A tracker may be slow, hang or fail; the run must neither wait for it nor lose sight of it.  Knows no metrics, only calls.
Invariant: after the first failure nothing is called any more, and `on_failure` has been called exactly once.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable

from rft.errors import DeadlineExceeded
from rft.monitor.base import Tracker

Call = Callable[[Tracker], None]
CAPACITY = 10_000  # calls that may wait; a tracker further behind than that counts as failed


class Mirror:
    """Calls `make()` and everything submitted in a thread of its own."""

    def __init__(self, kind: str, make: Callable[[], Tracker], on_failure: Callable[[str, BaseException], None]) -> None:
        self.kind = kind
        self._on_failure = on_failure
        self._calls: queue.Queue[Call | None] = queue.Queue(CAPACITY)
        self._failed = threading.Event()
        self._lock = threading.Lock()
        # A daemon: a tracker that hangs must not keep the program from ending; `close` waits for the others.
        self._thread = threading.Thread(target=self._run, args=(make,), name=f"monitor-{kind}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def failed(self) -> bool:
        return self._failed.is_set()

    def submit(self, call: Call | None) -> None:
        """Call later, in order.  None ends the thread after everything before it."""
        if self.failed:
            return
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._fail(DeadlineExceeded(f"monitor {self.kind} is {CAPACITY} records behind; is its server reachable?"))

    async def close(self, deadline_s: float) -> None:
        """Wait until the tracker has everything, at most `deadline_s`; being late is a failure like any other."""
        self.submit(None)
        await asyncio.to_thread(self._thread.join, deadline_s)
        if self._thread.is_alive() and not self.failed:
            self._fail(DeadlineExceeded(f"monitor {self.kind} did not finish within {deadline_s:g} s"))

    def _run(self, make: Callable[[], Tracker]) -> None:
        try:
            tracker = make()
            while not self.failed and (call := self._calls.get()) is not None:
                call(tracker)
            tracker.close()
        except BaseException as e:  # the border to foreign libraries, some of which call sys.exit
            self._fail(e)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            if self.failed:
                return
            self._failed.set()
        self._on_failure(self.kind, error)

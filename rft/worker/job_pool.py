"""Pools of jobs in threads and in worker processes, with counters, memo, deadlines and clean-up.

Invariant: a call returns the worker's answer or raises; no default answer exists.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import time
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

import xxhash

from rft.worker.process import JSON, Codec, WorkerDied, WorkerError, WorkerProcess
from rft.worker.threads import CLOCK

T = TypeVar("T")
_MEMO = 65536
_POOLS: weakref.WeakSet[JobPool] = weakref.WeakSet()


class JobPool:
    """At most `size` jobs at a time, each in a thread.  Usable from any thread and event loop."""

    def __init__(self, name: str, *, size: int) -> None:
        self.name = name  # prefix of the metrics <name>/calls, memo_hits, timeouts, restarts
        self.calls = self.memo_hits = self.timeouts = self.restarts = 0
        self._size = size
        self._threads: ThreadPoolExecutor | None = None
        self._running: set[Future[Any]] = set()
        self._memo: OrderedDict[bytes, Any] = OrderedDict()
        self._lock = threading.Lock()
        _POOLS.add(self)

    async def _answered(self, key: bytes, job: Callable[[], T], keep: Callable[[T], bool]) -> T:
        """Run `job`, or return its memoised answer for `key`; `keep`: whether to memoise an answer."""
        with self._lock:
            self.calls += 1
            if key in self._memo:
                self.memo_hits += 1
                self._memo.move_to_end(key)
                cached: T = self._memo[key]
                return cached
        answer = await self._done(job)
        if keep(answer):
            with self._lock:
                self._memo[key] = answer
                if len(self._memo) > _MEMO:
                    self._memo.popitem(last=False)
        return answer

    async def _done(self, job: Callable[[], T]) -> T:
        """Run `job` in a thread; the caller's clock is stopped until a thread is free."""
        loop = asyncio.get_running_loop()
        waiting = ExitStack()

        def work() -> T:
            if not loop.is_closed():
                loop.call_soon_threadsafe(waiting.close)
            return job()

        with waiting:
            waiting.enter_context(CLOCK.get().stopped())
            return await asyncio.wrap_future(self._submit(work))

    def _submit(self, job: Callable[[], T]) -> Future[T]:
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(self._size, thread_name_prefix=self.name)
            future = self._threads.submit(job)
            self._running.add(future)
        future.add_done_callback(self._running.discard)
        return future

    def _end_jobs(self, abort: Callable[[], None], *, after_s: float = 0.0) -> None:
        """Wait for all jobs; `abort` ends those that still run after `after_s`."""
        with self._lock:
            threads = self._threads
            self._threads = None
        if threads is not None:
            threads.shutdown(wait=False, cancel_futures=True)
        if not after_s or wait(set(self._running), after_s).not_done:
            abort()
        if threads is not None:
            threads.shutdown(wait=True)

    def close(self) -> None:
        """End running jobs.  The pool can be used again."""
        raise NotImplementedError


class WorkerPool(JobPool):
    """At most `size` processes running `python -m module`, started with the first call.

    `memo`: equal requests have equal answers, so memoise them.
    """

    def __init__(
        self,
        name: str,
        module: str,
        *,
        size: int | None = None,
        memo: bool = True,
        codec: Codec = JSON,
        env: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(
            name, size=size if size is not None else max(1, min(8, os.cpu_count() or 1))
        )
        self._module = module
        self._remembers = memo
        self._codec = codec
        self._env = env
        self._idle: list[WorkerProcess] = []
        self._all: set[WorkerProcess] = set()
        # killed, not yet waited for: calls do not pay for that time
        self._ending: set[WorkerProcess] = set()
        self._closing = False

    async def call(self, request: Any, timeout_s: float) -> Any:
        """Return the worker's answer to `request`, which may be memoised.

        Raises TimeoutError after `timeout_s` of computing (the worker is killed), WorkerError with
        its traceback, or WorkerDied.
        """
        frame = self._codec.pack(request)
        key = xxhash.xxh3_128_digest(frame)
        return await self._answered(
            key, lambda: self._call(frame, timeout_s), lambda _: self._remembers
        )

    def ask(self, frame: bytes, timeout_s: float) -> Any:
        """Return the answer to a packed request, in the caller's thread.

        Raises as `call`.
        """
        return self._call(frame, timeout_s)

    def map(self, requests: Iterable[Any]) -> Iterator[Any]:
        """Yield answers in the order of the requests, which are read lazily.  Raises like `call`."""
        waiting: deque[Future[Any]] = deque()
        try:
            for request in requests:
                waiting.append(self._submit(partial(self._call, self._codec.pack(request), None)))
                if len(waiting) > self._size:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()

    def _call(self, frame: bytes, timeout_s: float | None) -> Any:
        remaining_s = timeout_s  # for both attempts, without the start of a worker
        for attempt in (1, 2):
            worker = self._take()
            began = time.monotonic()
            try:
                reply = self._codec.unpack(worker.ask(frame, remaining_s))
            except TimeoutError:
                self._drop(worker)
                with self._lock:
                    self.timeouts += 1
                raise TimeoutError(
                    f"{self.name} worker was killed after {timeout_s:g} s without an answer"
                ) from None
            except OSError as e:
                self._drop(worker)
                self._reap()
                if attempt == 2 or self._closing:
                    raise WorkerDied(
                        f"{self.name} worker ended without an answer (exit status "
                        f"{worker.returncode}), twice"
                    ) from e
                if remaining_s is not None:
                    remaining_s -= time.monotonic() - began
                continue
            with self._lock:
                self._idle.append(worker)
            if "error" in reply:
                raise WorkerError(f"{self.name} worker: {reply['error']}")
            return reply["answer"]
        raise AssertionError("unreachable")

    def _take(self) -> WorkerProcess:
        self._reap()
        with self._lock:
            if self._closing:
                raise WorkerDied(f"the {self.name} pool is being closed")
            if self._idle:
                return self._idle.pop()
            worker = WorkerProcess(self._module, env=self._env)
            self._all.add(worker)
        try:
            worker.wait_ready()
        except WorkerDied:
            self._drop(worker)
            self._reap()
            raise
        return worker

    def _drop(self, worker: WorkerProcess) -> None:
        worker.end()
        with self._lock:
            self._ending.add(worker)
            self.restarts += 1

    def _reap(self) -> None:
        """Wait for killed workers, so that there are never more than `size`."""
        with self._lock:
            ending, self._ending = self._ending, set()
        for worker in ending:
            worker.kill()
            worker.release()
        with self._lock:
            self._all -= ending

    def pids(self) -> list[int]:
        """Return process ids of the living workers."""
        with self._lock:
            return [w.pid for w in self._all]

    def close(self) -> None:
        """Kill all workers and wait for them.  The next call starts new ones."""
        with self._lock:
            self._closing = True
            self._idle = []
        self._end_jobs(self._kill)  # a thread that waits for a worker sees the end of the pipe
        with self._lock:
            for worker in self._all:
                worker.release()
            self._all.clear()
            self._ending.clear()
            self._closing = False

    def _kill(self) -> None:
        with self._lock:
            workers = list(self._all)
        for worker in workers:
            worker.kill()


def close_all() -> None:
    """Close every pool of this process."""
    for pool in list(_POOLS):
        pool.close()


def counts() -> dict[str, int]:
    """Sum metrics "<name>/calls", "/memo_hits", "/timeouts", "/restarts" of used pools by name."""
    total: Counter[str] = Counter()
    for pool in list(_POOLS):
        if pool.calls:
            for what in ("calls", "memo_hits", "timeouts", "restarts"):
                total[f"{pool.name}/{what}"] += getattr(pool, what)
    return dict(total)


atexit.register(close_all)

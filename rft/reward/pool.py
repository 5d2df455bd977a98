"""Worker processes for rewards that may hang: killed at a deadline, started again, never trusted with a default.

Requests and answers are JSON with a 4-byte length in front, over the worker's stdin and stdout; nothing is pickled.  Workers
start with the first call, die with their parent, and are gone after `close`.
Invariant: a call ends with the worker's own answer or raises.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO, Protocol

import xxhash

from rft.parent import die_with_parent

START_TIMEOUT_S = 120.0  # importing sympy on a busy machine
_MEMO = 65536
_POOLS: weakref.WeakSet[Counted] = weakref.WeakSet()


class Counted(Protocol):
    """Something with processes of its own: a pool of workers, a sandbox."""

    name: str
    calls: int
    memo_hits: int
    timeouts: int
    restarts: int

    def close(self) -> None: ...


class WorkerError(RuntimeError):
    """The worker answered with an exception; its traceback is the message."""


class WorkerDied(RuntimeError):
    """The worker process ended without an answer, twice."""


class WorkerPool:
    """At most `size` processes running `python -m module`.  Usable from any thread and any event loop.

    `memo`: equal requests have equal answers, and are answered from memory.
    """

    def __init__(self, name: str, module: str, *, size: int | None = None, memo: bool = True) -> None:
        self.name = name
        self.calls = self.memo_hits = self.timeouts = self.restarts = 0
        self._module = module
        self._size = size if size is not None else max(1, min(8, os.cpu_count() or 1))
        self._threads: ThreadPoolExecutor | None = None
        self._idle: list[_Worker] = []
        self._all: set[_Worker] = set()
        self._remembers = memo
        self._memo: OrderedDict[bytes, Any] = OrderedDict()
        self._closing = False
        self._lock = threading.Lock()
        register(self)

    async def call(self, request: dict[str, Any], timeout_s: float) -> Any:
        """The worker's answer to `request`, from memory if an equal one was answered.

        Raises TimeoutError after `timeout_s` of computing (the worker is killed), WorkerError with its traceback, or WorkerDied.
        """
        frame = json.dumps(request, sort_keys=True).encode()
        key = xxhash.xxh3_128_digest(frame)
        with self._lock:
            self.calls += 1
            if key in self._memo:
                self.memo_hits += 1
                self._memo.move_to_end(key)
                return self._memo[key]
            if self._threads is None:
                self._threads = ThreadPoolExecutor(self._size, thread_name_prefix=f"reward-{self.name}")
            job = self._threads.submit(self._call, frame, timeout_s)
        answer = await asyncio.wrap_future(job)
        if not self._remembers:
            return answer
        with self._lock:
            self._memo[key] = answer
            if len(self._memo) > _MEMO:
                self._memo.popitem(last=False)
        return answer

    def _call(self, frame: bytes, timeout_s: float) -> Any:
        for attempt in (1, 2):
            worker = self._take()
            try:
                reply = worker.ask(frame, timeout_s)
            except TimeoutError:
                self._drop(worker)
                with self._lock:
                    self.timeouts += 1
                raise TimeoutError(f"{self.name} worker was killed after {timeout_s:g} s without an answer") from None
            except (EOFError, OSError) as e:
                self._drop(worker)
                if attempt == 2 or self._closing:
                    raise WorkerDied(
                        f"{self.name} worker ended without an answer (exit status {worker.returncode}), twice"
                    ) from e
                continue
            with self._lock:
                self._idle.append(worker)
            if "error" in reply:
                raise WorkerError(f"{self.name} worker: {reply['error']}")
            return reply["answer"]
        raise AssertionError("unreachable")

    def _take(self) -> _Worker:
        with self._lock:
            if self._closing:
                raise WorkerDied(f"the {self.name} pool is being closed")
            if self._idle:
                return self._idle.pop()
            worker = _Worker(self._module)
            self._all.add(worker)
        try:
            worker.wait_ready()
        except WorkerDied:
            self._drop(worker)
            raise
        return worker

    def _drop(self, worker: _Worker) -> None:
        worker.kill()
        worker.release()
        with self._lock:
            self._all.discard(worker)
            self.restarts += 1

    def pids(self) -> list[int]:
        """Process ids of the living workers."""
        with self._lock:
            return [w.pid for w in self._all]

    def close(self) -> None:
        """Kills all workers and waits for them.  The next call starts new ones."""
        with self._lock:
            self._closing = True
            threads, self._threads = self._threads, None
            workers, self._idle = list(self._all), []
        for worker in workers:
            worker.kill()  # a thread that waits for it sees the end of the pipe
        if threads is not None:
            threads.shutdown(wait=True, cancel_futures=True)
        with self._lock:
            for worker in self._all:
                worker.kill()
                worker.release()
            self._all.clear()
            self._closing = False


class _Worker:
    def __init__(self, module: str) -> None:
        self._module = module
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "RFT_PARENT": str(os.getpid())}
        self._process = subprocess.Popen(
            [sys.executable, "-m", module], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        self._lock = threading.Lock()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    def wait_ready(self) -> None:
        """Waits until the worker has imported what it needs.  Raises WorkerDied."""
        try:
            self._read(START_TIMEOUT_S)
        except (EOFError, TimeoutError, OSError) as e:
            raise WorkerDied(f"{self._module} did not start; see its message in the log") from e

    def ask(self, frame: bytes, timeout_s: float) -> dict[str, Any]:
        self._in.write(len(frame).to_bytes(4, "big") + frame)
        self._in.flush()
        reply: dict[str, Any] = json.loads(self._read(timeout_s))
        return reply

    def _read(self, timeout_s: float) -> bytes:
        deadline = time.monotonic() + timeout_s
        size = int.from_bytes(self._exactly(4, deadline), "big")
        return self._exactly(size, deadline)

    def _exactly(self, count: int, deadline: float) -> bytes:
        got = bytearray()
        with selectors.DefaultSelector() as ready:
            ready.register(self._out, selectors.EVENT_READ)
            while len(got) < count:
                if not ready.select(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError
                if not (piece := os.read(self._out.fileno(), count - len(got))):
                    raise EOFError
                got += piece
        return bytes(got)

    def kill(self) -> None:
        """Kills the process with its children and waits.  The pipes stay open: another thread may be looking at them."""
        with self._lock:
            if self._process.returncode is None:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()

    def release(self) -> None:
        with contextlib.suppress(BrokenPipeError):  # an unsent request to a dead worker
            self._in.close()
        self._out.close()


def serve(load: Callable[[], Callable[[dict[str, Any]], Any]]) -> None:
    """The worker's side: answer requests until the parent closes the pipe.  What `load` returns is called with each request."""
    _end_with_parent()
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print must not get between the answers
    answer = load()
    _send(sink, {"ready": True})
    while len(head := source.read(4)) == 4:
        request = json.loads(source.read(int.from_bytes(head, "big")))
        try:
            reply = {"answer": answer(request)}
        except Exception:
            reply = {"error": traceback.format_exc(limit=-5)}
        _send(sink, reply)


def _send(sink: BinaryIO, reply: dict[str, Any]) -> None:
    frame = json.dumps(reply).encode()
    sink.write(len(frame).to_bytes(4, "big") + frame)
    sink.flush()


def _end_with_parent() -> None:
    """A worker that computes for ever must not outlive a parent that was killed (elsewhere only idle ones end)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    die_with_parent()
    if str(os.getppid()) != os.environ.get("RFT_PARENT"):
        raise SystemExit("the parent is already gone")


def register(pool: Counted) -> None:
    """From now on it is counted, and closed with the others."""
    _POOLS.add(pool)


def close_all() -> None:
    """Ends the workers of every pool and sandbox of this process."""
    for pool in list(_POOLS):
        pool.close()


def counts() -> dict[str, int]:
    """For metrics: "<name>/calls", "/memo_hits", "/timeouts", "/restarts" of the pools and sandboxes that were used; summed by name."""
    found: Counter[str] = Counter()
    for pool in list(_POOLS):
        if pool.calls:
            found.update({f"{pool.name}/{what}": getattr(pool, what) for what in ("calls", "memo_hits", "timeouts", "restarts")})
    return dict(found)


atexit.register(close_all)

"""A process of ours that answers requests: `python -m module`, where the module calls `serve`.

Frames go over its stdin and stdout in a codec that makes plain data only; nothing is pickled.  It
dies with its parent. Invariant: a request ends with the worker's answer or with a named failure,
also where the worker's code calls sys.exit.
"""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from rft.worker import framing, limits
from rft.worker.parent import die_with_parent

START_TIMEOUT_S = 120.0  # importing sympy on a busy machine


class WorkerError(RuntimeError):
    """The worker answered with an exception; its traceback is the message."""


class WorkerDied(RuntimeError):
    """The worker process ended without an answer."""


class Codec(NamedTuple):
    """How requests and answers become bytes; both sides use the same."""

    pack: Callable[[Any], bytes]
    unpack: Callable[[bytes], Any]


JSON = Codec(lambda value: json.dumps(value, sort_keys=True).encode(), json.loads)
LITERALS = Codec(  # plain data of Python: tuples stay tuples, keys may be numbers
    lambda value: repr(value).encode("utf-8", "surrogatepass"),
    lambda data: ast.literal_eval(data.decode("utf-8", "surrogatepass")),
)


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """For a process that imports what this one can, and that ends with it."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        "RFT_PARENT": str(os.getpid()),
        **(more or {}),
    }


class WorkerProcess:
    """Our side of one worker; used by one thread at a time, and killed from any."""

    def __init__(self, module: str, *, env: Mapping[str, str] | None = None) -> None:
        self._module = module
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(env),
            start_new_session=True,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._in = self._process.stdin
        self._out = self._process.stdout
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
            self.receive(time.monotonic() + START_TIMEOUT_S)
        except OSError as e:
            raise WorkerDied(f"{self._module} did not start; see its message in the log") from e

    def ask(self, request: bytes, timeout_s: float | None = None) -> bytes:
        """The worker's reply; `timeout_s` is that of the request and its reply.  Raises
        TimeoutError, or OSError where it has ended.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self.send(request, deadline)
        return self.receive(deadline)

    def send(self, request: bytes, deadline: float | None = None) -> None:
        framing.send(self._in.fileno(), request, deadline=deadline)

    def receive(self, deadline: float | None = None) -> bytes:
        """The next frame, for exchanges that are not one reply to one request."""
        return framing.receive(self._out.fileno(), deadline=deadline)

    def end(self) -> None:
        """Kills the process with its children, and does not wait: one that holds much memory takes
        a while to go.
        """
        with self._lock:
            if self._process.returncode is None:
                os.killpg(self._process.pid, signal.SIGKILL)

    def kill(self) -> None:
        """Kills the process with its children and waits.  The pipes stay open: another thread may
        be looking at them.
        """
        self.end()
        with self._lock:
            self._process.wait()

    def release(self) -> None:
        """Closes the pipes of a worker that was killed, or ends an idle one and waits."""
        self._in.close()
        self._process.wait()
        self._out.close()


# ---------------------------------------------------------------- the worker's side


def serve(
    load: Callable[[], Callable[[Any], Any]], *, codec: Codec = JSON, memory_mb: int | None = None
) -> None:
    """Answers requests until the parent closes the pipe.  What `load` returns is called with each
    request.

    `memory_mb`: what the answers may take beyond what `load` took.
    """
    end_with_parent()
    sink = os.dup(1)
    os.dup2(2, 1)  # what libraries print must not get between the answers
    answer = load()
    if memory_mb is not None:
        limits.limit_memory(memory_mb)
    framing.send(sink, codec.pack({"ready": True}))
    while True:
        try:
            request = framing.receive(0)
        except framing.ChannelClosed:
            return
        try:
            reply = codec.pack({"answer": answer(codec.unpack(request))})
        except BaseException:  # also sys.exit of a plugin: told, never the silent end of its worker
            reply = codec.pack({"error": traceback.format_exc(limit=-5)})
        framing.send(sink, reply)


def end_with_parent() -> None:
    """A worker that computes for ever must not outlive a parent that was killed (elsewhere only
    idle ones end).
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    die_with_parent()
    if str(os.getppid()) != os.environ.get("RFT_PARENT"):
        raise SystemExit("the parent is already gone")

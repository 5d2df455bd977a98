"""Worker process that answers requests: `python -m module`, where the module calls `serve`.

Frames go over stdin and stdout in a codec without pickle.  The worker dies with its parent.
Invariant: a request ends with an answer or a named failure, even if the worker calls sys.exit.
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
    """Encoding of requests and answers on both sides."""

    pack: Callable[[Any], bytes]
    unpack: Callable[[bytes], Any]


JSON = Codec(lambda value: json.dumps(value, sort_keys=True).encode(), json.loads)
LITERALS = Codec(  # plain data of Python: tuples stay tuples, keys may be numbers
    lambda value: repr(value).encode("utf-8", "surrogatepass"),
    lambda data: ast.literal_eval(data.decode("utf-8", "surrogatepass")),
)


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a child process, with this import path, that ends with this one."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        "RFT_PARENT": str(os.getpid()),
        **(more or {}),
    }


class WorkerProcess:
    """Client of one worker; used by one thread at a time, killed from any thread."""

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
        """Wait until the worker has imported its modules.  Raises WorkerDied."""
        try:
            self.receive(time.monotonic() + START_TIMEOUT_S)
        except OSError as e:
            raise WorkerDied(f"{self._module} did not start; see its message in the log") from e

    def ask(self, request: bytes, timeout_s: float | None = None) -> bytes:
        """Return the worker's reply.  Raises TimeoutError, or OSError if the worker has ended."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self.send(request, deadline)
        return self.receive(deadline)

    def send(self, request: bytes, deadline: float | None = None) -> None:
        framing.send(self._in.fileno(), request, deadline=deadline)

    def receive(self, deadline: float | None = None) -> bytes:
        """Receive the next frame."""
        return framing.receive(self._out.fileno(), deadline=deadline)

    def end(self) -> None:
        """Kill the process group without waiting: freeing much memory takes time."""
        with self._lock:
            if self._process.returncode is None:
                os.killpg(self._process.pid, signal.SIGKILL)

    def kill(self) -> None:
        """Kill the process group and wait.  Pipes stay open: another thread may use them."""
        self.end()
        with self._lock:
            self._process.wait()

    def release(self) -> None:
        """Close the pipes, which ends an idle worker, and wait."""
        self._in.close()
        self._process.wait()
        self._out.close()


# ---------------------------------------------------------------- the worker's side


def serve(
    load: Callable[[], Callable[[Any], Any]], *, codec: Codec = JSON, memory_mb: int | None = None
) -> None:
    """Answer requests with the function that `load` returns, until the parent closes the pipe.

    `memory_mb`: memory limit of the answers, beyond the memory of `load`.
    """
    end_with_parent()
    sink = os.dup(1)
    os.dup2(2, 1)  # prints of libraries must not mix with answers
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
        except BaseException:  # including sys.exit of a plugin
            reply = codec.pack({"error": traceback.format_exc(limit=-5)})
        framing.send(sink, reply)


def end_with_parent() -> None:
    """End with a killed parent, even while computing (not on Linux: only while idle)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    die_with_parent()
    if str(os.getppid()) != os.environ.get("RFT_PARENT"):
        raise SystemExit("the parent is already gone")

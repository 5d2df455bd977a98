"""The rft side of sandboxed processes: start the fork server, and each process with its limits and
pipes.

Usable from any thread.
Invariant: when a `SandboxedProcess` is closed, its program and all descendants are dead, or
SandboxError is raised.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import sys
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rft.errors import SetupError
from rft.extras.sandbox import kernel, wire
from rft.worker.forking import ForkingProcess
from rft.worker.framing import BadMessage

Level = Literal["namespaces", "landlock", "seccomp"]
LEVELS: tuple[Level, ...] = ("namespaces", "landlock", "seccomp")  # strongest first
START_S = 60.0  # for a fork on a busy machine, and for the server's first imports
_HANGING_UP_S = 1.0
END_S = 20.0  # for the kernel to remove a killed program
_BOOT = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); from rft.extras.sandbox.forkserver "
    "import main; main(sys.argv[1:])"
)


class SandboxError(RuntimeError):
    """The sandbox itself failed: nothing is known about the program."""


class SandboxUnavailable(SetupError):
    """This machine cannot run programs safely; the message gives the reason and the remedy."""


@dataclass(frozen=True)
class ProgramLimits:
    """Limits of one program.  `timeout_s`: wall clock and processor time; `output_kb`: printed
    output; `file_mb`: size of files.
    """

    timeout_s: float = 10.0
    # number of consecutive `timeout_s`; the processor time of all of them may be used
    deadlines: int = 1
    memory_mb: int = 1024
    output_kb: int = 1024
    file_mb: int = 16
    files: int = 64
    processes: int = 1
    programs: bool = False  # may run programs in the server's `folders`


@dataclass(eq=False)
class SandboxedProcess:
    """A process under its limits, without work yet.  `status` after its end: exit code, or 128 +
    signal.
    """

    lifeline: socket.socket
    channel: socket.socket
    fds: dict[str, int] = field(default_factory=dict)  # rft's ends of stdin, stdout, stderr
    status: int | None = None

    def __enter__(self) -> SandboxedProcess:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.end()
        finally:
            self.close()

    def wait(self, timeout_s: float) -> int | None:
        """Return the status once the process has ended; None after `timeout_s`."""
        if self.status is not None:
            return self.status
        self.lifeline.settimeout(max(0.001, timeout_s))
        try:
            message = self.lifeline.recv(500).decode()
        except TimeoutError:
            return None
        verb, _, rest = message.partition(" ")
        if verb != "exit":
            raise SandboxError(
                rest
                or "the sandbox could not be started: the machine may be out of processes or memory"
            )
        self.status = int(rest)
        return self.status

    def kill(self) -> None:
        """Kill the program, from any thread; waiting callers see its end."""
        with contextlib.suppress(OSError):  # the supervisor has already reported
            self.lifeline.shutdown(socket.SHUT_WR)

    def end(self) -> int:
        """Kill remaining processes and wait until they are gone."""
        self.kill()
        if (status := self.wait(END_S)) is None:
            raise SandboxError(f"a killed program was still there after {END_S:g} s")
        return status

    def ended(self) -> int:
        """Return the status of a process that hung up; kill it only if it does not end by itself."""
        status = self.wait(_HANGING_UP_S)
        return self.end() if status is None else status

    def close(self) -> None:
        self.lifeline.close()
        self.channel.close()
        for fd in self.fds.values():
            os.close(fd)
        self.fds.clear()


class ForkServer(ForkingProcess):
    """Starts the process that programs are forked from.  `level`: isolation, one of LEVELS.

    `folders`: readable in addition to Python; `writable`: folder to write in at level landlock; at
    level namespaces that is /tmp.
    """

    def __init__(
        self,
        level: Level,
        python: str = sys.executable,
        *,
        folders: Sequence[str] = (),
        writable: str = "",
    ) -> None:
        super().__init__(env=_ENVIRONMENT, cwd="/", start_s=START_S, answers=False)
        self.level = level
        self._python = python
        self._folders = folders
        self._writable = writable
        self._numbers = itertools.count()
        self._processes: weakref.WeakSet[SandboxedProcess] = weakref.WeakSet()
        self.aborted = False

    def start(
        self, role: str, limits: ProgramLimits, *, link: socket.socket | None = None
    ) -> SandboxedProcess:
        """Start a process that waits for its work.

        Role "run" has pipes as stdin, stdout, stderr; "serve" and "judge" have a `link`.  Raises
        SandboxError.
        """
        lifeline = socket.socketpair()
        channel = socket.socketpair()
        theirs = {"lifeline": lifeline[1].fileno(), "channel": channel[1].fileno()}
        ours = {}
        pipes = []
        if link is not None:
            theirs["link"] = link.fileno()
        else:
            for name in ("stdin", "stdout", "stderr"):
                read, write = os.pipe()
                theirs[name], ours[name] = (read, write) if name == "stdin" else (write, read)
                pipes.append(theirs[name])
        process = SandboxedProcess(lifeline[0], channel[0], ours)
        try:
            self._send(role, limits, theirs)
        except BaseException:
            process.close()
            raise
        finally:
            lifeline[1].close()
            channel[1].close()
            for fd in pipes:
                os.close(fd)
        try:
            reply = wire.receive(
                process.channel, largest=wire.LARGEST_REPLY, deadline=time.monotonic() + START_S
            )
        except (BadMessage, OSError) as e:
            reply = {"error": f"it did not answer ({type(e).__name__})"}
        if reply != {"ready": True}:
            try:
                process.end()  # prefer the process's own error, if any
            finally:
                process.close()
            raise SandboxError(f"a sandbox could not be set up: {reply.get('error')}")
        with self._lock:
            self._processes.add(process)
            if self.aborted:
                process.kill()
        return process

    def abort(self) -> None:
        """Kill the programs of all processes.  Later results are no verdicts; see `aborted`."""
        with self._lock:
            self.aborted = True
            processes = list(self._processes)
        for process in processes:
            process.kill()

    def _send(self, role: str, limits: ProgramLimits, fds: dict[str, int]) -> None:
        order = {
            "role": role,
            "fds": list(fds),
            "number": next(self._numbers),
            "cpu_s": max(1, int(limits.timeout_s * limits.deadlines + 0.999)),
            **{
                name: getattr(limits, name)
                for name in ("memory_mb", "file_mb", "files", "processes", "programs")
            },
        }
        if limits.processes > 1 and self.level == "seccomp":
            raise SandboxUnavailable(
                "programs with several processes need level namespaces or landlock; this sandbox "
                "is of level seccomp"
            )
        with self._lock:
            self._order(json.dumps(order).encode(), list(fds.values()))

    def _command(self, control: int) -> list[str]:
        root = str(Path(__file__).resolve().parents[3])
        shown = ":".join(self._folders)
        return [
            self._python,
            "-I",
            "-S",
            "-B",
            "-c",
            _BOOT,
            root,
            str(control),
            self.level,
            shown,
            self._writable,
            *_sites(),
        ]

    def _cannot_start(self, reason: str) -> Exception:
        return SandboxError(reason)

    def _cannot_order(self, reason: str) -> Exception:
        return SandboxError(f"the sandbox's server cannot be reached: {reason}")

    def _started(self) -> socket.socket:
        control = super()._started()
        # additional protection: programs may have our user id, and a /proc that they cannot open
        if self.level != "namespaces":
            kernel.hide_memory()
        return control


_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/tmp",
    "TMPDIR": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
}


def _sites() -> list[str]:
    """Return the folders of installed packages, so that programs may import NumPy."""
    return [
        p
        for p in sys.path
        if Path(p).name in ("site-packages", "dist-packages") and Path(p).is_dir()
    ]


def remaining(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())

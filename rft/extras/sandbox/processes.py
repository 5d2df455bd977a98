"""Our end of sandboxed processes: starts the server that they are forked from, and each with its
limits and pipes.

Usable from any thread.  Invariant: when a `SandboxedProcess` is closed, its program and all that it
started are dead, or SandboxError is raised.
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
START_S = 60.0  # a fork on a machine that is busy; and the server's first imports
_HANGING_UP_S = 1.0
END_S = 20.0  # for the kernel to take away a killed program
_BOOT = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); from rft.extras.sandbox.forkserver "
    "import main; main(sys.argv[1:])"
)


class SandboxError(RuntimeError):
    """The sandbox itself failed: nothing is known about the program."""


class SandboxUnavailable(SetupError):
    """This machine cannot run programs safely; the message says why and what to do."""


@dataclass(frozen=True)
class ProgramLimits:
    """What one program may take.  `timeout_s`: wall clock and processor time; `output_kb`: of what
    it prints, and `file_mb` of files.
    """

    timeout_s: float = 10.0
    # of `timeout_s`, one after the other; it may use the processor time of all of them
    deadlines: int = 1
    memory_mb: int = 1024
    output_kb: int = 1024
    file_mb: int = 16
    files: int = 64
    processes: int = 1
    programs: bool = False  # it may run those in the server's `folders`


@dataclass(eq=False)
class SandboxedProcess:
    """A process under its limits, told nothing yet.  `status` after it ended: exit code, or 128 +
    signal.
    """

    lifeline: socket.socket
    channel: socket.socket
    fds: dict[str, int] = field(default_factory=dict)  # our ends of stdin, stdout, stderr
    status: int | None = None

    def __enter__(self) -> SandboxedProcess:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.end()
        finally:
            self.close()

    def wait(self, timeout_s: float) -> int | None:
        """The status once the process has ended; None after `timeout_s`."""
        if self.status is not None:
            return self.status
        self.lifeline.settimeout(max(0.001, timeout_s))
        try:
            said = self.lifeline.recv(500).decode()
        except TimeoutError:
            return None
        verb, _, rest = said.partition(" ")
        if verb != "exit":
            raise SandboxError(
                rest
                or "the sandbox could not be started: the machine may be out of processes or memory"
            )
        self.status = int(rest)
        return self.status

    def kill(self) -> None:
        """From any thread: who waits for the program sees its end."""
        with contextlib.suppress(OSError):  # the supervisor has already said its word
            self.lifeline.shutdown(socket.SHUT_WR)

    def end(self) -> int:
        """Kills what is still there and waits until it is gone."""
        self.kill()
        if (status := self.wait(END_S)) is None:
            raise SandboxError(f"a killed program was still there after {END_S:g} s")
        return status

    def ended(self) -> int:
        """The status of a process that has hung up: it is about to end by itself, and only else
        killed.
        """
        status = self.wait(_HANGING_UP_S)
        return self.end() if status is None else status

    def close(self) -> None:
        self.lifeline.close()
        self.channel.close()
        for fd in self.fds.values():
            os.close(fd)
        self.fds.clear()


class ForkServer(ForkingProcess):
    """The process that programs are forked from.  `level`: how they are closed off, one of LEVELS.

    `folders`: what they may read beside Python; `writable`: where they may write at level landlock;
    at level namespaces it is /tmp.
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
        """A process that waits for its work.  role "run" has pipes as stdin, stdout, stderr;
        "serve" and "judge" have a `link`.

        Raises SandboxError.
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
            said = wire.receive(
                process.channel, largest=wire.LARGEST_REPLY, deadline=time.monotonic() + START_S
            )
        except (BadMessage, OSError) as e:
            said = {"error": f"it did not answer ({type(e).__name__})"}
        if said != {"ready": True}:
            try:
                process.end()  # its own reason is better, where it has one
            finally:
                process.close()
            raise SandboxError(f"a sandbox could not be set up: {said.get('error')}")
        with self._lock:
            self._processes.add(process)
            if self.aborted:
                process.kill()
        return process

    def abort(self) -> None:
        """Kills the programs of all processes.  What is said of them from here on is no verdict;
        see `aborted`.
        """
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

    def _cannot_start(self, why: str) -> Exception:
        return SandboxError(why)

    def _cannot_order(self, why: str) -> Exception:
        return SandboxError(f"the sandbox's server cannot be reached: {why}")

    def _started(self) -> socket.socket:
        control = super()._started()
        # a second bolt: programs may have our user id, and a /proc that they cannot open
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
    """Folders of installed packages: programs may import NumPy."""
    return [
        p
        for p in sys.path
        if Path(p).name in ("site-packages", "dist-packages") and Path(p).is_dir()
    ]


def remaining(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())

"""Our end of the boxes: starts the server that they are forked from, and each box with its limits and pipes.

Usable from any thread.  Invariant: when a `Box` is closed, its program and all that it started are dead, or SandboxError is raised.
"""

from __future__ import annotations

import array
import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from rft.errors import SetupError
from rft.reward.box import wire

LEVELS = ("namespaces", "seccomp")
START_S = 60.0  # a fork on a machine that is busy; and the server's first imports
_HANGING_UP_S = 1.0
END_S = 20.0  # for the kernel to take away a killed program
_BOOT = "import sys; sys.path.insert(0, sys.argv.pop(1)); from rft.reward.box.server import main; main(sys.argv[1:])"


class SandboxError(RuntimeError):
    """The sandbox itself failed: nothing is known about the program."""


class SandboxUnavailable(SetupError):
    """This machine cannot run programs safely; the message says why and what to do."""


@dataclass(frozen=True)
class Limits:
    """What one program may take.  `timeout_s`: wall clock and processor time; `output_kb`: of what it prints, and `file_mb` of files."""

    timeout_s: float = 10.0
    memory_mb: int = 1024
    output_kb: int = 1024
    file_mb: int = 16
    files: int = 64
    processes: int = 1


@dataclass
class Box:
    """A process under its limits, told nothing yet.  `status` after it ended: exit code, or 128 + signal."""

    leash: socket.socket
    channel: socket.socket
    fds: dict[str, int] = field(default_factory=dict)  # our ends of stdin, stdout, stderr
    status: int | None = None

    def __enter__(self) -> Box:
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
        self.leash.settimeout(max(0.001, timeout_s))
        try:
            said = self.leash.recv(500).decode()
        except TimeoutError:
            return None
        verb, _, rest = said.partition(" ")
        if verb != "exit":
            raise SandboxError(rest or "the box could not be started: the machine may be out of processes or memory")
        self.status = int(rest)
        return self.status

    def end(self) -> int:
        """Kills what is still there and waits until it is gone."""
        with contextlib.suppress(OSError):  # the keeper has already said its word
            self.leash.shutdown(socket.SHUT_WR)
        if (status := self.wait(END_S)) is None:
            raise SandboxError(f"a killed program was still there after {END_S:g} s")
        return status

    def ended(self) -> int:
        """The status of a process that has hung up: it is about to end by itself, and only else killed."""
        status = self.wait(_HANGING_UP_S)
        return self.end() if status is None else status

    def close(self) -> None:
        self.leash.close()
        self.channel.close()
        for fd in self.fds.values():
            os.close(fd)
        self.fds.clear()


class Server:
    """The process that boxes are forked from, started on first use.  `level`: how they are closed off, one of LEVELS."""

    def __init__(self, level: str, python: str = sys.executable) -> None:
        self.level, self._python = level, python
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._numbers = itertools.count()
        self.starts = 0

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def box(self, role: str, limits: Limits, *, link: socket.socket | None = None) -> Box:
        """A box that waits for its work.  role "run" has pipes as stdin, stdout, stderr; "serve" and "judge" have a `link`.

        Raises SandboxError.
        """
        leash, channel = socket.socketpair(), socket.socketpair()
        theirs, ours = {"leash": leash[1].fileno(), "channel": channel[1].fileno()}, {}
        pipes = []
        if link is not None:
            theirs["link"] = link.fileno()
        else:
            for name in ("stdin", "stdout", "stderr"):
                read, write = os.pipe()
                theirs[name], ours[name] = (read, write) if name == "stdin" else (write, read)
                pipes.append(theirs[name])
        box = Box(leash[0], channel[0], ours)
        try:
            self._send(role, limits, theirs)
        except BaseException:
            box.close()
            raise
        finally:
            leash[1].close()
            channel[1].close()
            for fd in pipes:
                os.close(fd)
        try:
            box.channel.settimeout(START_S)
            said = wire.receive(box.channel)
        except (wire.Closed, wire.Unreadable, OSError) as e:
            said = {"error": f"it did not answer ({type(e).__name__})"}
        if said != {"ready": True}:
            try:
                box.end()  # its own reason is better, where it has one
            finally:
                box.close()
            raise SandboxError(f"a box could not be set up: {said.get('error')}")
        return box

    def _send(self, role: str, limits: Limits, fds: dict[str, int]) -> None:
        order = {
            "role": role,
            "fds": list(fds),
            "number": next(self._numbers),
            "cpu_s": max(1, int(limits.timeout_s + 0.999)),
            "memory_mb": limits.memory_mb,
            "file_mb": limits.file_mb,
            "files": limits.files,
            "processes": limits.processes,
        }
        if limits.processes > 1 and self.level != "namespaces":
            raise SandboxUnavailable("programs with several processes need namespaces, which this machine does not allow")
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds.values()))]
        with self._lock:
            for attempt in (1, 2):
                try:
                    self._started().sendmsg([json.dumps(order).encode()], ancillary)
                    return
                except OSError as e:
                    self._stop()
                    if attempt == 2:
                        raise SandboxError(f"the sandbox's server cannot be reached: {e}") from e

    def _started(self) -> socket.socket:
        if self._control is not None:
            return self._control
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        root = str(Path(__file__).resolve().parents[3])
        with theirs:
            self._process = subprocess.Popen(
                [self._python, "-I", "-S", "-B", "-c", _BOOT, root, str(theirs.fileno()), self.level, *_sites()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=_ENVIRONMENT,
                cwd="/",
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        ours.settimeout(START_S)
        try:
            said = json.loads(ours.recv(4096) or b'{"error": "it ended while starting; see its message in the log"}')
        except (TimeoutError, OSError) as e:
            said = {"error": str(e)}
        if "error" in said:
            ours.close()
            self._stop()
            raise SandboxError(said["error"])
        ours.settimeout(None)
        self._control = ours
        self.starts += 1
        return ours

    def close(self) -> None:
        """Ends the server; running boxes end with their `Box`."""
        with self._lock:
            self._stop()

    def _stop(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


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
    return [p for p in sys.path if Path(p).name in ("site-packages", "dist-packages") and Path(p).is_dir()]


def remaining(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())

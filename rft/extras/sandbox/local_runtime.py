"""Runtimes of this machine: its programs, read-only, under Linux namespaces, with files in memory.

A runtime is one process (`local_room`) and what it starts.  Root gives two users, 0 and 65534
("nobody") inside, which own nothing outside; other accounts give user 0 alone, which is the
account itself.  Memory is limited for each process.
"""

from __future__ import annotations

import itertools
import json
import os
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rft.extras.sandbox.local_room import LARGEST, NOBODY
from rft.extras.sandbox.processes import SandboxUnavailable
from rft.types.runtimes import KEPT, Executed, RuntimeFailed, RuntimeFiles, RuntimeSpec

_START_S = 60.0
_COPY_S = 120.0
_PIECE = 1 << 16
_USERS = {"": 0, "root": 0, "0": 0, "nobody": NOBODY, str(NOBODY): NOBODY}
# users outside, two for each runtime, in the range that systemd documents as unused
_OUTSIDE = 60600
_PAIRS = 250
_NUMBERS = itertools.count(os.getpid())
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_ENVIRONMENT = {"PATH": _PATH, "HOME": "/root", "LANG": "C.UTF-8"}
_BOOT = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); from rft.extras.sandbox.local_room "
    "import main; main(sys.argv[1:])"
)
SWITCH_ON = (
    "switch on user namespaces (sysctl user.max_user_namespaces, and "
    "kernel.apparmor_restrict_unprivileged_userns=0), or use containers"
)


@dataclass(frozen=True)
class MachineFiles:
    archive: bytes

    def drop(self) -> None:
        """Its memory goes with it."""


class MachineDriver:
    """Starts runtimes on this machine."""

    def start(self, spec: RuntimeSpec, *, files: RuntimeFiles | None = None) -> MachineRuntime:
        """See `RuntimeDriver`."""
        if spec.image:
            raise SandboxUnavailable(
                f"runtimes of this machine have its programs in place of an image; given "
                f"{spec.image!r}; use a runtime of containers"
            )
        runtime = MachineRuntime(spec)
        try:
            if isinstance(files, MachineFiles):
                runtime.put(files.archive)
        except BaseException:
            runtime.kill()
            raise
        return runtime


class MachineRuntime:
    """See `rft.types.runtimes.AgentRuntime`."""

    def __init__(self, spec: RuntimeSpec) -> None:
        self.workdir = spec.workdir or "/"
        self.listener: socket.socket | None = None
        self._spec = spec
        self._number = itertools.count()
        self._killing = threading.Lock()
        self._using = threading.RLock()  # held by a call: its descriptors stay open
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (self._control, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LARGEST)
        root = str(Path(__file__).resolve().parents[3])
        with theirs:
            self._room = subprocess.Popen(
                [sys.executable, "-I", "-S", "-B", "-c", _BOOT, root, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                cwd="/",
                env={"PATH": _PATH},
            )
        try:
            self._set_up()
        except BaseException:
            self.kill()
            raise

    def _set_up(self) -> None:
        setup = {
            "port": self._spec.port,
            "shown": list(self._spec.shown),
            "workdir": self.workdir,
            "memory_mb": self._spec.limits.memory_mb,
            "disk_mb": self._spec.limits.disk_mb,
            "processes": self._spec.limits.processes,
        }
        self._control.settimeout(_START_S)
        self._control.send(json.dumps(setup).encode())
        self._started()
        try:
            self._map_users()
        except OSError as e:
            raise SandboxUnavailable(f"no users for a runtime: {e}; {SWITCH_ON}") from e
        self._control.send(b"{}")
        fds = self._started()
        self.listener = socket.socket(fileno=fds[0]) if fds else None

    def _started(self) -> list[int]:
        message, fds, _, _ = socket.recv_fds(self._control, LARGEST, 1)
        if not message:
            assert self._room.stderr is not None
            reason = self._room.stderr.read(4096).decode(errors="replace").strip()
            raise RuntimeFailed(f"the runtime ended at its start: {reason[-500:]}")
        answer = json.loads(message)
        if error := answer.get("error"):
            if answer["busy"]:
                raise RuntimeFailed(f"the machine is too busy to start a runtime: {error}")
            raise SandboxUnavailable(
                f"runtimes cannot be had on this machine ({error}); {SWITCH_ON}"
            )
        return fds

    def _map_users(self) -> None:
        of_room = Path(f"/proc/{self._room.pid}")
        if os.geteuid() == 0:
            first = _OUTSIDE + 2 * (next(_NUMBERS) % _PAIRS)
            maps = dict.fromkeys(("uid_map", "gid_map"), f"0 {first} 1\n{NOBODY} {first + 1} 1\n")
        else:
            (of_room / "setgroups").write_text("deny")
            maps = {"uid_map": f"0 {os.geteuid()} 1\n", "gid_map": f"0 {os.getegid()} 1\n"}
        for name, text in maps.items():
            (of_room / name).write_text(text)

    def exec(
        self,
        command: Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        user: str = "",
        timeout_s: float,
    ) -> Executed:
        """See `AgentRuntime`."""
        if user not in _USERS:
            raise RuntimeFailed(
                f"a runtime of this machine has the users root and nobody, not {user!r}"
            )
        order = {
            "do": "exec",
            "command": list(command),
            "env": {**_ENVIRONMENT, **self._spec.env, **(env or {})},
            "user": _USERS[user],
        }
        pipes = [os.pipe() for _ in range(3)]
        ours = [pipes[0][1], pipes[1][0], pipes[2][0]]
        try:
            number = self._send(order, [pipes[0][0], pipes[1][1], pipes[2][1]])
        except BaseException:
            _close(ours)
            raise
        with self._using, Talk(ours, stdin) as talk:
            code: int | None = None
            if talk.until(self._control, time.monotonic() + timeout_s):
                code = self._reply(number)["code"]
                talk.drain()
            return Executed(code, *talk.tails())

    def put(self, archive: bytes, *, read_only: str = "") -> None:
        """See `AgentRuntime`."""
        read, write = os.pipe()
        try:
            number = self._send({"do": "put", "read_only": read_only}, [read])
        except BaseException:
            _close([write])
            raise
        with self._using:
            with Talk([write], archive) as talk:
                talk.until(self._control, time.monotonic() + _COPY_S)
            self._reply(number)

    def get(self, path: str, *, most_bytes: int) -> bytes:
        """See `AgentRuntime`."""
        read, write = os.pipe()
        pieces = []
        size = 0
        with self._using, os.fdopen(read, "rb", buffering=0) as stream:
            number = self._send({"do": "get", "path": path}, [write])
            while piece := stream.read(_PIECE):
                pieces.append(piece)
                size += len(piece)
                if size > most_bytes:
                    self.kill()
                    raise RuntimeFailed(f"{path} has more than {most_bytes} bytes")
            self._reply(number)
        return b"".join(pieces)

    def stop(self) -> None:
        """See `AgentRuntime`."""
        with self._using:
            self._reply(self._send({"do": "stop"}, []))

    def snapshot(self) -> MachineFiles:
        """See `AgentRuntime`."""
        return MachineFiles(self.get("/", most_bytes=self._spec.limits.disk_mb << 21))

    def kill(self) -> None:
        """See `AgentRuntime`."""
        with self._killing:
            if self._room.returncode is not None:
                return
            self._room.kill()
            self._room.wait()
            self._control.shutdown(socket.SHUT_RDWR)
        with self._using:
            assert self._room.stderr is not None
            self._room.stderr.close()
            self._control.close()
            if self.listener is not None:
                self.listener.close()

    def _send(self, order: dict[str, Any], fds: list[int]) -> int:
        """Send an order with descriptors, which are closed here; return its number."""
        order["number"] = next(self._number)
        try:
            socket.send_fds(self._control, [json.dumps(order).encode()], fds)
        except OSError as e:
            raise RuntimeFailed(f"the runtime has ended, or cannot take the order: {e}") from e
        finally:
            _close(fds)
        return int(order["number"])

    def _reply(self, number: int) -> dict[str, Any]:
        """Return the reply to an order; those of programs that passed their deadline are dropped."""
        self._control.settimeout(_COPY_S)
        while True:
            try:
                message = self._control.recv(LARGEST)
            except OSError as e:
                raise RuntimeFailed(f"the runtime did not answer: {e}") from e
            if not message:
                raise RuntimeFailed("the runtime has ended")
            reply: dict[str, Any] = json.loads(message)
            if reply["number"] != number:
                continue
            if reply.get("missing"):
                raise FileNotFoundError(reply["error"])
            if "error" in reply:
                raise RuntimeFailed(str(reply["error"]))
            return reply


class Talk:
    """Feeds a program and keeps the end of what it writes.  `fds`: of stdin, stdout, stderr."""

    def __init__(self, fds: Sequence[int], stdin: bytes) -> None:
        self._stdin = memoryview(stdin)
        self._tails = dict.fromkeys(fds[1:], b"")
        self._fds = list(fds)
        self._ready = selectors.DefaultSelector()
        for fd in fds:
            os.set_blocking(fd, False)
        self._ready.register(fds[0], selectors.EVENT_WRITE)
        for fd in fds[1:]:
            self._ready.register(fd, selectors.EVENT_READ)

    def __enter__(self) -> Talk:
        return self

    def __exit__(self, *_: object) -> None:
        self._ready.close()
        _close(self._fds)

    def until(self, end: Any, deadline: float) -> bool:
        """Talk until `end` is readable; False if `deadline` (monotonic) passed before."""
        self._ready.register(end, selectors.EVENT_READ)
        try:
            while True:
                events = self._ready.select(max(0.0, deadline - time.monotonic()))
                if any(key.fileobj is end for key, _ in events):
                    return True
                if not events or time.monotonic() > deadline:
                    return False
                for key, _ in events:
                    self._moved(key.fd)
        finally:
            self._ready.unregister(end)

    def drain(self) -> None:
        """Read what is there already, at most what a pipe holds."""
        for fd in self._tails:
            if fd in self._fds:
                self._moved(fd, 1 << 20)

    def tails(self) -> list[bytes]:
        return list(self._tails.values())

    def _moved(self, fd: int, most: int = _PIECE) -> None:
        try:
            if fd in self._tails:
                piece = os.read(fd, most)
                self._tails[fd] = (self._tails[fd] + piece)[-KEPT:]
                done = not piece
            else:
                self._stdin = self._stdin[os.write(fd, self._stdin[:_PIECE]) :]
                done = not self._stdin
        except BlockingIOError:
            return
        except BrokenPipeError:
            done = True
        if done:
            self._fds.remove(fd)
            if fd in self._ready.get_map():
                self._ready.unregister(fd)
            os.close(fd)


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)

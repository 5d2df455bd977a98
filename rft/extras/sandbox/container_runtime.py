"""Runtimes in containers, with the command line of Podman or Docker on this machine.

A container lives as long as its first process can read from rft, and is removed by the engine with
it.  What a run depends on is not done by programs of the image, which an agent could replace: files
are copied by the engine, and `join` does the rest from outside.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rft.extras.sandbox.container import (
    IMAGE,
    NOWHERE,
    SNAPSHOT,
    EngineCommand,
    container_command,
    container_name,
    remove_ownerless,
)
from rft.extras.sandbox.local_runtime import Talk
from rft.extras.sandbox.processes import SandboxUnavailable
from rft.types.runtimes import Executed, RuntimeFailed, RuntimeFiles, RuntimeSpec

_START_S = 120.0
_STARTS = 3  # attempts: runc sometimes loses a container between creating and starting it
_PIECE = 1 << 16
_ENGINE_FAILED = 125
_KILLED = 137
_DYING_S = 0.5  # after a program was killed: for the engine to say that the container was
_CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETUID")
_MISSING = re.compile(rb"could not be found|could not find|no such file", re.IGNORECASE)
_BOOT = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); from rft.extras.sandbox.join "
    "import main; main(sys.argv[1:])"
)
# the first process of a container ends with its standard input; while it waits, it reaps orphans
_FIRST = 'mkdir -p "$0"; echo; exec 3<&0; until cat <&3 >/dev/null & wait $!; do :; done'


@dataclass(frozen=True)
class ContainerFiles:
    engine: EngineCommand
    image: str

    def drop(self) -> None:
        """Remove the image."""
        self.engine.remove(self.image)


class ContainerDriver:
    """Starts containers."""

    def __init__(self, *, command: Sequence[str] | None = None) -> None:
        """`command`: of the engine.  Raises SandboxUnavailable without one."""
        self.engine = EngineCommand(tuple(command or container_command()))

    def start(self, spec: RuntimeSpec, *, files: RuntimeFiles | None = None) -> ContainerRuntime:
        """See `RuntimeDriver`."""
        image = files.image if isinstance(files, ContainerFiles) else spec.image
        if not IMAGE.fullmatch(image):
            raise SandboxUnavailable(f"{image[:80]!r} is no name of an image")
        remove_ownerless(self.engine)
        for attempt in range(1, _STARTS + 1):
            try:
                return ContainerRuntime(self.engine, image, spec)
            except RuntimeFailed:
                if attempt == _STARTS:
                    raise
        raise AssertionError("unreachable")


class ContainerRuntime:
    """See `rft.types.runtimes.AgentRuntime`."""

    def __init__(self, engine: EngineCommand, image: str, spec: RuntimeSpec) -> None:
        self.listener: socket.socket | None = None
        self._engine = engine
        self._spec = spec
        self._killing = threading.Lock()
        self._dead = False
        self._name = container_name()
        self._first = subprocess.Popen(
            [*engine.command, *self._line(image)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=NOWHERE,
        )
        try:
            self._await_start()
            state = json.loads(engine.run("inspect", "--type", "container", self._name))[0]
            self._pid = int(state["State"]["Pid"])
            self.workdir = spec.workdir or state["Config"]["WorkingDir"] or "/"
            if spec.port:
                self.listener = self._listening(spec.port)
        except BaseException:
            self.kill()
            raise

    def _line(self, image: str) -> list[str]:
        limits = self._spec.limits
        return [
            *("run", "--rm", "--interactive", "--name", self._name, "--pull", "never"),
            *("--network", "none", "--hostname", "runtime", "--stop-timeout", "0"),
            *("--memory", f"{limits.memory_mb}m", "--memory-swap", f"{limits.memory_mb}m"),
            *("--cpus", f"{limits.cpus:g}", "--pids-limit", str(limits.processes)),
            *("--ulimit", f"fsize={limits.disk_mb << 20}:{limits.disk_mb << 20}"),
            *("--ulimit", "nofile=4096:4096", "--ulimit", "core=0:0"),
            *("--ulimit", "nproc=4096:4096", "--user", "0:0"),
            *("--cap-drop", "all", "--security-opt", "no-new-privileges"),
            *(word for name in _CAPABILITIES for word in ("--cap-add", name)),
            *(
                word
                for name, text in self._spec.env.items()
                for word in ("--env", f"{name}={text}")
            ),
            *(
                word
                for folder in self._spec.shown
                for word in ("--volume", f"{folder}:{folder}:ro")
            ),
            *("--entrypoint", "/bin/sh", image, "-c", _FIRST, self._spec.workdir or "/"),
        ]

    def _await_start(self) -> None:
        assert self._first.stdout is not None and self._first.stderr is not None
        ready, _, _ = select.select([self._first.stdout], [], [], _START_S)
        if ready and self._first.stdout.read(1):
            return
        self._first.kill()
        # a monitor may keep stderr open and write nothing
        readable, _, _ = select.select([self._first.stderr], [], [], 1.0)
        errors = os.read(self._first.stderr.fileno(), 4096) if readable else b""
        raise RuntimeFailed(
            f"no container could be started: "
            f"{errors.decode(errors='replace').strip()[-500:] or f'nothing for {_START_S:g} s'}"
        )

    def _listening(self, port: int) -> socket.socket:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            self._join("listen", str(port), str(theirs.fileno()), pass_fds=(theirs.fileno(),))
            _, fds, _, _ = socket.recv_fds(ours, 16, 1)
        return socket.socket(fileno=fds[0])

    def _join(self, *words: str, pass_fds: Sequence[int] = ()) -> None:
        root = str(Path(__file__).resolve().parents[3])
        line = [sys.executable, "-I", "-S", "-B", "-c", _BOOT, root, str(self._pid), *words]
        done = subprocess.run(line, capture_output=True, pass_fds=pass_fds, check=False)
        if done.returncode:
            raise RuntimeFailed(done.stderr.decode(errors="replace").strip()[-500:])

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
        line = [
            *(*self._engine.command, "exec", "--interactive", "--workdir", self.workdir),
            *(word for name, text in (env or {}).items() for word in ("--env", f"{name}={text}")),
            *(("--user", user) if user else ()),
            *(self._name, *command),
        ]
        pipes = [os.pipe() for _ in range(3)]
        theirs = [pipes[0][0], pipes[1][1], pipes[2][1]]
        try:
            process = subprocess.Popen(
                line, stdin=theirs[0], stdout=theirs[1], stderr=theirs[2], cwd=NOWHERE
            )
        finally:
            for fd in theirs:
                os.close(fd)
        end = os.pidfd_open(process.pid)
        try:
            with Talk([pipes[0][1], pipes[1][0], pipes[2][0]], stdin) as talk:
                ended = talk.until(end, time.monotonic() + timeout_s)
                if not ended:
                    process.kill()
                code = process.wait()
                talk.drain()
                output, errors = talk.tails()
        finally:
            os.close(end)
        if self._has_ended(ended, code):
            raise RuntimeFailed(
                f"the container has ended, or its engine failed: "
                f"{errors.decode(errors='replace').strip()[-500:]}"
            )
        return Executed(code if ended else None, output, errors)

    def _has_ended(self, ended: bool, code: int) -> bool:
        """Return whether the container ended, or its engine failed, under a program."""
        if self._dead or self._first.poll() is not None or (ended and code == _ENGINE_FAILED):
            return True
        if not ended or code != _KILLED:
            return False
        with contextlib.suppress(subprocess.TimeoutExpired):  # killed by itself or with all
            self._first.wait(_DYING_S)
            return True
        return False

    def put(self, archive: bytes, *, read_only: str = "") -> None:
        """See `AgentRuntime`."""
        self._engine.run("cp", "-", f"{self._name}:/", stdin=archive)
        if read_only:
            self._join("lock", read_only)

    def get(self, path: str, *, most_bytes: int) -> bytes:
        """See `AgentRuntime`."""
        with subprocess.Popen(
            [*self._engine.command, "cp", f"{self._name}:{path}", "-"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=NOWHERE,
        ) as copying:
            assert copying.stdout is not None and copying.stderr is not None
            archive = copying.stdout.read(most_bytes + 1)
            if len(archive) > most_bytes:
                copying.kill()
                raise RuntimeFailed(f"{path} has more than {most_bytes} bytes")
            errors = copying.stderr.read(_PIECE)
        if copying.returncode:
            if _MISSING.search(errors) and self._first.poll() is None:
                raise FileNotFoundError(path)
            raise RuntimeFailed(errors.decode(errors="replace").strip()[-500:])
        return archive

    def stop(self) -> None:
        """See `AgentRuntime`."""
        self._join("stop")

    def snapshot(self) -> ContainerFiles:
        """See `AgentRuntime`."""
        image = f"{SNAPSHOT}{self._name}"
        self._engine.run("commit", "--quiet", self._name, image)
        return ContainerFiles(self._engine, image)

    def kill(self) -> None:
        """See `AgentRuntime`."""
        with self._killing:
            if self._dead:
                return
            self._dead = True
            if self.listener is not None:
                self.listener.close()
            try:
                self._engine.remove(self._name)
            finally:
                self._first.kill()
                for stream in (self._first.stdin, self._first.stdout, self._first.stderr):
                    if stream is not None:
                        with contextlib.suppress(BrokenPipeError):
                            stream.close()
                self._first.wait()

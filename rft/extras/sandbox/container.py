"""Run programs in containers with the command line of Podman or Docker: only the image's files, no
network, removed when the program ends.

The alternative is `rft.extras.sandbox.code_sandbox.Sandbox`, which isolates programs with the
kernel; both fulfil `rft.extras.sandbox.project.ProgramRunner`.
Invariant: when a run ends in any way, its container is removed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rft.extras.sandbox import jobs
from rft.extras.sandbox.jobs import Ran
from rft.extras.sandbox.processes import ProgramLimits, SandboxError, SandboxUnavailable
from rft.worker.job_pool import JobPool

# environment variable: the container engine's command instead of `podman` or `docker`
COMMAND = "RFT_CONTAINER_COMMAND"
CLOSE_S = 5.0  # time that `close` leaves to programs in progress
_START_S = 60.0
_REMOVE_S = 30.0
_STARTS = 3  # attempts: runc sometimes loses a container between creating and starting it
_THREADS = 16  # minimum task limit of a container: runc's own threads count during its start
_KILLED = 137
IMAGE = re.compile(r"[A-Za-z0-9][\w.:/@-]{0,254}", re.ASCII)  # cannot be an option of the engine
_BOOT = (
    "import sys; print(end='\\0', flush=True); read = sys.stdin.buffer.read; n = "
    "int.from_bytes(read(8), 'big'); "
    "exec(compile(read(n), '<program>', 'exec'), {'__name__': '__main__'})"
)


def container_command() -> tuple[str, ...]:
    """Return the command that starts containers.  Raises SandboxUnavailable."""
    if command := os.environ.get(COMMAND):
        return tuple(command.split())
    for name in ("podman", "docker"):
        if shutil.which(name):
            return (name,)
    raise SandboxUnavailable(
        f"neither podman nor docker is installed; install one, set {COMMAND}, or use the sandbox "
        f"`local`"
    )


@dataclass
class _Started:
    """A program in the form that `jobs.talk` needs."""

    engine: subprocess.Popen[bytes]
    fds: dict[str, int] = field(default_factory=dict)

    def wait(self, timeout_s: float) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.engine.wait(timeout_s)
        return None


class ContainerSandbox(JobPool):
    """Runs at most `size` concurrent containers of `image`, which needs `python3`.

    Usable from any thread and any event loop.
    """

    def __init__(
        self, image: str, *, size: int | None = None, command: Sequence[str] | None = None
    ) -> None:
        """Raises ValueError for an invalid image name, SandboxUnavailable if no container engine is
        installed.
        """
        if not IMAGE.fullmatch(image):
            raise ValueError(
                f"{image[:80]!r} is no name of an image, such as "
                f"registry.example.org/team/python:3.11"
            )
        super().__init__(
            "containers", size=size if size is not None else max(2, min(16, os.cpu_count() or 1))
        )
        self.image = image
        self._command = tuple(command or container_command())
        self._names: set[str] = set()
        self._closing = False

    async def run(self, program: str, limits: ProgramLimits, stdin: bytes = b"") -> Ran:
        """Return the program's output, and the reason of a failure.  Raises SandboxError,
        SandboxUnavailable.
        """
        return await asyncio.wrap_future(
            self._submit(lambda: self._ran(program.encode(), limits, stdin))
        )

    def close(self) -> None:
        """Leave some seconds to programs in progress, then remove every container."""
        self._end_jobs(self._remove_all, after_s=CLOSE_S)
        self._closing = False

    def _remove_all(self) -> None:
        self._closing = True
        for name in list(self._names):
            self._remove(name)

    def _ran(self, program: bytes, limits: ProgramLimits, stdin: bytes) -> Ran:
        with self._container(limits) as process:
            deadline = time.monotonic() + limits.timeout_s
            stdin_frame = len(program).to_bytes(8, "big") + program + stdin
            output, errors, stopped = jobs.talk(process, stdin_frame, deadline, limits)
            if stopped:
                return jobs.was_stopped(stopped, limits)
            status = process.engine.wait()
        if status == 0:
            return Ran("", "", output)
        if status == _KILLED:
            return Ran("memory", f"more than {limits.memory_mb} MB", b"")
        return jobs.how_ended(status, jobs.last_line(errors), limits)

    @contextlib.contextmanager
    def _container(self, limits: ProgramLimits) -> Iterator[_Started]:
        """Start a container whose Python waits for its program; a failed start has no effect and is
        repeated.
        """
        with contextlib.ExitStack() as stack:
            for attempt in range(1, _STARTS + 1):
                try:
                    process = stack.enter_context(self._started(limits))
                    self._await_start(process)
                    break
                except SandboxError:
                    stack.close()
                    if attempt == _STARTS or self._closing:
                        raise
            yield process

    @contextlib.contextmanager
    def _started(self, limits: ProgramLimits) -> Iterator[_Started]:
        name = f"rft-{os.getpid()}-{secrets.token_hex(6)}"
        self._names.add(name)
        try:
            with (
                tempfile.TemporaryDirectory(prefix="rft-container-") as folder,
                self._spawned(name, limits, folder) as process,
            ):
                yield process
        finally:
            self._remove(name)
            self._names.discard(name)

    @contextlib.contextmanager
    def _spawned(self, name: str, limits: ProgramLimits, folder: str) -> Iterator[_Started]:
        """Start the engine's command; `folder` is its working folder, where Podman's monitor may
        leave files.
        """
        ours: dict[str, int] = {}
        theirs: dict[str, int] = {}
        for stream in ("stdin", "stdout", "stderr"):
            read, write = os.pipe()
            ours[stream], theirs[stream] = (write, read) if stream == "stdin" else (read, write)
        process: _Started | None = None
        try:
            try:
                engine = subprocess.Popen(self._line(name, limits), cwd=folder, **theirs)  # type: ignore[call-overload]
                process = _Started(engine, ours)
            finally:
                for fd in theirs.values():
                    os.close(fd)
            yield process
        except OSError as e:
            raise SandboxUnavailable(f"{self._command[0]} cannot be started: {e}") from e
        finally:
            for fd in ours.values():
                os.close(fd)
            if process is not None:
                process.engine.kill()
                process.engine.wait()

    def _line(self, name: str, limits: ProgramLimits) -> list[str]:
        memory = f"{limits.memory_mb}m"
        seconds = str(max(1, round(limits.timeout_s)))
        tasks = max(limits.processes + 1, _THREADS)
        return [
            *self._command,
            "run",
            "--rm",
            "--interactive",
            "--name",
            name,
            "--pull",
            "never",
            "--network",
            "none",
            "--read-only",
            "--tmpfs",
            f"/tmp:rw,size={limits.file_mb}m,mode=1777",
            "--memory",
            memory,
            "--memory-swap",
            memory,
            "--cpus",
            "1",
            "--pids-limit",
            str(tasks),
            "--cap-drop",
            "all",
            "--security-opt",
            "no-new-privileges",
            "--user",
            "65534:65534",
            "--ulimit",
            f"nofile={limits.files}:{limits.files}",
            "--ulimit",
            f"cpu={seconds}:{int(seconds) + 1}",
            "--ulimit",
            "core=0:0",
            "--ulimit",
            "nproc=4096:4096",
            "--workdir",
            "/tmp",
            "--env",
            "PYTHONDONTWRITEBYTECODE=1",
            "--env",
            "HOME=/tmp",
            "--entrypoint",
            "python3",
            self.image,
            "-c",
            _BOOT,
        ]

    def _await_start(self, process: _Started) -> None:
        """Wait until Python runs in the container; the engine's start does not count as the
        program's time.
        """
        ready, _, _ = select.select([process.fds["stdout"]], [], [], _START_S)
        if ready and os.read(process.fds["stdout"], 1) == b"\0":
            return
        process.engine.kill()
        status = process.engine.wait()
        # a monitor may keep stderr open and write nothing
        readable, _, _ = select.select([process.fds["stderr"]], [], [], 1.0)
        stderr_text = (
            os.read(process.fds["stderr"], 4096).decode(errors="replace") if readable else ""
        )
        raise SandboxError(
            f"no container of {self.image} could be started (status {status}): "
            f"{stderr_text.strip()[-500:] or f'nothing for {_START_S:g} s'}"
        )

    def _remove(self, name: str) -> None:
        command = [
            *self._command,
            "rm",
            "--force",
            "--volumes",
            *(["--ignore"] if "podman" in self._command[0] else []),
            name,
        ]
        try:
            done = subprocess.run(command, capture_output=True, timeout=_REMOVE_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as e:
            raise SandboxError(f"the container {name} could not be removed: {e}") from e
        if done.returncode and b"no such container" not in done.stderr.lower():
            raise SandboxError(
                f"the container {name} could not be removed: "
                f"{done.stderr.decode(errors='replace').strip()[-300:]}"
            )

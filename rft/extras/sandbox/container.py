"""Run programs in containers with the command line of Podman or Docker: only the image's files, no
network, removed when the program ends.

The alternative is `rft.extras.sandbox.code_sandbox.Sandbox`, which isolates programs with the
kernel; both fulfil `rft.extras.sandbox.project.ProgramRunner`.
Invariant: when a run ends in any way, its container is removed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
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
from functools import cache
from pathlib import Path

import psutil

from rft.extras.sandbox import jobs
from rft.extras.sandbox.jobs import Ran
from rft.extras.sandbox.processes import ProgramLimits, SandboxError, SandboxUnavailable
from rft.launch.leftovers import began
from rft.types.runtimes import RuntimeFailed
from rft.worker.job_pool import JobPool

log = logging.getLogger(__name__)

# environment variable: the container engine's command instead of `podman` or `docker`
COMMAND = "RFT_CONTAINER_COMMAND"
CLOSE_S = 5.0  # time that `close` leaves to programs in progress
_START_S = 60.0
_ENGINE_S = 120.0  # for a command of the engine
_STARTS = 3  # attempts: runc sometimes loses a container between creating and starting it
_THREADS = 16  # minimum task limit of a container: runc's own threads count during its start
_KILLED = 137
SNAPSHOT = "localhost/"  # before a container's name: the image of its snapshot
NOWHERE = "/proc"  # a working folder in which the engine's monitor can leave no file
_NAME = re.compile(r"rft-(\d+)-(\d+)-(\d+)-[0-9a-f]{12}")
IMAGE = re.compile(r"[A-Za-z0-9][\w.:/@-]{0,254}", re.ASCII)  # cannot be an option of the engine
_BOOT = (
    "import sys; print(end='\\0', flush=True); read = sys.stdin.buffer.read; n = "
    "int.from_bytes(read(8), 'big'); "
    "exec(compile(read(n), '<program>', 'exec'), {'__name__': '__main__'})"
)


def container_command() -> tuple[str, ...]:
    """Return the command that starts containers.  Raises SandboxUnavailable."""
    if words := tuple(os.environ.get(COMMAND, "").split()):
        if Path(words[0]).name in ("apptainer", "singularity"):
            raise SandboxUnavailable(
                f"{COMMAND}={' '.join(words)}: it has no `cp` and no `commit`, which files and snapshots of "
                f"a runtime need; name podman or docker, or use the sandbox `local`"
            )
        return words
    for name in ("podman", "docker"):
        if shutil.which(name):
            return (name,)
    raise SandboxUnavailable(
        f"neither podman nor docker is installed; install one, set {COMMAND}, or use the sandbox "
        f"`local`"
    )


@dataclass(frozen=True)
class EngineCommand:
    """The engine's command line."""

    command: tuple[str, ...]

    @property
    def is_podman(self) -> bool:
        return "podman" in self.command[0]

    def run(self, *words: str, stdin: bytes = b"") -> bytes:
        """Return the output of a command.  Raises RuntimeFailed, SandboxUnavailable."""
        # Podman leaves its copy of an archive in the temporary folder
        folder = tempfile.TemporaryDirectory(prefix=f"rft-engine-{os.getpid()}-")
        try:
            with folder as place:
                done = subprocess.run(
                    [*self.command, *words],
                    input=stdin,
                    capture_output=True,
                    timeout=_ENGINE_S,
                    check=False,
                    cwd=NOWHERE,
                    env={**os.environ, "TMPDIR": place},
                )
        except subprocess.TimeoutExpired:
            raise RuntimeFailed(f"{words[0]}: no answer after {_ENGINE_S:g} s") from None
        except OSError as e:
            raise SandboxUnavailable(f"{self.command[0]} cannot be started: {e}") from e
        if done.returncode:
            raise RuntimeFailed(
                f"{words[0]}: {done.stderr.decode(errors='replace').strip()[-500:]}"
            )
        return done.stdout

    def remove(self, name: str) -> None:
        """Remove a container, or a snapshot's image, which may be gone."""
        kind = ("rmi",) if name.startswith(SNAPSHOT) else ("rm", "--volumes")
        ignore = ("--ignore",) if self.is_podman else ()
        try:
            self.run(*kind, "--force", *ignore, name)
        except RuntimeFailed as e:
            if "no such" not in str(e).lower():
                raise


def container_name() -> str:
    """Return a new container's name; it says which process owns the container."""
    pid = os.getpid()
    return f"rft-{pid}-{began(pid)}-{_process_space()}-{secrets.token_hex(6)}"


@cache
def remove_ownerless(engine: EngineCommand) -> None:
    """Remove containers and snapshots whose owner was killed; once in a process.

    Podman forgets what `podman run` had begun when it was killed, so processes are ended here.
    """
    words = ("ps", "--all", *(("--external",) if engine.is_podman else ()), "--no-trunc")
    listed = engine.run(*words, "--format", "{{.ID}} {{.Names}}").decode().splitlines()
    containers = [line.partition(" ")[::2] for line in listed]
    ownerless = {number for number, name in containers if _is_ownerless(name)}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            cgroups = Path(f"/proc/{process.pid}/cgroup").read_text(encoding="utf-8")
            named = any(map(_is_ownerless, process.cmdline()))
            if named or any(number in cgroups for number in ownerless):
                for each in (process, *process.children(recursive=True)):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        each.kill()
    images = engine.run("images", "--format", "{{.Repository}}").decode().split()
    for name in filter(_is_ownerless, [*(name for _, name in containers), *images]):
        log.info("%s, left by a killed process, is removed", name)
        engine.remove(name)


def _is_ownerless(name: str) -> bool:
    owner = _NAME.fullmatch(name.removeprefix(SNAPSHOT))
    return (
        owner is not None and owner[3] == str(_process_space()) and began(owner[1]) != int(owner[2])
    )


def _process_space() -> int:
    """Return the number of the space in which process numbers have one meaning."""
    space = Path("/proc/self/ns/pid")
    return space.stat().st_ino if space.exists() else 0


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
        self._engine = EngineCommand(tuple(command or container_command()))
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
        try:
            remove_ownerless(self._engine)
        except RuntimeFailed as e:
            raise SandboxError(f"containers cannot be listed: {e}") from e
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
        name = container_name()
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
            raise SandboxUnavailable(f"{self._engine.command[0]} cannot be started: {e}") from e
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
            *self._engine.command,
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
        try:
            self._engine.remove(name)
        except RuntimeFailed as e:
            raise SandboxError(f"the container {name} could not be removed: {e}") from e

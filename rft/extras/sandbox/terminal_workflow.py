"""Play tasks of Harbor's form with an agent inside a runtime; the task's tests judge what it left.

explorer_input:
  taskset: {path: "rft.extras.sandbox.harbor_tasks:harbor_tasks", args: {folder: ...},
  default_workflow_type: terminal_workflow, workflow_args: {command: [...]}}

Invariant: tests and solution are in no runtime of the agent.  When it has ended, every process is
killed; the tests run in a new runtime of the task's image that gets the work folder as the agent
left it, and from which nothing leads to the network.
"""

from __future__ import annotations

import asyncio
import io
import posixpath
import socket
import tarfile
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from rft import Score, Task, register
from rft.extras.sandbox.container_runtime import ContainerDriver
from rft.extras.sandbox.dockerfile import Steps, carry_out, read_dockerfile
from rft.extras.sandbox.harbor_tasks import HarborTask, read_reward, read_task
from rft.extras.sandbox.image import built_from
from rft.extras.sandbox.local_runtime import MachineDriver
from rft.extras.sandbox.runtime_pool import RuntimeLease, RuntimePool
from rft.types.runtimes import (
    AgentRuntime,
    Executed,
    RuntimeDriver,
    RuntimeFailed,
    RuntimeLimits,
    RuntimeSpec,
    packed,
    packed_file,
    packed_folder,
)
from rft.workflow.agent import (
    AgentFailed,
    AgentWorkflow,
    ProcessOutput,
    ProgramArgs,
    prompt_text,
)
from rft.workflow.endpoint import also_at

LOGS = "/logs/verifier"
_LOGS = ("/logs/agent", LOGS, "/logs/artifacts")
HOME = "/root"
_REWARDS = ("reward.json", "reward.txt")
_LARGEST = 256 << 20  # bytes of what an agent leaves
_LARGEST_REWARD = 1 << 20
_CANNOT_START = (126, 127)
_TAIL = 4096  # characters of outputs in a record
_LONGEST_S = 24 * 3600.0
_REMOVE = ("rm", "-rf", "--")
# where a link out of the work folder may lead: what an image has, and no tests
_LINKED = ("/bin/", "/etc/", "/lib/", "/lib64/", "/opt/", "/sbin/", "/usr/")
_POOLS: dict[tuple[str, int | None], RuntimePool] = {}


class TerminalArgs(ProgramArgs):
    """A program that is an agent, in a runtime of the task.

    `sandbox: local` has this machine's programs in place of the image, and carries out the
    Dockerfile's COPY, ENV, RUN and WORKDIR; `container`: Podman or Docker.
    """

    sandbox: Literal["local", "container"] = "local"
    shown: list[str] = Field(
        default_factory=list,
        description="folders of this machine that it sees, read-only, at the same place; for agents "
        "that are in no image",
    )
    carry: Literal["workdir", "everything"] = Field(
        default="workdir",
        description="what the tests get of what the agent left; everything: also programs that it "
        "may have replaced",
    )
    at_once: int | None = Field(default=None, ge=1, description="runtimes; default: cores, 2 to 16")


@register.workflow("terminal_workflow", args=TerminalArgs)
class TerminalWorkflow(AgentWorkflow):
    """Runs `command` in the task's runtime, with the variables that OpenAI's and Anthropic's
    clients read, and HOME in /root.  The reward is that of the task's tests.
    """

    def __init__(self, **args: Any) -> None:
        self.args = TerminalArgs(**args)

    async def agent(self, task: Task, base_url: str, api_key: str) -> ProcessOutput:
        values = {"base_url": base_url, "api_key": api_key, "home": HOME}
        values["prompt"] = prompt_text(task)
        harbor = read_task(Path(task.row["folder"]))
        files = {f"{HOME}/{k}": v.encode() for k, v in self.args.files(values).items()}
        limit_s = harbor.table.agent.timeout_sec or _LONGEST_S
        env = {"HOME": HOME, **self.args.variables(values)}
        command = self.args.line(values)
        stdin = self.args.input(task, values).encode()

        def play(runtime: AgentRuntime) -> Executed:
            runtime.put(packed(files))
            user = str(harbor.table.agent.user or "")
            return runtime.exec(command, stdin=stdin, env=env, user=user, timeout_s=limit_s)

        port = int(base_url.split(":")[2].partition("/")[0])
        attempt = Attempt(harbor, self.args, play, port=port)
        loop = asyncio.get_running_loop()
        async with AsyncExitStack() as stack:

            def serve(listener: socket.socket) -> None:
                serving = stack.enter_async_context(also_at(listener))
                asyncio.run_coroutine_threadsafe(serving, loop).result()

            score = await pool(self.args).use(lambda lease: attempt.judged(lease, serve))
        output = ProcessOutput(attempt.info.pop("agent_output"))
        output.score, output.info = score, attempt.info
        return output


def pool(args: TerminalArgs) -> RuntimePool:
    """Return the pool of a kind of runtimes, which all workflows of this process share."""
    key = (args.sandbox, args.at_once)
    if key not in _POOLS:
        driver: RuntimeDriver = MachineDriver() if args.sandbox == "local" else ContainerDriver()
        _POOLS[key] = RuntimePool(driver, size=args.at_once)
    return _POOLS[key]


async def solved(folder: Path, args: TerminalArgs | None = None, *, empty: bool = False) -> Score:
    """Return the score of a task's own solution, or of an agent that does nothing."""
    harbor = read_task(folder)
    solution = folder / "solution"
    args = args or TerminalArgs(command=["true"])

    def play(runtime: AgentRuntime) -> Executed:
        if empty:
            return Executed(0, b"", b"")
        runtime.put(packed_folder(solution, "/solution", run=["solve.sh"]))
        limit_s = harbor.table.agent.timeout_sec or _LONGEST_S
        return runtime.exec(
            ["/solution/solve.sh"], env=harbor.table.solution.env, timeout_s=limit_s
        )

    return await pool(args).use(Attempt(harbor, args, play).judged)


class Attempt:
    """One attempt at a task.  `play`: what happens in its runtime; `info`: for the record."""

    def __init__(
        self,
        task: HarborTask,
        args: TerminalArgs,
        play: Callable[[AgentRuntime], Executed],
        *,
        port: int = 0,
    ) -> None:
        self.info: dict[str, Any] = {}
        self._task = task
        self._args = args
        self._play = play
        self._port = port
        self._steps = Steps()

    def judged(
        self, lease: RuntimeLease, serve: Callable[[socket.socket], None] | None = None
    ) -> Score:
        """Play, then judge.  `serve`: gets the agent's one way out.  Raises AgentFailed,
        RuntimeFailed.
        """
        spec = self._spec()
        runtime = self._started(lease, replace(spec, port=self._port, shown=self._args.shown))
        runtime.exec(["mkdir", "-p", *_LOGS], timeout_s=_LONGEST_S)
        if serve is not None and runtime.listener is not None:
            serve(runtime.listener)
        done = self._play(runtime)
        runtime.stop()
        self.info["agent_output"] = _tail(done)
        self.info["agent_exit"] = "timeout" if done.code is None else done.code
        if done.code in _CANNOT_START:
            raise AgentFailed(f"the agent cannot be started: {_tail(done)}")
        # room for the tests beside a full disk
        limits = replace(spec.limits, disk_mb=2 * spec.limits.disk_mb)
        return self._tested(self._carried(lease, runtime, replace(spec, limits=limits)))

    def _spec(self) -> RuntimeSpec:
        table = self._task.table.environment
        workdir = table.workdir or ""
        env = dict(table.env)
        image = ""
        if self._args.sandbox == "local":
            if not self._task.dockerfile.is_file():
                raise RuntimeFailed(f"{self._task.folder} has an image, which needs containers")
            self._steps = read_dockerfile(self._task.dockerfile.read_text(encoding="utf-8"))
            workdir = workdir or self._steps.workdir
            env = self._steps.env | env
        else:
            context = self._task.dockerfile.parent
            image = table.docker_image or built_from(context, timeout_s=table.build_timeout_sec)
        default = RuntimeLimits()
        limits = RuntimeLimits(
            cpus=table.cpus or default.cpus,
            memory_mb=table.memory_mb or default.memory_mb,
            disk_mb=table.storage_mb or default.disk_mb,
        )
        return RuntimeSpec(image=image, workdir=workdir, env=env, limits=limits)

    def _started(self, lease: RuntimeLease, spec: RuntimeSpec) -> AgentRuntime:
        runtime = lease.start(spec)
        limit_s = self._task.table.environment.build_timeout_sec
        carry_out(self._steps, self._task.dockerfile.parent, runtime, limit_s)
        return runtime

    def _carried(
        self, lease: RuntimeLease, runtime: AgentRuntime, spec: RuntimeSpec
    ) -> AgentRuntime:
        """Return the runtime of the tests, with what the agent left."""
        if self._args.carry == "everything":
            return lease.start(spec, files=lease.snapshot())
        if runtime.workdir == "/":
            raise RuntimeFailed(
                f"{self._task.folder} has the work folder /; give it a WORKDIR, or `carry: "
                f"everything`"
            )
        archives = []
        for path in (runtime.workdir, *self._task.table.carried()):
            try:
                archives.append((path, runtime.get(path, most_bytes=_LARGEST)))
            except FileNotFoundError:
                self.info.setdefault("missing", []).append(path)
        tests = self._started(lease, spec)
        for path, archive in archives:
            tests.exec([*_REMOVE, path], timeout_s=_LONGEST_S)
            tests.put(moved(archive, path, as_folder=path == runtime.workdir))
        return tests

    def _tested(self, runtime: AgentRuntime) -> Score:
        verifier = self._task.table.verifier
        user = str(verifier.user or "")
        runtime.exec([*_REMOVE, "/tests", LOGS], timeout_s=_LONGEST_S)
        mode = "777" if user else "755"
        runtime.exec(["mkdir", "-p", "-m", mode, LOGS], timeout_s=_LONGEST_S)
        runtime.put(
            packed_folder(self._task.folder / "tests", "/tests", run=["test.sh"], private=not user),
            read_only="/tests",
        )
        done = runtime.exec(
            ["/tests/test.sh"], env=verifier.env, user=user, timeout_s=verifier.timeout_sec
        )
        runtime.stop()
        self.info["tests_output"] = _tail(done)
        if done.code is None:
            raise RuntimeFailed(f"the tests had no end after {verifier.timeout_sec:g} s")
        for name in _REWARDS:
            try:
                archive = runtime.get(f"{LOGS}/{name}", most_bytes=_LARGEST_REWARD)
                return read_reward(name, packed_file(archive))
            except FileNotFoundError:
                continue
            except ValueError as e:
                raise RuntimeFailed(f"{self._task.folder}: {e}") from None
        raise RuntimeFailed(
            f"the tests of {self._task.folder} wrote no reward (exit {done.code}): {_tail(done)}"
        )


def moved(archive: bytes, path: str, *, as_folder: bool = False) -> bytes:
    """Return the archive of `path` with names from the root, without what could lead to tests.

    `as_folder`: it is a folder, whatever the archive has in its place.

    Kept are files, folders, and links inside `path` or to programs: a link into the tests would
    show them to a test that compares files.
    """
    out = io.BytesIO()
    parent = posixpath.dirname(path.rstrip("/"))
    top = path.strip("/")
    with (
        tarfile.open(fileobj=io.BytesIO(archive)) as old,
        tarfile.open(fileobj=out, mode="w") as new,
    ):
        if as_folder:
            folder = tarfile.TarInfo(top)
            folder.type = tarfile.DIRTYPE
            folder.mode = 0o755
            new.addfile(folder)
        for entry in old:
            entry.name = posixpath.join(parent, entry.name).strip("/")
            if entry.issym() and not _harmless(entry, top):
                continue
            if as_folder and entry.name == top and not entry.isdir():
                continue
            if entry.islnk():
                entry.linkname = posixpath.join(parent, entry.linkname).strip("/")
            if entry.isreg():
                new.addfile(entry, old.extractfile(entry))
            elif entry.isdir() or entry.issym() or entry.islnk():
                new.addfile(entry)
    return out.getvalue()


def _harmless(link: tarfile.TarInfo, top: str) -> bool:
    """Whether a link stays in `top` or leads to programs.

    `..` counts at the beginning of a relative target alone: behind another link it leads anywhere.
    """
    target = link.linkname
    if target.startswith("/"):
        within = target.startswith((f"/{top}/", *_LINKED))
        return ".." not in target.split("/") and within
    rest = target
    while rest.startswith("../"):
        rest = rest[3:].lstrip("/")
    place = posixpath.normpath(posixpath.join(posixpath.dirname(link.name), target))
    return ".." not in rest.split("/") and f"{place}/".startswith(f"{top}/")


def _tail(done: Executed) -> str:
    return (done.output + done.errors).decode(errors="replace")[-_TAIL:]

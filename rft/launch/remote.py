"""`Proxy`, which calls a part in another process like a local object.

Translates Ray's errors, alone in the package: an exception of the part is raised unchanged, a dead
process becomes RunFailed (or OutOfMemory) with its name.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import psutil

from rft.engine.watch import Usage, Watch, usage
from rft.errors import (
    DeadlineExceeded,
    EngineStalled,
    OutOfMemory,
    RunFailed,
    is_out_of_memory,
)
from rft.launch.ray_calls import answer

log = logging.getLogger(__name__)
_WAITS = (
    ".  Where it does no more than wait (a plugin that blocks the event loop), raise "
    "cluster.stall_timeout"
)
ANSWER_S = 60.0  # for a health check, which waits for a restart by Ray
T = TypeVar("T")
# returns machine and pid of the process
Beat = Callable[[], Awaitable[tuple[str, int]]]


class Pulse:
    """Detects during calls that a process hangs, with one watcher for all calls.

    Limits as in `rft.engine.watch`, where an answer counts as a step.  A hang raises `error`, whose
    message ends with `remedy`.
    """

    def __init__(
        self,
        name: str,
        beat: Beat,
        stall_s: float | None,
        step_s: float | None,
        *,
        error: type[RunFailed] = EngineStalled,
        remedy: str = "",
    ) -> None:
        self._name = name
        self._beat = beat
        self._limits = (stall_s, step_s)
        self._error = error
        self._remedy = remedy
        self._place: tuple[str, int] | None = None
        self._deadlines: set[asyncio.Timeout] = set()  # of running calls
        self._watching: asyncio.Task[None] | None = None
        self.hung = ""  # reason of a hang since the last answer

    async def during(self, call: Awaitable[T]) -> T:
        """Await `call`.  Raises `error` once the process hangs."""
        if self._watching is None or self._watching.done():
            self._watching = asyncio.ensure_future(self._watch())
        try:
            async with asyncio.timeout(None) as deadline:
                self._deadlines.add(deadline)
                try:
                    return await call
                finally:
                    self._deadlines.discard(deadline)
        except TimeoutError:
            if not deadline.expired():  # a timeout of the call itself
                raise
            raise self._error(f"{self._name} hangs: {self.hung}{self._remedy}") from None

    async def _watch(self) -> None:
        """Watch until no call is running, the process has died (calls raise), or it hangs."""
        watch = Watch(*self._limits, self._usage)
        beat: asyncio.Future[tuple[str, int]] | None = None
        while self._deadlines:
            beat = beat or asyncio.ensure_future(self._beat())
            done, _ = await asyncio.wait({beat}, timeout=watch.interval_s)
            if done:
                if beat.cancelled() or beat.exception() is not None:
                    return
                self._place = beat.result()
                beat = None
                self.hung = ""
                await asyncio.sleep(watch.interval_s)
                watch.progress()
            elif reason := await asyncio.to_thread(watch.look):
                self.hung = f"its process answers nothing, {reason}"
                log.error("%s hangs: %s", self._name, self.hung)
                # retrieve its exception
                beat.add_done_callback(lambda b: b.cancelled() or b.exception())
                for deadline in self._deadlines:
                    if not deadline.expired():
                        deadline.reschedule(0)
                return

    def _usage(self) -> Usage | None:
        """Return the usage of the process without its children, which may be healthy.

        None: unknown, ended, or on another machine.
        """
        if (
            self._place is None
            or self._place[0] != os.uname().nodename
            or not psutil.pid_exists(self._place[1])
        ):
            return None
        return usage([self._place[1]], family=False)


class Proxy:
    """Calls a part in another process: `await proxy.method(...)`.  Can be sent to other actors.

    With `limits` (`stall_s`, `step_s` of `rft.engine.watch`) calls of a hanging process raise
    EngineStalled.  `start_s`: deadline of a restart.
    """

    def __init__(
        self,
        handle: Any,
        name: str,
        error: type[RunFailed] = RunFailed,
        limits: tuple[float | None, float | None] = (None, None),
        start_s: float | None = None,
    ) -> None:
        self._handle = handle
        self._name = name
        self._error = error
        self._limits = limits
        self._start_s = start_s
        self._pulse = Pulse(name, self._beat, *limits) if limits != (None, None) else None

    def __reduce__(self) -> tuple[Any, ...]:
        return (Proxy, (self._handle, self._name, self._error, self._limits, self._start_s))

    async def restart(self) -> None:
        """Restart the part in a new process.

        Raises if it cannot be built, or died too often.
        """
        if reason := await self._broken():
            log.warning("%s: %s; its process is ended", self._name, reason)
            await self._end()
        await self._guarded(self._handle.start.remote(), self._start_s)

    async def lives(self, stall_s: float | None) -> None:
        """Wait while the process lives.

        Raises when it dies, or shows no sign of life for `stall_s`.
        """
        last = self._guarded(self._handle.last.remote())
        if stall_s is not None:
            last = Pulse(
                self._name, self._beat, stall_s, None, error=self._error, remedy=_WAITS
            ).during(last)
        await last

    async def kill(self) -> None:
        """End its process for good."""
        import ray

        await answer(f"end {self._name}", ray.kill, self._handle, no_restart=True)

    def _beat(self) -> Awaitable[tuple[str, int]]:
        return self._guarded(self._handle.beat.remote())

    async def _end(self) -> None:
        """End the process and wait: it must not answer in place of its successor."""
        import ray

        ended = asyncio.ensure_future(self._guarded(self._handle.last.remote(), ANSWER_S))
        await asyncio.sleep(0)  # send the call before the kill
        await answer(f"end {self._name}", ray.kill, self._handle, no_restart=False)
        try:
            await ended
        except DeadlineExceeded:
            raise self._error(f"{self._name}: its process could not be ended") from None
        except RunFailed:
            pass
        if self._pulse is not None:
            self._pulse.hung = ""

    async def _broken(self) -> str:
        """Return the reason to end the process; empty if it has ended or the part is healthy."""
        if self._pulse is not None and self._pulse.hung:
            return self._pulse.hung
        try:
            return str(await self._guarded(self._handle.broken.remote(), ANSWER_S))
        except DeadlineExceeded as e:
            return str(e)

    async def _guarded(self, ref: Any, timeout_s: float | None = None) -> Any:
        return await guarded(ref, self._name, self._error, timeout_s)

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method.startswith("_"):
            raise AttributeError(method)

        async def call(*args: Any, **kwargs: Any) -> Any:
            value = self._guarded(self._handle.call.remote(method, *args, **kwargs))
            return await (value if self._pulse is None else self._pulse.during(value))

        return call


async def guarded(
    ref: Any, name: str, error: type[RunFailed] = RunFailed, timeout_s: float | None = None
) -> Any:
    """Await a Ray reference and translate Ray's errors."""
    from ray.exceptions import (
        ActorDiedError,
        ActorUnavailableError,
        OutOfMemoryError,
        RayActorError,
        RayTaskError,
        WorkerCrashedError,
    )

    value = asyncio.ensure_future(ref)
    # retrieve the exception if the caller was cancelled
    value.add_done_callback(lambda a: a.cancelled() or a.exception())
    try:
        return await asyncio.wait_for(asyncio.shield(value), timeout_s)
    except TimeoutError:
        raise DeadlineExceeded(
            f"{name} did not answer within {timeout_s:.0f} s; see its log in the run folder"
        ) from None
    except OutOfMemoryError as e:
        raise OutOfMemory(memory_remedy(name)) from e
    except RayTaskError as e:
        if is_out_of_memory(e.cause):
            raise OutOfMemory(memory_remedy(name)) from e
        raise e.cause from e
    except (ActorDiedError, ActorUnavailableError, RayActorError, WorkerCrashedError) as e:
        if _oom_kills() > _OOM_KILLS_AT_START:
            raise OutOfMemory(memory_remedy(name)) from None
        raise error(
            f"{name} died: {_death_reason(e)}; see {name}.log and {name}.out in the run folder's logs"
        ) from None


def _oom_kills(root: Path = Path("/")) -> int:
    """Return how many processes of this one's control group the kernel killed for memory: those of
    others are no reason of ours.  Of the whole machine if the group has no count; 0 if unknown.
    """
    files = []
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if controllers == "memory":
                files.append(root / f"sys/fs/cgroup/memory{group}/memory.oom_control")
            elif not controllers:
                files.append(root / f"sys/fs/cgroup{group}/memory.events")
    for file in (*files, root / "proc/vmstat"):
        with contextlib.suppress(OSError):
            for line in file.read_text().splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return 0


_OOM_KILLS_AT_START = _oom_kills()


def _death_reason(error: Exception) -> str:
    text = str(error)
    for line in text.splitlines():
        if "exit" in line.lower() or "killed" in line.lower():
            return line.strip()
    if text:
        return text.splitlines()[0]
    return type(error).__name__


def memory_remedy(name: str) -> str:
    return (
        f"{name} ran out of memory.  Lower trainer.max_token_len_per_gpu, buffer.batch_size or the "
        f"model's lengths, "
        "or give the machine more memory."
    )

"""Parts in other processes: one generic actor that hosts a part, one proxy that calls it like a local object.

The only place where Ray's errors become ours: an exception raised by the part comes back as itself, a dead process becomes
RunFailed (or OutOfMemory) that names it.
"""

from __future__ import annotations

import asyncio
import faulthandler
import importlib
import io
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from rft.errors import DeadlineExceeded, EngineFailed, OutOfMemory, RftError, RunFailed, is_out_of_memory
from rft.launch import leftovers
from rft.launch.pulse import Pulse
from rft.logs import learn_secrets, node_folder, redact, to_file
from rft.parent import die_with_parent

log = logging.getLogger(__name__)
_WAITS = ".  Where it does no more than wait (a plugin that blocks the event loop), raise cluster.stall_timeout"
ANSWER_S = 60.0  # for a process to say whether its part is well; one that Ray is making anew is waited for


class Host:
    """Body of every actor: builds one part with a factory of `rft.launch.parts` and passes calls on to it.

    What it is made of comes with its construction, so that Ray can make it anew in another process.  `secrets` are what the launcher has
    learnt from the configuration, so that this process keeps them out of its files too.
    """

    def __init__(
        self, name: str, logs: str, by_node: bool, level: str, secrets: Sequence[str], factory: str, args: tuple[Any, ...]
    ) -> None:
        self._name, self._factory, self._args = name, factory, args
        learn_secrets(secrets)
        own_output(node_folder(Path(logs), by_node), name, level)
        self._part: Any = None
        self._starting = asyncio.Lock()

    async def start(self) -> None:
        """Builds the part, where there is none yet.  What a process that was it before has left is ended first."""
        async with self._starting:
            if self._part is None:
                for line in await asyncio.to_thread(leftovers.end_former):
                    log.warning("%s: %s", self._name, line)
                self._part = await getattr(importlib.import_module("rft.launch.parts"), self._factory)(*self._args)

    async def broken(self) -> str:
        """Why the part cannot answer any more although this process lives; empty where it can, or is not built."""
        try:
            if self._part is not None:
                await self._part.health()
        except RftError as e:
            return str(e)
        return ""

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if self._part is None:
            raise EngineFailed(f"{self._name} was restarted and is not up yet")
        return await getattr(self._part, method)(*args, **kwargs)

    async def beat(self) -> tuple[str, int]:
        """Says that this process answers: its machine and number."""
        return os.uname().nodename, os.getpid()

    async def last(self) -> None:
        """As long as this process lives."""
        await asyncio.Event().wait()

    async def facts(self) -> dict[str, Any]:
        return {
            "name": self._name,
            "pid": os.getpid(),
            "node": os.uname().nodename,
            "cuda": os.environ.get("CUDA_VISIBLE_DEVICES"),
        }


def own_output(logs: Path, name: str, level: str) -> None:
    """This process writes its log to `logs/name.log` and everything it or its children print to `logs/name.out`."""
    to_file(logs / f"{name}.log", level)
    out = os.open(logs / f"{name}.out", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.stdout = sys.stderr = _Redacting(os.fdopen(2, "wb", closefd=False), "utf-8", "backslashreplace", line_buffering=True)
    faulthandler.enable(file=2)
    die_with_parent()


class _Redacting(io.TextIOWrapper):
    """What plugins print goes into a file of the run, so it passes the same filter as the log."""

    def write(self, text: str, /) -> int:
        super().write(redact(text))
        return len(text)


class Proxy:
    """Calls a part in another process: `await proxy.method(...)`.  Can be sent to other actors.

    With `limits` (`stall_s`, `step_s` of `rft.engine.watch`) calls of a process that hangs raise EngineStalled.  `start_s`: how long
    building the part anew may take.
    """

    def __init__(
        self,
        handle: Any,
        name: str,
        error: type[RunFailed] = RunFailed,
        bound: tuple[Any, ...] = (),
        limits: tuple[float | None, float | None] = (None, None),
        start_s: float | None = None,
    ) -> None:
        self._handle, self._name, self._error = handle, name, error
        self._bound, self._limits, self._start_s = bound, limits, start_s
        self._pulse = Pulse(name, self._beat, *limits) if limits != (None, None) else None

    def __reduce__(self) -> tuple[Any, ...]:
        return (Proxy, (self._handle, self._name, self._error, self._bound, self._limits, self._start_s))

    def bind(self, *first: Any) -> Proxy:
        """The same part, with these arguments put first in every call."""
        return Proxy(self._handle, self._name, self._error, (*self._bound, *first), self._limits, self._start_s)

    async def restart(self) -> None:
        """The part anew, in a new process.  Raises when it cannot be built, or has died more often than Ray was told to allow."""
        if why := await self._broken():
            log.warning("%s: %s; its process is ended", self._name, why)
            await self._end()
        await self._guarded(self._handle.start.remote(), self._start_s)

    async def lives(self, stall_s: float | None) -> None:
        """As long as its process lives.  Raises when it has died, or answers nothing and shows no sign of life for `stall_s`."""
        last = self._guarded(self._handle.last.remote())
        if stall_s is not None:
            last = Pulse(self._name, self._beat, stall_s, None, error=self._error, remedy=_WAITS).during(last)
        await last

    async def kill(self) -> None:
        """Ends its process for good; one that has ended stays so."""
        import ray

        ray.kill(self._handle, no_restart=True)

    def _beat(self) -> Awaitable[tuple[str, int]]:
        return self._guarded(self._handle.beat.remote())

    async def _end(self) -> None:
        """Returns when the process is gone: until then it would answer for the one that follows."""
        import ray

        gone = asyncio.ensure_future(self._guarded(self._handle.last.remote(), ANSWER_S))
        await asyncio.sleep(0)  # it is asked before it is ended
        ray.kill(self._handle, no_restart=False)
        try:
            await gone
        except DeadlineExceeded:
            raise self._error(f"{self._name}: its process could not be ended") from None
        except RunFailed:
            pass
        if self._pulse is not None:
            self._pulse.hung = ""

    async def _broken(self) -> str:
        """Why its process has to be ended; empty where it has ended, or its part is well."""
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
            answer = self._guarded(self._handle.call.remote(method, *self._bound, *args, **kwargs))
            return await (answer if self._pulse is None else self._pulse.during(answer))

        return call


async def guarded(ref: Any, name: str, error: type[RunFailed] = RunFailed, timeout_s: float | None = None) -> Any:
    """The value of a Ray reference, with Ray's errors translated."""
    from ray.exceptions import (
        ActorDiedError,
        ActorUnavailableError,
        OutOfMemoryError,
        RayActorError,
        RayTaskError,
        WorkerCrashedError,
    )

    answer = asyncio.ensure_future(ref)
    answer.add_done_callback(lambda a: a.cancelled() or a.exception())  # a caller that was cancelled never looks at it
    try:
        return await asyncio.wait_for(asyncio.shield(answer), timeout_s)
    except TimeoutError:
        raise DeadlineExceeded(f"{name} did not answer within {timeout_s:.0f} s; see its log in the run folder") from None
    except OutOfMemoryError as e:
        raise OutOfMemory(memory_remedy(name)) from e
    except RayTaskError as e:
        if is_out_of_memory(e.cause):
            raise OutOfMemory(memory_remedy(name)) from e
        raise e.cause from e
    except (ActorDiedError, ActorUnavailableError, RayActorError, WorkerCrashedError) as e:
        if _oom_kills() > _OOM_KILLS_AT_START:
            raise OutOfMemory(memory_remedy(name)) from None
        raise error(f"{name} died: {_why(e)}; see {name}.log and {name}.out in the run folder's logs") from None


def _oom_kills() -> int:
    """How many processes the kernel has killed for memory since it started (0 where it does not say)."""
    try:
        text = Path("/proc/vmstat").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in text.splitlines() if line.startswith("oom_kill ")), 0)


_OOM_KILLS_AT_START = _oom_kills()


def _why(error: Exception) -> str:
    text = str(error)
    for line in text.splitlines():
        if "exit" in line.lower() or "killed" in line.lower():
            return line.strip()
    return text.splitlines()[0] if text else type(error).__name__


def memory_remedy(name: str) -> str:
    return (
        f"{name} ran out of memory.  Lower trainer.max_token_len_per_gpu, buffer.batch_size or the model's lengths, "
        "or give the machine more memory."
    )

"""Parts in other processes: one generic actor that hosts a part, one proxy that calls it like a
local object.

The only place where Ray's errors become ours: an exception raised by the part comes back as itself,
a dead process becomes RunFailed (or OutOfMemory) that names it.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import importlib
import io
import logging
import os
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import psutil

from rft.engine.watch import Usage, Watch, usage
from rft.errors import (
    DeadlineExceeded,
    EngineFailed,
    EngineStalled,
    OutOfMemory,
    RftError,
    RunFailed,
    is_out_of_memory,
)
from rft.launch import leftovers
from rft.launch.ray_calls import answer
from rft.launch.rundir import PRIVATE
from rft.secrets import ErrorTeller, learn_secrets, node_folder, redact, to_file
from rft.worker.parent import die_with_parent
from rft.worker.threads import contained
from rft.worker.waiting import Activity, activities

log = logging.getLogger(__name__)
_WAITS = (
    ".  Where it does no more than wait (a plugin that blocks the event loop), raise "
    "cluster.stall_timeout"
)
MOST_LINES = 20  # errors of one part that are told on the terminal
# for a process to say whether its part is well; one that Ray is making anew is waited for
ANSWER_S = 60.0
T = TypeVar("T")
# the machine's name and the process's number, from the process itself
Beat = Callable[[], Awaitable[tuple[str, int]]]


class Pulse:
    """Whether a process still answers; it is asked only while a call is under way, by one watcher
    however many calls there are.

    Limits as in `rft.engine.watch`: a step is an answer.  `error`, ending with `remedy`, says that
    it hangs.
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
        self._deadlines: set[asyncio.Timeout] = set()  # of the calls under way
        self._watching: asyncio.Task[None] | None = None
        self.hung = ""  # why it counts as hung since its last answer

    async def during(self, call: Awaitable[T]) -> T:
        """What `call` gives.  Raises `error` once the process counts as hung."""
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
            if not deadline.expired():  # the call's own
                raise
            raise self._error(f"{self._name} hangs: {self.hung}{self._remedy}") from None

    async def _watch(self) -> None:
        """Until nothing is under way, the process has died (the calls say so themselves), or it
        hangs.
        """
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
            elif why := await asyncio.to_thread(watch.look):
                self.hung = f"its process answers nothing, {why}"
                log.error("%s hangs: %s", self._name, self.hung)
                # nobody waits for it any more
                beat.add_done_callback(lambda b: b.cancelled() or b.exception())
                for deadline in self._deadlines:
                    if not deadline.expired():
                        deadline.reschedule(0)
                return

    def _usage(self) -> Usage | None:
        """Of the process alone, not of those that it has started: they may be well.  None: not
        known, gone, or on another machine.
        """
        if (
            self._place is None
            or self._place[0] != os.uname().nodename
            or not psutil.pid_exists(self._place[1])
        ):
            return None
        return usage([self._place[1]], family=False)


class Host:
    """Body of every actor: builds one part with a factory of `rft.launch.parts` and passes calls on
    to it.

    What it is made of comes with its construction, so that Ray can make it anew in another process.
     `secrets` are what the launcher has learnt from the configuration, so that this process keeps
     them out of its files too.
    """

    def __init__(
        self,
        name: str,
        logs: str,
        by_node: bool,
        level: str,
        secrets: Sequence[str],
        factory: str,
        args: tuple[Any, ...],
    ) -> None:
        self._name = name
        self._factory = factory
        self._args = args
        learn_secrets(secrets)
        own_output(node_folder(Path(logs), by_node), name, level)
        self._errors = ErrorLines()
        logging.getLogger().addHandler(ErrorTeller(self._errors.add))
        self._part: Any = None
        self._starting = asyncio.Lock()

    async def start(self) -> None:
        """Builds the part, where there is none yet.  What a process that was it before has left is
        ended first.
        """
        async with self._starting:
            if self._part is None:
                for line in await asyncio.to_thread(leftovers.end_former):
                    log.warning("%s: %s", self._name, line)
                with contained(f"a plugin in {self._name}"), _kept():
                    self._part = await getattr(
                        importlib.import_module("rft.launch.parts"), self._factory
                    )(*self._args)

    async def broken(self) -> str:
        """Why the part cannot answer any more although this process lives; empty where it can, or
        is not built.
        """
        try:
            if self._part is not None:
                await self._part.health()
        except RftError as e:
            return str(e)
        return ""

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if self._part is None:
            raise EngineFailed(f"{self._name} was restarted and is not ready yet")
        with contained(f"a plugin in {self._name}"):
            return await getattr(self._part, method)(*args, **kwargs)

    async def beat(self) -> tuple[str, int]:
        """Says that this process answers: its machine and number."""
        return os.uname().nodename, os.getpid()

    async def activities(self) -> list[Activity]:
        """What this process works on and whom it waits for."""
        return activities()

    async def last(self) -> None:
        """As long as this process lives."""
        await asyncio.Event().wait()

    async def errors(self, seen: int) -> list[str]:
        """What it has logged as errors after the first `seen`; waits for one."""
        return await self._errors.after(seen)


@contextmanager
def _kept() -> Iterator[None]:
    """What is imported and built in the block stays: looking for garbage in it takes a fifth of the
    time.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class ErrorLines:
    """Lines from any thread, for one who waits for them in the event loop."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._waiting: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        self._lock = threading.Lock()

    def add(self, line: str) -> None:
        with self._lock:
            if len(self._lines) < MOST_LINES:
                self._lines.append(
                    line if len(self._lines) < MOST_LINES - 1 else "further errors are in its log"
                )
            if self._waiting is not None and not self._waiting[0].is_closed():
                self._waiting[0].call_soon_threadsafe(self._waiting[1].set)

    async def after(self, seen: int) -> list[str]:
        event = asyncio.Event()
        with self._lock:
            self._waiting = asyncio.get_running_loop(), event
            if len(self._lines) > seen:
                event.set()
        await event.wait()
        with self._lock:
            return self._lines[seen:]


def own_output(logs: Path, name: str, level: str) -> None:
    """This process writes its log to `logs/name.log` and everything it or its children print to
    `logs/name.out`.
    """
    os.umask(PRIVATE)
    to_file(logs / f"{name}.log", level)
    out = os.open(logs / f"{name}.out", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.stdout = sys.stderr = _RedactingStream(
        os.fdopen(2, "wb", closefd=False), "utf-8", "backslashreplace", line_buffering=True
    )
    faulthandler.enable(file=2)
    die_with_parent()


class _RedactingStream(io.TextIOWrapper):
    """What plugins print goes into a file of the run, so it passes the same filter as the log."""

    def write(self, text: str, /) -> int:
        super().write(redact(text))
        return len(text)


class Proxy:
    """Calls a part in another process: `await proxy.method(...)`.  Can be sent to other actors.

    With `limits` (`stall_s`, `step_s` of `rft.engine.watch`) calls of a process that hangs raise
    EngineStalled.  `start_s`: how long building the part anew may take.
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
        """The part anew, in a new process.  Raises when it cannot be built, or has died more often
        than Ray was told to allow.
        """
        if why := await self._broken():
            log.warning("%s: %s; its process is ended", self._name, why)
            await self._end()
        await self._guarded(self._handle.start.remote(), self._start_s)

    async def lives(self, stall_s: float | None) -> None:
        """As long as its process lives.  Raises when it has died, or answers nothing and shows no
        sign of life for `stall_s`.
        """
        last = self._guarded(self._handle.last.remote())
        if stall_s is not None:
            last = Pulse(
                self._name, self._beat, stall_s, None, error=self._error, remedy=_WAITS
            ).during(last)
        await last

    async def kill(self) -> None:
        """Ends its process for good; one that has ended stays so."""
        import ray

        await answer(f"end {self._name}", ray.kill, self._handle, no_restart=True)

    def _beat(self) -> Awaitable[tuple[str, int]]:
        return self._guarded(self._handle.beat.remote())

    async def _end(self) -> None:
        """Returns when the process is gone: until then it would answer for the one that follows."""
        import ray

        gone = asyncio.ensure_future(self._guarded(self._handle.last.remote(), ANSWER_S))
        await asyncio.sleep(0)  # it is asked before it is ended
        await answer(f"end {self._name}", ray.kill, self._handle, no_restart=False)
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
            value = self._guarded(self._handle.call.remote(method, *args, **kwargs))
            return await (value if self._pulse is None else self._pulse.during(value))

        return call


async def guarded(
    ref: Any, name: str, error: type[RunFailed] = RunFailed, timeout_s: float | None = None
) -> Any:
    """The value of a Ray reference, with Ray's errors translated."""
    from ray.exceptions import (
        ActorDiedError,
        ActorUnavailableError,
        OutOfMemoryError,
        RayActorError,
        RayTaskError,
        WorkerCrashedError,
    )

    value = asyncio.ensure_future(ref)
    # a caller that was cancelled never looks at it
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
            f"{name} died: {_why(e)}; see {name}.log and {name}.out in the run folder's logs"
        ) from None


def _oom_kills() -> int:
    """How many processes the kernel has killed for memory since it started (0 where it does not
    say).
    """
    try:
        text = Path("/proc/vmstat").read_text()
    except OSError:
        return 0
    return next(
        (int(line.split()[1]) for line in text.splitlines() if line.startswith("oom_kill ")), 0
    )


_OOM_KILLS_AT_START = _oom_kills()


def _why(error: Exception) -> str:
    text = str(error)
    for line in text.splitlines():
        if "exit" in line.lower() or "killed" in line.lower():
            return line.strip()
    return text.splitlines()[0] if text else type(error).__name__


def memory_remedy(name: str) -> str:
    return (
        f"{name} ran out of memory.  Lower trainer.max_token_len_per_gpu, buffer.batch_size or the "
        f"model's lengths, "
        "or give the machine more memory."
    )

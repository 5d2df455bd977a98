"""Code of plugins: blocking code in threads that may never end, code that takes too long, and what
would end the program as a failure.

Knows nothing of what it runs.  Invariants: a call that never returns holds up nobody and does not
keep the program alive; SystemExit, KeyboardInterrupt and a plugin's own BaseException never reach
an event loop, which they would end.
"""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import inspect
import logging
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from rft.errors import ConfigError, PluginStopped, RftError, RunFailed, own_lines
from rft.secrets import redact

log = logging.getLogger(__name__)
T = TypeVar("T")
GRACE_S = 1.0  # for work that passed its deadline to react to being cancelled
LINGERS_S = 1.0  # without a call to watch


def as_failure(error: BaseException, what: str = "a plugin") -> Exception:
    """An exception that ends what was being done, and nothing else."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration | StopAsyncIteration):
        return error
    raised = f"raised {type(error).__name__}" + (f": {error}" if str(error) else "")
    did = f"called sys.exit({error.code!r})" if isinstance(error, SystemExit) else raised
    stopped = PluginStopped(f"{what} {did}")
    stopped.__cause__ = None if isinstance(error, StopIteration) else error
    return stopped


@contextmanager
def contained(what: str) -> Iterator[None]:
    """Code of the plugin `what` in this block raises nothing but an Exception or asyncio's own
    cancelling.
    """
    try:
        yield
    except (asyncio.CancelledError, GeneratorExit):
        raise
    except BaseException as e:
        if (failure := as_failure(e, what)) is e:
            raise
        # contextlib takes what one causes for Python's own
        raise failure from (None if isinstance(e, StopIteration) else e)


def last_lines(error: BaseException) -> str:
    """The end of `own_lines`, without secrets, as failed records keep it."""
    return "\n".join(redact(own_lines(error)).splitlines()[-12:])


@contextmanager
def blamed(what: str, key: str = "") -> Iterator[None]:
    """What a plugin's code in this block raises ends the command, with its own traceback: a
    ConfigError at `key`, else a RunFailed.

    KeyboardInterrupt is a person's, who may interrupt what takes long.
    """
    try:
        yield
    except (RftError, asyncio.CancelledError, GeneratorExit, KeyboardInterrupt):
        raise
    except BaseException as e:
        text = redact(f"{what}:\n{own_lines(e)}")
        raise (ConfigError(text, key=key) if key else RunFailed(text)) from None


async def guarded(work: Awaitable[T], what: str) -> T:
    """The result of `work`, contained: for code of a plugin in a task of its own, where SystemExit
    would end the loop past all others.
    """
    with contained(what):
        return await work


async def in_thread(call: Callable[[], T], name: str) -> T:
    """The result of `call`, in a daemon thread called `name`, with the context variables of the
    caller.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()
    context = contextvars.copy_context()

    def deliver(set_it: Callable[[Any], None], value: Any) -> None:
        if not result.done():
            set_it(value)

    def work() -> None:
        try:
            outcome: tuple[Callable[[Any], None], Any] = (result.set_result, context.run(call))
        except BaseException as e:
            outcome = (result.set_exception, as_failure(e, name))
        if not loop.is_closed():
            loop.call_soon_threadsafe(deliver, *outcome)

    threading.Thread(target=work, name=name, daemon=True).start()
    return await result


async def unblocked(call: Callable[..., Any], name: str, /, *args: Any, **kwargs: Any) -> Any:
    """The result of `call`, contained.  It may be async; an ordinary function has a thread called
    `name`, so that it may block.
    """
    with contained(name):
        if inspect.iscoroutinefunction(call):
            return await call(*args, **kwargs)
        result = await in_thread(lambda: call(*args, **kwargs), name)
        return await result if inspect.isawaitable(result) else result


class OutOfTime(TimeoutError):
    """Work was not done by its deadline; the message says what, and how long it had."""


class Clock:
    """Seconds from when it was made, but for those in which it is stopped."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._since = 0.0
        self._stops = 0

    @property
    def runs(self) -> bool:
        return not self._stops

    @property
    def seconds(self) -> float:
        return (time.monotonic() if self.runs else self._since) - self._began

    @contextmanager
    def stopped(self) -> Iterator[None]:
        if self.runs:
            self._since = time.monotonic()
        self._stops += 1
        try:
            yield
        finally:
            self._stops -= 1
            if self.runs:
                self._began += time.monotonic() - self._since

    @asynccontextmanager
    async def turn(self, room: asyncio.Lock | asyncio.Semaphore) -> AsyncIterator[None]:
        """`async with room`; it is stopped until there is room."""
        with self.stopped():
            await room.acquire()
        try:
            yield
        finally:
            room.release()


CLOCK: ContextVar[Clock] = ContextVar("clock", default=Clock())  # noqa: B039  # of the innermost deadline; the default is nobody's


async def in_time(
    work: Coroutine[Any, Any, T], timeout_s: float | None, what: str, clock: Clock | None = None
) -> T:
    """The result of `work`.  After `timeout_s` of its clock it is cancelled and OutOfTime raised;
    one that ignores this is left behind.
    """
    if timeout_s is None:
        return await work
    clock = clock or Clock()
    context = contextvars.copy_context()
    context.run(CLOCK.set, clock)
    job = asyncio.create_task(work, context=context)
    try:
        while not job.done() and (left := timeout_s - clock.seconds) > 0:
            await asyncio.wait({job}, timeout=left if clock.runs else max(left, 0.1))
        if job.done():
            if job.cancelled():
                raise PluginStopped(f"{what} was cancelled from inside")
            return job.result()
        job.cancel()
        await asyncio.wait({job}, timeout=GRACE_S)
        if not job.done():
            log.warning("%s ignores being cancelled; it is left behind", what)
            job.add_done_callback(lambda done: done.cancelled() or done.exception())
        elif not job.cancelled() and isinstance(error := job.exception(), RftError):
            raise error
        raise OutOfTime(f"timeout: {what} took longer than {timeout_s:g} s")
    finally:
        if not job.done():
            job.cancel()  # the caller was cancelled


class TooLong(Exception):
    """A call was not done in its time."""


def within(seconds: float, call: Callable[[], T]) -> T:
    """The result of `call`, in this thread; raises TooLong in the midst of it when it is not done
    after `seconds`.

    A loop of Python code is ended so; a single long step of a library ends by itself first.
    """
    _WATCH.begin(seconds)
    try:
        return call()
    finally:
        _WATCH.end()


class _Watchdog:
    """One thread that looks at all calls once in a while: to begin and to end one costs next to
    nothing.
    """

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._due: dict[int, float] = {}  # by thread
        self._running = False

    def begin(self, seconds: float) -> None:
        with self._lock:
            self._due[threading.get_ident()] = time.monotonic() + seconds
            if not self._running:
                threading.Thread(target=self._run, name="rft-watch", daemon=True).start()
                self._running = True

    def end(self) -> None:
        with self._lock:
            self._due.pop(threading.get_ident(), None)

    def _run(self) -> None:
        with self._lock:
            while True:
                if not self._due and not self._lock.wait_for(lambda: bool(self._due), LINGERS_S):
                    self._running = False
                    return
                now = time.monotonic()
                for thread in [t for t, due in self._due.items() if due <= now]:
                    del self._due[thread]
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(
                        ctypes.c_ulong(thread), ctypes.py_object(TooLong)
                    )
                self._lock.wait(
                    min(LINGERS_S, *(due - now for due in self._due.values()))
                    if self._due
                    else LINGERS_S
                )


_WATCH = _Watchdog()

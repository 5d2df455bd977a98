"""Run code of plugins: in threads, with deadlines, and with exits turned into failures.

Invariants: a call that never returns delays nothing and does not keep the program alive;
SystemExit, KeyboardInterrupt and other BaseExceptions of a plugin never reach an event loop, which
they would end.
"""

from __future__ import annotations

import asyncio
import contextvars
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
GRACE_S = 1.0  # time for work past its deadline to react to its cancellation


def as_failure(error: BaseException, what: str = "a plugin") -> Exception:
    """Turn an exception that would end the program into PluginStopped."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration | StopAsyncIteration):
        return error
    raised = f"raised {type(error).__name__}" + (f": {error}" if str(error) else "")
    did = f"called sys.exit({error.code!r})" if isinstance(error, SystemExit) else raised
    stopped = PluginStopped(f"{what} {did}")
    stopped.__cause__ = None if isinstance(error, StopIteration) else error
    return stopped


@contextmanager
def contained(what: str) -> Iterator[None]:
    """Turn exits of the plugin `what` in this block into PluginStopped."""
    try:
        yield
    except (asyncio.CancelledError, GeneratorExit):
        raise
    except BaseException as e:
        if (failure := as_failure(e, what)) is e:
            raise
        # contextlib would swallow an error caused by StopIteration
        raise failure from (None if isinstance(e, StopIteration) else e)


def last_lines(error: BaseException) -> str:
    """Return the end of `own_lines` without secrets, for failed rows."""
    return "\n".join(redact(own_lines(error)).splitlines()[-12:])


@contextmanager
def blamed(what: str, key: str = "") -> Iterator[None]:
    """Turn errors of a plugin in this block into ConfigError at `key`, or RunFailed, with
    traceback.

    KeyboardInterrupt passes through.
    """
    try:
        yield
    except (RftError, asyncio.CancelledError, GeneratorExit, KeyboardInterrupt):
        raise
    except BaseException as e:
        text = redact(f"{what}:\n{own_lines(e)}")
        raise (ConfigError(text, key=key) if key else RunFailed(text)) from None


async def guarded(work: Awaitable[T], what: str) -> T:
    """Await `work`, contained: plugin code in its own task, where SystemExit would end the loop."""
    with contained(what):
        return await work


async def in_thread(call: Callable[[], T], name: str) -> T:
    """Run `call` in a daemon thread called `name`, with the caller's context variables."""
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
    """Run `call`, contained: an async function here, any other in a thread called `name`."""
    with contained(name):
        if inspect.iscoroutinefunction(call):
            return await call(*args, **kwargs)
        result = await in_thread(lambda: call(*args, **kwargs), name)
        if inspect.isawaitable(result):
            return await result
        return result


class OutOfTime(TimeoutError):
    """Work missed its deadline; the message names both."""


class Clock:
    """Seconds since its creation, without stopped periods."""

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
        """Enter `room`; the clock is stopped while waiting for it."""
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
    """Await `work`; after `timeout_s` of its clock cancel it and raise OutOfTime.

    Work that ignores its cancellation is abandoned.
    """
    if timeout_s is None:
        return await work
    clock = clock or Clock()
    context = contextvars.copy_context()
    context.run(CLOCK.set, clock)
    job = asyncio.create_task(work, context=context)
    try:
        while not job.done() and (remaining_s := timeout_s - clock.seconds) > 0:
            wait_s = remaining_s if clock.runs else max(remaining_s, 0.1)
            await asyncio.wait({job}, timeout=wait_s)
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

"""Waits of one event loop: each has a name and a deadline, rechecks at every change, and ends with
the first failure.

Independent of weights.  Invariant: after `fail` every wait, now or later, raises that failure.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

from rft.errors import DeadlineExceeded, RftError, WeightSyncFailed
from rft.worker.waiting import idles

T = TypeVar("T")


class Waits:
    """Waits that last at most `timeout_s` without any change."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._condition = asyncio.Condition()
        self._error: BaseException | None = None

    async def changed(self) -> None:
        """Let every wait check its condition again."""
        async with self._condition:
            self._condition.notify_all()

    async def fail(self, error: BaseException) -> None:
        """End all waits with `error`; only the first error counts."""
        self._error = self._error or error
        await self.changed()

    def raise_failure(self) -> None:
        if self._error is not None:
            raise (
                self._error.with_traceback(None)
                if isinstance(self._error, RftError)
                else WeightSyncFailed(str(self._error))
            )

    async def until(
        self, done: Callable[[], bool], who: str, whom: str, remedy: Callable[[], str]
    ) -> None:
        """Wait until `done()`.  Raises DeadlineExceeded with `remedy` without changes for too long."""
        try:
            with idles(f"{who} waits for {whom}"):
                await self.without_deadline(done, self._timeout_s)
        except TimeoutError:
            raise DeadlineExceeded(
                f"{who} waited {self._timeout_s:g} s for {whom}{remedy()}"
            ) from None

    async def without_deadline(
        self, done: Callable[[], bool], quiet_s: float | None = None
    ) -> None:
        """Wait until `done()`.  Raises TimeoutError after `quiet_s` without changes, if given."""
        async with self._condition:
            while not done() or self._error is not None:
                self.raise_failure()
                async with asyncio.timeout(quiet_s):
                    await self._condition.wait()


class WaitShare:
    """The share of the time between two versions in which some caller waited at the gate while no
    work was in progress.
    """

    def __init__(self) -> None:
        self._began: float | None = None  # start of the window; None before the first version
        self._since = self._waited = 0.0
        self._count = 0
        self._busy = False

    @contextmanager
    def waiting(self) -> Iterator[None]:
        self._until_now()
        self._count += 1
        try:
            yield
        finally:
            self._until_now()
            self._count -= 1

    def busy(self, busy: bool) -> None:
        """Set whether work is in progress, so that a wait for the next batch loses no time."""
        self._until_now()
        self._busy = busy

    def window(self) -> float | None:
        """End the window; return its share, None if it had no length."""
        now = self._until_now()
        began = self._began
        waited = self._waited
        self._began = now
        self._waited = 0.0
        return None if began is None or now <= began else min(1.0, waited / (now - began))

    def _until_now(self) -> float:
        now = _now()
        if self._count and not self._busy:
            self._waited += now - self._since
        self._since = now
        return now


@asynccontextmanager
async def race(*works: Awaitable[Any]) -> AsyncIterator[tuple[asyncio.Future[Any], ...]]:
    """Yield tasks of all `works` once the first is done; cancel and collect all at the end."""
    tasks = tuple(map(asyncio.ensure_future, works))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        yield tasks
    finally:
        await cancel(tasks)


async def all_of(*works: Awaitable[T]) -> list[T]:
    """Return all results; the first error cancels the others."""
    tasks = [asyncio.ensure_future(w) for w in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancel(tasks)


async def cancel(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel and collect, so that no task outlives its owner."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _now() -> float:
    return asyncio.get_running_loop().time()

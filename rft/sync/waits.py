"""Waits of one event loop: each has a name and a deadline, hears of every change, and ends with the
first failure.

Knows nothing of weights.  Invariant: after `fail` every wait, now or later, raises that failure.
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
    """`timeout_s`: how long a wait lasts without any change."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._condition = asyncio.Condition()
        self._error: BaseException | None = None

    async def changed(self) -> None:
        """Let every wait ask its condition again."""
        async with self._condition:
            self._condition.notify_all()

    async def fail(self, error: BaseException) -> None:
        """End all waits with `error`; the first one counts."""
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
        """Wait until `done()`.  Raises DeadlineExceeded with `remedy` once nothing has changed for
        too long.
        """
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
        """Wait until `done()`.  Raises TimeoutError only when `quiet_s` is given and nothing has
        changed for so long.
        """
        async with self._condition:
            while not done() or self._error is not None:
                self.raise_failure()
                async with asyncio.timeout(quiet_s):
                    await self._condition.wait()


class WaitShare:
    """The share of the time between two versions in which someone waited at the gate while nothing
    was under way.
    """

    def __init__(self) -> None:
        self._began: float | None = None  # of the window; None before the first version
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
        """Whether anything is under way from now on: who asks for the next batch meanwhile loses
        nothing by waiting.
        """
        self._until_now()
        self._busy = busy

    def window(self) -> float | None:
        """Share of the window that ends now; None where there was none."""
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
    """Tasks of all `works`, as soon as the first is done; all are cancelled and collected at the
    end.
    """
    tasks = tuple(map(asyncio.ensure_future, works))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        yield tasks
    finally:
        await cancel(tasks)


async def all_of(*works: Awaitable[T]) -> list[T]:
    """What all give; the first that raises ends the others."""
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

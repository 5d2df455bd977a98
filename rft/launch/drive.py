"""Run explorer and trainer until both are done; the first failure, Ctrl-C or SIGTERM ends both."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rft.errors import DeadlineExceeded, Interrupted, RftError, RunFailed
from rft.launch.rundir import INTERRUPTED
from rft.launch.signals import Signals
from rft.sync.waits import cancel, race
from rft.types.ids import Version
from rft.types.metrics import MetricRecord

log = logging.getLogger(__name__)
OnRecord = Callable[[MetricRecord], None]
STOP_DEADLINE_S = 8.0  # for both sides to end after Ctrl-C


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    version: Version
    run_dir: Path
    seconds: float
    resumed_from: Version | None


class Followed(Protocol):
    """The launcher's view of the coordinator."""

    async def fail(self, reason: BaseException) -> None: ...
    async def records(self, after: int, *, wait: bool = True) -> tuple[int, list[MetricRecord]]: ...


class Stoppable(Protocol):
    async def stop(self) -> None: ...


async def run_to_end(
    work: Sequence[Awaitable[None]],
    sides: Iterable[Stoppable],
    coordinator: Followed,
    on_record: OnRecord,
    signals: Signals,
    watch: Awaitable[Any] | None = None,
    fail: Callable[[BaseException], Awaitable[None]] | None = None,
) -> None:
    """Wait until the `work` of explorer and trainer (in this order; one may be elsewhere) is done;
    report the first failure and raise it.

    `watch` raises when a process dies or hangs, and never returns.  `fail` reports a failure to all
    that wait (default: `coordinator.fail`).
    """
    working: list[asyncio.Future[None]] = [asyncio.ensure_future(side) for side in work]
    follower = _Follower(coordinator, on_record)
    following = asyncio.ensure_future(follower.run())
    stop = asyncio.ensure_future(signals.wait())
    watching = [] if watch is None else [asyncio.ensure_future(watch)]
    try:
        pending = set(working)
        while pending:
            done, _ = await asyncio.wait(
                {*pending, *watching, following, stop}, return_when=asyncio.FIRST_COMPLETED
            )
            if stop in done:
                await _wind_down(pending, sides, signals)
                raise Interrupted(INTERRUPTED)
            if [t for t in done if t.exception() is not None]:
                raise await _cause(working, (*watching, following))
            pending -= done
        await follower.rest()
    except BaseException as e:
        error = e if isinstance(e, RftError) else RunFailed(f"{type(e).__name__}: {e}")
        report = fail or coordinator.fail
        async with race(quietly(report(error)), signals.wait(2)):
            raise
    finally:
        await cancel([*working, *watching, following, stop])


class _Follower:
    """Passes on each record of the coordinator once."""

    def __init__(self, coordinator: Followed, on_record: OnRecord) -> None:
        self._coordinator = coordinator
        self._on_record = on_record
        self._num_records = 0

    async def run(self) -> None:
        while True:
            self._take(await self._coordinator.records(self._num_records))

    async def rest(self) -> None:
        self._take(await self._coordinator.records(self._num_records, wait=False))

    def _take(self, answer: tuple[int, list[MetricRecord]]) -> None:
        self._num_records, records = answer
        for record in records:
            self._on_record(record)


async def _cause(
    sides: Sequence[asyncio.Future[None]], observers: Sequence[asyncio.Future[None]]
) -> BaseException:
    """Choose the cause among failures that come together: a broken part before a missed deadline.

    Among equals the explorer's error comes first: it explains the trainer's empty batch.
    """
    await asyncio.wait(sides, timeout=2.0)  # observers end only by errors
    errors = [
        e
        for t in (*sides, *observers)
        if t.done() and not t.cancelled() and (e := t.exception()) is not None
    ]
    return min(
        errors,
        key=lambda e: (
            isinstance(e, DeadlineExceeded),
            isinstance(e, RunFailed) and type(e) is RunFailed,
        ),
    )


async def _wind_down(
    pending: set[asyncio.Future[None]], sides: Iterable[Stoppable], signals: Signals
) -> None:
    """Ask both sides to end; wait for them, the deadline or a second signal."""
    stopping = [asyncio.ensure_future(quietly(side.stop())) for side in sides]
    ended = asyncio.ensure_future(asyncio.wait(pending))
    again = asyncio.ensure_future(signals.wait(2))
    await asyncio.wait({ended, again}, timeout=STOP_DEADLINE_S, return_when=asyncio.FIRST_COMPLETED)
    await cancel([*stopping, ended, again])


async def quietly(call: Awaitable[Any], timeout_s: float = 10.0) -> None:
    """Await the closing of a part that may be dead; log its error."""
    try:
        await asyncio.wait_for(call, timeout_s)
    except (RftError, TimeoutError) as e:
        log.info("while closing: %s", e)

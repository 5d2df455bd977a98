"""The part of running that is the same with and without Ray: begin a lineage, let both sides work, end on the first failure."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

from rft.errors import ConfigError, DeadlineExceeded, Interrupted, RftError, RunFailed
from rft.launch.parts import Start
from rft.trainer import manifest as manifests
from rft.trainer.manifest import Manifest
from rft.types.ids import Version
from rft.types.metrics import MetricRecord

log = logging.getLogger(__name__)
T = TypeVar("T")
OnRecord = Callable[[MetricRecord], None]
STOP_DEADLINE_S = 8.0  # Ctrl-C: finish what is short, then end
INTERRUPTED = "stopped on request; run the same command again to go on from the last checkpoint"


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    version: Version
    run_dir: Path
    seconds: float
    resumed_from: Version | None


class Signals:
    """SIGINT and SIGTERM as events of this loop while the context is open; a second one is told apart from the first."""

    def __init__(self) -> None:
        self._events = (asyncio.Event(), asyncio.Event())

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._arrived)
        return self

    def __exit__(self, *_: object) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().remove_signal_handler(number)

    def _arrived(self) -> None:
        first, second = self._events
        (second if first.is_set() else first).set()

    async def wait(self, count: int = 1) -> None:
        """Until the first (or second) signal has arrived."""
        await self._events[count - 1].wait()

    async def guard(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`; raises Interrupted, after cancelling it, when a signal arrives first."""
        task, stop = asyncio.ensure_future(work), asyncio.ensure_future(self.wait())
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise Interrupted(INTERRUPTED)
            return task.result()
        finally:
            await cancel([task, stop])


class CoordinatorPort(Protocol):
    """What the launcher needs of the coordinator."""

    async def fail(self, reason: BaseException) -> None: ...
    async def records(self, after: int) -> list[MetricRecord]: ...
    async def recent(self, after: int) -> list[MetricRecord]: ...


class Stoppable(Protocol):
    async def stop(self) -> None: ...


def origin(path: Path | None) -> Manifest | None:
    """The checkpoint of another run that `resume_from_path` names: the folder itself, or the newest one of that run.

    Raises CheckpointInvalid or ConfigError where there is none that is whole.
    """
    if path is None:
        return None
    if (path / manifests.NAME).is_file() or manifests.is_name(path.name):
        return manifests.read(path)
    for folder in (path, path / "checkpoints"):
        if (found := manifests.latest(folder)) is not None:
            return found
    raise ConfigError(
        "holds no checkpoint; name a folder global_step_N, or the folder of a run", key="resume_from_path", given=str(path)
    )


async def begin(buffer: Any, found: Manifest | None, other: Manifest | None = None) -> Start:
    """Take the next lineage of the buffer, going on from the checkpoint `found` if there is one.

    `other`: another run's checkpoint to begin with where there is none.  Its weights, optimizer and place in the data are taken; its
    rows stay where they are, so nothing counts as their use here.
    """
    if found is None:
        lineage = (await buffer.start_lineage(None, None)).lineage
        if other is None:
            return Start(lineage)
        log.info("lineage %d begins with %s of another run", lineage, other.folder)
        return Start(lineage, other.version.step, None, other.consumption.cursor, str(other.folder))
    lineage = await buffer.start_lineage(found.version, found.consumption)
    log.info("lineage %d goes on from %s; %d rows orphaned", lineage.lineage, found.version, lineage.orphaned)
    return Start(lineage.lineage, found.version.step, found.version, lineage.cursor, str(found.folder))


def begin_given(found: Manifest | None, other: Manifest | None) -> Start:
    """Where training on a data set goes on.  There is no ledger: the checkpoint's step is the place in the data."""
    if found is not None:
        return Start(found.version.lineage + 1, found.version.step, found.version, checkpoint=str(found.folder))
    if other is not None:
        return Start(1, other.version.step, None, checkpoint=str(other.folder))
    return Start(1)


async def work(
    train: Awaitable[None],
    explore: Awaitable[None] | None,
    sides: Iterable[Stoppable],
    coordinator: CoordinatorPort,
    on_record: OnRecord,
    signals: Signals,
    watch: Awaitable[None] | None = None,
) -> None:
    """Until explorer, if there is one, and trainer are done.  The first failure is told to everyone who waits, and raised.

    `watch` ends only by raising: a part has died, or hangs.
    """
    both: tuple[asyncio.Future[None], ...] = tuple(asyncio.ensure_future(side) for side in (explore, train) if side is not None)
    follower = _Follower(coordinator, on_record)
    news, stop = asyncio.ensure_future(follower.run()), asyncio.ensure_future(signals.wait())
    watched = [] if watch is None else [asyncio.ensure_future(watch)]
    try:
        pending = set(both)
        while pending:
            done, _ = await asyncio.wait({*pending, *watched, news, stop}, return_when=asyncio.FIRST_COMPLETED)
            if stop in done:
                await _wind_down(pending, sides, signals)
                raise Interrupted(INTERRUPTED)
            if [t for t in done if t.exception() is not None]:
                raise await _cause(both, (*watched, news))
            pending -= done
        await follower.rest()
    except BaseException as e:
        await quietly(coordinator.fail(e if isinstance(e, RftError) else RunFailed(f"{type(e).__name__}: {e}")))
        raise
    finally:
        await cancel([*both, *watched, news, stop])


class _Follower:
    """Passes the coordinator's records on, once each."""

    def __init__(self, coordinator: CoordinatorPort, on_record: OnRecord) -> None:
        self._coordinator, self._on_record, self._seen = coordinator, on_record, 0

    async def run(self) -> None:
        while True:
            self._take(await self._coordinator.records(self._seen))

    async def rest(self) -> None:
        self._take(await self._coordinator.recent(self._seen))

    def _take(self, records: list[MetricRecord]) -> None:
        for record in records:
            self._on_record(record)
        self._seen += len(records)


async def _cause(sides: Sequence[asyncio.Future[None]], onlookers: Sequence[asyncio.Future[None]]) -> BaseException:
    """The cause among failures that come together: a part that broke explains those who waited for it in vain.

    Where neither did, the first counts: what the explorer says of its runs tells more than the trainer's empty batch.
    """
    await asyncio.wait(sides, timeout=2.0)  # onlookers never end by themselves
    errors = [e for t in (*sides, *onlookers) if t.done() and not t.cancelled() and (e := t.exception()) is not None]
    return min(errors, key=lambda e: (isinstance(e, DeadlineExceeded), isinstance(e, RunFailed) and type(e) is RunFailed))


async def _wind_down(pending: set[asyncio.Future[None]], sides: Iterable[Stoppable], signals: Signals) -> None:
    """Ask both sides to end after what they are doing; a second signal or the deadline ends the wait."""
    asked = [asyncio.ensure_future(quietly(side.stop())) for side in sides]
    ended = asyncio.ensure_future(asyncio.wait(pending))
    again = asyncio.ensure_future(signals.wait(2))
    await asyncio.wait({ended, again}, timeout=STOP_DEADLINE_S, return_when=asyncio.FIRST_COMPLETED)
    await cancel([*asked, ended, again])


async def quietly(call: Awaitable[Any], timeout_s: float = 10.0) -> None:
    """For closing parts that may be dead already: what goes wrong is logged, because the run's own outcome counts."""
    try:
        await asyncio.wait_for(call, timeout_s)
    except (RftError, TimeoutError) as e:
        log.info("while closing: %s", e)


async def cancel(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel and collect, so that no task outlives its owner."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

"""Brings one weight version at a time into all engines, has it verified, and lets explore batches
start when they may.

Knows nothing of how weights are made or staged.  Invariant: engines run only with one whole
version, and rows count (`wait_verified` returns True) only after the canary of the very attempt
that wrote them has passed.

    publish:    engines load and resume -> canary, while rollouts of the version already run -> served
    on failure: back to the version before, verified by its canary record -> the next attempt, with
    its own label -> WeightSyncFailed

    engines.py  which engines there are, how they are asked and restarted        update.py  one load, its proof, and the way back
    gate.py     who may explore, which rows count: state without waiting         waits.py   waits with names and deadlines

Without partial rollouts, groups under way end before the pause and no other one begins.  An engine
that died is restarted with the newest verified version.  Engines of explorers that come and go
(`join`, `leave`) are verified before they count.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from msgspec.structs import replace

from rft.errors import EngineFailed, WeightSyncFailed
from rft.sync.canary import Canary
from rft.sync.engines import EngineSet, NoEngines, Rejected, Restart
from rft.sync.gate import GateState
from rft.sync.schedule import Schedule
from rft.sync.settings import SyncSettings
from rft.sync.update import Rounds, WeightUpdates, metrics
from rft.sync.waits import Waits, WaitShare
from rft.types.ids import Version
from rft.types.metrics import Metric
from rft.types.ports import Engine, Scorer, Sender, WeightManifest

log = logging.getLogger(__name__)


class Synchronizer:
    """Implements `WeightSync` for the trainer and the weights' part of `ExploreGate`.  `start` is
    the version the run begins with.

    Without `engines` it waits for engines to join.  Prompts of the canary are given as token ids.
    `sender` sends versions that are broadcast.  `restart`, `on_evicted`: see `EngineSet`.  Lives in
    one event loop; every wait ends by an event, an error or `timeout_s` without any news from the
    trainer.
    """

    def __init__(
        self,
        settings: SyncSettings,
        engines: Sequence[Engine],
        scorer: Scorer,
        schedule: Schedule,
        probes: Sequence[Sequence[int]],
        start: Version,
        restart: Restart | None = None,
        sender: Sender | None = None,
        on_evicted: Callable[[str, str], None] = lambda owner, why: None,
    ) -> None:
        self._settings = settings
        self._gate = GateState(schedule, start)
        self._waits = Waits(settings.timeout_s)
        self._engines = EngineSet(
            engines, settings.workers, self._waits, settings.timeout_s, restart, on_evicted
        )
        rounds = Rounds(sender, settings.timeout_s)
        self._updates = WeightUpdates(
            settings, self._engines, Canary(settings, probes, scorer), rounds
        )
        self._publishing = asyncio.Lock()
        self._idle = WaitShare()
        self.owned = self._engines.owned
        self.fail = self._waits.fail

    # ------------------------------------------------------------ trainer's side

    async def publish(self, manifest: WeightManifest) -> list[Metric]:
        """See `WeightSync`.  When cancelled, the version before is restored first.  Without engines
        it waits for one to join.
        """
        while True:
            await self._wait_for_engines(manifest.version)
            async with self._publishing:
                self._waits.raise_failure()
                try:
                    return await self._publish(manifest)
                except NoEngines:
                    self._gate.loaded = self._gate.verified
                    log.warning(
                        "version %s: every engine has left; it is published to those that join",
                        manifest.version,
                    )

    async def _publish(self, manifest: WeightManifest) -> list[Metric]:
        self._gate.check_order(manifest.version)
        try:
            return await self._attempts(manifest)
        except asyncio.CancelledError:
            log.warning("publishing %s was cancelled", manifest.version)
            await self._restore_although_cancelled()
            raise

    async def _attempts(self, manifest: WeightManifest) -> list[Metric]:
        failures = 0
        while True:
            version = self._gate.label(manifest.version)
            departures = self._engines.departures
            try:
                began = time.perf_counter()
                async with self._groups_ended(version):
                    waited = Metric("sync/wait_s", time.perf_counter() - began, "max")
                    return [waited, *await self._attempt(replace(manifest, version=version))]
            except Rejected as e:
                log.error("version %s: %s", version, e)
                restored = await self._restore()
                # else nothing is said against the weights
                failures += self._engines.departures == departures
                if restored is not None or failures > self._settings.retries:
                    why = self._gate.failure(manifest.version, str(e), max(1, failures), restored)
                    await self.fail(WeightSyncFailed(why))
                await self._waits.changed()
            self._waits.raise_failure()

    async def _attempt(self, manifest: WeightManifest) -> list[Metric]:
        async def resumed() -> None:
            self._gate.loaded = manifest.version
            await self._waits.changed()

        try:
            waves = await self._updates.run(manifest, resumed, idle=self._gate.both_wait)
        except BaseException:
            if self._updates.provisional == manifest.version:
                self._gate.reject(manifest.version)
            raise
        window = self._idle.window()
        bound = self._gate.schedule.staleness_bound
        self._gate.verify(manifest.version)
        await self._waits.changed()
        return [
            *(
                Metric(f"sync/{name}", float(count), "sum")
                for name, count in self._engines.take_restarts().items()
            ),
            *metrics(manifest, waves),
            *([] if bound is None else [Metric("sync/staleness_bound", float(bound), "last")]),
            *(
                Metric(name, window, "mean")
                for name in ("explorer/idle_ratio", "rollouter/idle_ratio")
                if window is not None
            ),
        ]

    async def step_finished(self, step: int, *, finished: bool = False) -> bool:
        self._gate.trained, self._gate.finished = (
            max(step, self._gate.trained),
            finished or self._gate.finished,
        )
        await self._waits.changed()
        return self._gate.wants(step)

    async def wait_for_demand(self, step: int) -> bool:
        """See `WeightSync`.  It has no deadline: the trainer's wait for rows has one."""
        gate = self._gate
        mine = gate.demand = object()
        await self._waits.changed()
        await self._waits.without_deadline(
            lambda: gate.demand is not mine or gate.finished or gate.wants(step)
        )
        return gate.wants(step)

    async def step_started(self, step: int) -> None:
        """See `WeightSync`.  Engines that take turns with the trainer sleep when this returns,
        until the next version.
        """
        self._gate.demand = None
        await self._waits.changed()
        if self._settings.in_turns:
            async with self._publishing:
                self._waits.raise_failure()
                await self._updates.sleep(step)

    async def allow_batch(self, batch: int) -> None:
        log.info(
            "explore batch %d may begin before its turn: step %d lacks rows",
            batch,
            self._gate.trained + 1,
        )
        self._gate.allow(batch)
        await self._waits.changed()

    # ------------------------------------------------------------ explorer's side

    async def may_explore(self, batch: int) -> Version | None:
        """Wait until explore batch `batch` (from 0) may start; the version to expect, perhaps
        provisional.

        None: the trainer is finished and nothing more needs to be explored.
        """
        gate = self._gate
        who = f"explore batch {batch}"
        await self._wait(
            lambda: gate.batches_before_are_done(batch), who, f"the explore batches before {batch}"
        )
        whom = f"weights of train step {gate.schedule.required_step(batch)} or later"
        if gate.schedule.syncs_before(batch):
            whom = "the newest weights"
        gate.ask(batch)
        await self._waits.changed()
        try:
            with self._idle.waiting():
                await self._wait(
                    lambda: gate.may_start(batch, 0 if gate.schedule.by_group else None), who, whom
                )
        finally:
            gate.stop_asking(batch)
        version = gate.start(batch)
        self._idle.busy(gate.playing)
        return version

    async def acquire_group(self, batch: int, group: int | None) -> bool:
        with self._idle.waiting():
            await self._wait(
                lambda: self._gate.may_acquire(batch, group),
                f"a group of explore batch {batch}",
                "newer weights",
            )
        self._gate.groups += not self._gate.finished
        self._idle.busy(self._gate.playing)
        return not self._gate.finished

    async def release_group(self) -> None:
        self._gate.groups -= 1
        self._idle.busy(self._gate.playing)
        await self._waits.changed()

    async def wait_verified(self, version: Version) -> bool:
        gate = self._gate
        if gate.is_verified(version):
            return True  # also after a failure: these rows are good
        await self._wait(
            lambda: gate.is_decided(version), f"rows of version {version}", "its canary"
        )
        if not gate.is_verified(version) and not gate.is_rejected(version):
            raise WeightSyncFailed(
                f"version {version} was never verified and never will be; served is "
                f"{gate.served_text}"
            )
        return gate.is_verified(version)

    async def explored(self, batch: int) -> None:
        self._gate.explored(batch)
        self._idle.busy(self._gate.playing)
        await self._waits.changed()

    async def wait_final(self) -> Version:
        await self._wait(lambda: self._gate.ended, "the explorer", "the trainer's last version")
        assert self._gate.verified is not None
        return self._gate.verified

    # ------------------------------------------------------------ launcher's side

    async def join(
        self,
        owner: str,
        engines: Sequence[Engine],
        workers: Sequence[int] = (),
        *,
        may_leave: bool = True,
    ) -> tuple[int, ...]:
        """The engines that explorer `owner` brings count from now on: they serve the newest
        verified version, where there is one.

        `workers`: of each engine, empty = one each.  `may_leave` False: the run ends when one of
        them cannot be brought back. Returns their numbers.  Raises WeightSyncFailed, and leaves
        everything as it was, when they cannot be brought to that version.
        """
        async with self._publishing:
            self._waits.raise_failure()
            numbers = self._engines.add(owner if may_leave else None, engines, workers)
            try:
                if self._updates.manifest is not None:
                    await self._updates.sync(numbers, self._updates.manifest)
            except BaseException as e:
                await self._engines.remove(numbers)
                if isinstance(e, Rejected | NoEngines):
                    raise WeightSyncFailed(
                        f"the engines of explorer {owner} do not serve {self._gate.served_text}: "
                        f"{e}"
                    ) from e
                raise
        await self._waits.changed()
        return numbers

    async def leave(self, owner: str) -> None:
        """The engines of `owner` are gone, or must not be asked any more.  Also in the middle of a
        publish, which goes on without them.
        """
        await self._engines.remove(self._engines.owned(owner))

    async def revive(self, index: int) -> None:
        """Engine `index` failed an answer: when it is dead, restart it with the newest verified
        version and verify that.

        Returns when it serves again.  Raises EngineFailed when that cannot be reached: the run
        ends, or the engine's owner has left it.
        """
        async with self._publishing:
            self._waits.raise_failure()
            if index not in self._engines:
                raise EngineFailed(f"engine {index} has left")
            if not (why := await self._engines.why_dead(index)):
                return
            began = time.perf_counter()
            log.warning("%s; restarting it with %s", why, self._gate.served_text)
            try:
                restarted = await self._engines.restart_dead()
                if self._updates.manifest is not None:
                    await self._updates.sync(sorted({index, *restarted}), self._updates.manifest)
            except (Rejected, NoEngines) as e:
                failure = EngineFailed(f"engine {index} could not be brought back: {e}")
                if (owner := self._engines.owner(index)) is not None:
                    await self._engines.evict(owner, str(failure))
                else:
                    await self.fail(failure)
                raise failure from e
            if index not in self._engines:  # its explorer had to leave
                raise EngineFailed(f"engine {index} could not be brought back")
            log.info(
                "engine %d serves %s again after %.1f s",
                index,
                self._gate.served_text,
                time.perf_counter() - began,
            )

    # ------------------------------------------------------------ inside

    @asynccontextmanager
    async def _groups_ended(self, version: Version) -> AsyncIterator[None]:
        """Without partial rollouts no group is under way meanwhile."""
        self._gate.holding = not self._settings.partial_rollout
        try:
            if self._gate.holding:
                whom = "groups in progress (partial_rollout is off)"
                await self._wait(lambda: not self._gate.groups, f"version {version}", whom)
            yield
        finally:
            self._gate.holding = False
            await self._waits.changed()

    async def _restore(self) -> str | None:
        """Serve the version before again.  None, or why that is not verified."""
        self._gate.loaded = None  # nothing may start until an engine is whole again
        why = await self._updates.restore()
        if why is None:
            self._gate.loaded = self._gate.verified
            await self._waits.changed()
        return why

    async def _restore_although_cancelled(self) -> None:
        restoring = asyncio.ensure_future(self._restore_or_leave())
        while not restoring.done():
            try:
                await asyncio.shield(restoring)
            except asyncio.CancelledError:
                continue  # asked again to stop: the way back has its own deadlines
        if (why := restoring.result()) is not None:
            await self.fail(
                WeightSyncFailed(
                    f"a cancelled publish could not be rolled back: {why}. Restart the engines."
                )
            )

    async def _restore_or_leave(self) -> str | None:
        try:
            return await self._restore()
        except NoEngines:
            return None  # those that join are brought to it

    async def _wait(self, done: Callable[[], bool], who: str, whom: str) -> None:
        def remedy() -> str:
            return (
                f" and the trainer did nothing in that time (trained step {self._gate.trained}, "
                f"served {self._gate.served_text}). "
                "Raise synchronizer.sync_timeout if a train step takes longer."
            )

        await self._waits.until(done, who, whom, remedy)

    async def _wait_for_engines(self, version: Version) -> None:
        if self._engines.numbers:
            return
        log.info("version %s waits for an explorer to join", version)
        remedy = (
            ", and none is there: start one (mode: explore), or raise synchronizer.sync_timeout.  "
            "The run resumes from its last checkpoint when it is started again"
        )
        await self._waits.until(
            lambda: bool(self._engines.numbers),
            f"version {version}",
            "an explorer to join",
            lambda: remedy,
        )

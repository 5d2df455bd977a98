"""Load one weight version at a time into all engines, verify it, and let explore batches start.

Independent of how weights are computed and staged.  Invariant: engines run only with one complete
version, and rows are trained (`wait_verified` returns True) only after the canary of the attempt
that generated them has passed.

    publish:     engines load and resume -> they answer the canary's probes, then explorers may
                 begin with the version -> the trainer verifies the answers -> served
    on failure:  roll back to the previous version, verified by its stored canary results
                 -> next attempt, under its own number -> WeightSyncFailed

    engines.py  the set of engines, calls to all of them, restarts
    update.py   one load, its canary, the roll-back
    gate.py     which batches may start, which rows may be trained: no waiting
    waits.py    waits with names and deadlines

Without partial rollouts, a sync waits until the groups in progress end, and no group starts before
it is over.  A dead engine is restarted with the newest verified version.  Engines that join are
verified before they serve.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

from msgspec.structs import replace

from rft.errors import EngineFailed, WeightSyncFailed
from rft.sync.canary import Canary
from rft.sync.engines import EngineSet, NoEngines, Rejected, Restart
from rft.sync.gate import GateState
from rft.sync.schedule import Schedule
from rft.sync.settings import SyncConfig, SyncRuntime
from rft.sync.update import Rounds, WeightUpdates, metrics
from rft.sync.waits import Waits, WaitShare
from rft.types.ids import Version
from rft.types.metrics import Metric
from rft.types.ports import Engine, Scorer, Sender, WeightManifest

log = logging.getLogger(__name__)
_NO_EXPLORER = (
    ", and none is there: start one (mode: explore), or raise synchronizer.sync_timeout.  "
    "The run resumes from its last checkpoint when it is started again"
)


class Synchronizer:
    """Implements `ports.WeightSync` for the trainer and the weights' part of `ports.ExploreGate`.

    `start`: first version of the run.  `engines` may be empty: others join.  `probes`: the canary's
    prompts, as token ids.  `sender` sends broadcast versions.  `restart`, `on_evicted`: see
    `EngineSet`.  Belongs to one event loop; a wait ends by an event, an error, or `sync_timeout`.
    """

    def __init__(
        self,
        config: SyncConfig,
        runtime: SyncRuntime,
        engines: Sequence[Engine],
        scorer: Scorer,
        schedule: Schedule,
        probes: Sequence[Sequence[int]],
        start: Version,
        restart: Restart | None = None,
        sender: Sender | None = None,
        on_evicted: Callable[[str, str], None] = lambda owner, reason: None,
    ) -> None:
        self._config = config
        self._runtime = runtime
        self._gate = GateState(schedule, start)
        self._waits = Waits(config.sync_timeout)
        self._engines = EngineSet(
            engines, runtime.workers, self._waits, config.sync_timeout, restart, on_evicted
        )
        rounds = Rounds(sender, config.sync_timeout)
        self._updates = WeightUpdates(
            config, runtime, self._engines, Canary(config, runtime, probes, scorer), rounds
        )
        self._publishing = asyncio.Lock()
        self._idle = WaitShare()
        self.owned = self._engines.owned
        self.fail = self._waits.fail

    # ------------------------------------------------------------ trainer's side

    async def publish(self, manifest: WeightManifest) -> list[Metric]:
        """Load one version into all engines and verify it, see `ports.WeightSync`.  When cancelled,
        restores the previous version first.
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
                        "version %s: no engine is left; it waits for engines that join",
                        manifest.version,
                    )

    async def _publish(self, manifest: WeightManifest) -> list[Metric]:
        self._gate.check_order(manifest.version)
        try:
            return await self._publish_with_retries(manifest)
        except asyncio.CancelledError:
            log.warning("publishing %s was cancelled", manifest.version)
            await self._restore_although_cancelled()
            raise

    async def _publish_with_retries(self, manifest: WeightManifest) -> list[Metric]:
        """Try to serve the version, up to `retries` more times; roll back after each failure."""
        failures = 0
        while True:
            version = self._gate.next_attempt(manifest.version)
            departures = self._engines.departures
            try:
                began = time.perf_counter()
                async with self._without_groups(version):
                    waited = Metric("sync/wait_s", time.perf_counter() - began, "max")
                    return [waited, *await self._attempt(replace(manifest, version=version))]
            except Rejected as e:
                log.error("version %s: %s", version, e)
                rollback_error = await self._restore()
                # an attempt during which an engine left is no failure of the weights
                failures += self._engines.departures == departures
                if rollback_error is not None or failures > self._runtime.retries:
                    reason = self._gate.failure(
                        manifest.version, str(e), max(1, failures), rollback_error
                    )
                    await self.fail(WeightSyncFailed(reason))
                await self._waits.changed()
            self._waits.raise_failure()

    async def _attempt(self, manifest: WeightManifest) -> list[Metric]:
        """Try once; batches may start once the engines have answered the probes, before the trainer
        verifies the answers.
        """

        async def open_gate() -> None:
            self._gate.loaded = manifest.version
            await self._waits.changed()

        try:
            waves = await self._updates.run(manifest, open_gate, idle=self._gate.on_policy_idle)
        except BaseException:
            if self._updates.provisional == manifest.version:
                self._gate.mark_rejected(manifest.version)
            raise
        idle_share = self._idle.window()
        self._gate.mark_verified(manifest.version)
        await self._waits.changed()
        restarts = self._engines.take_restarts()
        bound = self._gate.schedule.staleness_bound
        return [*_run_metrics(restarts, bound, idle_share), *metrics(manifest, waves)]

    async def step_finished(self, step: int, *, finished: bool = False) -> bool:
        self._gate.trained_step = max(step, self._gate.trained_step)
        self._gate.finished = finished or self._gate.finished
        await self._waits.changed()
        return self._gate.is_requested(step)

    async def wait_for_demand(self, step: int) -> bool:
        """See `ports.WeightSync`.  Has no deadline: the trainer's wait for rows has one."""
        gate = self._gate
        this_wait = gate.trainer_wait = object()
        await self._waits.changed()
        await self._waits.without_deadline(
            lambda: gate.trainer_wait is not this_wait or gate.finished or gate.is_requested(step)
        )
        return gate.is_requested(step)

    async def step_started(self, step: int) -> None:
        """See `ports.WeightSync`.  Engines on the trainer's GPUs sleep until the next load."""
        self._gate.trainer_wait = None
        await self._waits.changed()
        if self._runtime.in_turns:
            async with self._publishing:
                self._waits.raise_failure()
                await self._updates.sleep(step)

    async def allow_batch(self, batch: int) -> None:
        log.info(
            "explore batch %d may begin before its turn: step %d lacks rows",
            batch,
            self._gate.trained_step + 1,
        )
        self._gate.allow_early(batch)
        await self._waits.changed()

    # ------------------------------------------------------------ explorer's side

    async def may_explore(self, batch: int) -> Version | None:
        """Wait until explore batch `batch` (from 0) may start; return the version, perhaps
        unverified.

        None: the trainer is finished.
        """
        gate = self._gate
        who = f"explore batch {batch}"
        await self._wait(
            lambda: gate.may_request(batch), who, f"the explore batches before {batch}"
        )
        whom = f"weights of train step {gate.schedule.required_step(batch)} or later"
        if gate.schedule.syncs_before(batch):
            whom = "the newest weights"
        gate.request(batch)
        await self._waits.changed()
        try:
            with self._idle.waiting():
                await self._wait(
                    lambda: gate.may_start(batch, 0 if gate.schedule.by_group else None), who, whom
                )
        finally:
            gate.end_request(batch)
        version = gate.start(batch)
        self._idle.busy(gate.exploring)
        return version

    async def acquire_group(self, batch: int, group: int | None) -> bool:
        with self._idle.waiting():
            await self._wait(
                lambda: self._gate.may_acquire(batch, group),
                f"a group of explore batch {batch}",
                "newer weights",
            )
        self._gate.num_groups += not self._gate.finished
        self._idle.busy(self._gate.exploring)
        return not self._gate.finished

    async def release_group(self) -> None:
        self._gate.num_groups -= 1
        self._idle.busy(self._gate.exploring)
        await self._waits.changed()

    async def wait_verified(self, version: Version) -> bool:
        gate = self._gate
        if gate.is_verified(version):
            return True  # also after a failure: these rows are valid
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
        self._idle.busy(self._gate.exploring)
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
        """Add engines of explorer `owner`, on the newest verified version; return their numbers.

        `workers`: number per engine, empty = one each.  `may_leave` False: the run ends if one of
        them cannot be restarted.  Raises WeightSyncFailed, with nothing changed, if they cannot load it.
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
        """Remove the engines of `owner`; a running publication continues without them."""
        await self._engines.remove(self._engines.owned(owner))

    async def revive(self, index: int) -> None:
        """Restart engine `index`, which failed a request, if it is dead; return when it serves.

        Raises EngineFailed if it cannot be restarted: then the run ends, or its explorer leaves.
        """
        async with self._publishing:
            self._waits.raise_failure()
            if index not in self._engines:
                raise EngineFailed(f"engine {index} has left")
            if not (reason := await self._engines.why_dead(index)):
                return
            began = time.perf_counter()
            log.warning("%s; restarting it with %s", reason, self._gate.served_text)
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
    async def _without_groups(self, version: Version) -> AsyncIterator[None]:
        """Without partial rollouts: no group is in progress inside the block."""
        self._gate.blocked = not self._config.partial_rollout
        try:
            if self._gate.blocked:
                whom = "groups in progress (partial_rollout is off)"
                await self._wait(lambda: not self._gate.num_groups, f"version {version}", whom)
            yield
        finally:
            self._gate.blocked = False
            await self._waits.changed()

    async def _restore(self) -> str | None:
        """Serve the previous version again; return None, or why it is not verified."""
        self._gate.loaded = None  # no batch may start before an engine is restored
        reason = await self._updates.restore()
        if reason is None:
            self._gate.loaded = self._gate.verified
            await self._waits.changed()
        return reason

    async def _restore_although_cancelled(self) -> None:
        restoring = asyncio.ensure_future(self._restore_or_leave())
        while not restoring.done():
            try:
                await asyncio.shield(restoring)
            except asyncio.CancelledError:
                continue  # cancelled again: the roll-back has its own deadlines
        if (reason := restoring.result()) is not None:
            await self.fail(
                WeightSyncFailed(
                    f"a cancelled publish could not be rolled back: {reason}. Restart the engines."
                )
            )

    async def _restore_or_leave(self) -> str | None:
        try:
            return await self._restore()
        except NoEngines:
            return None  # joining engines load it

    async def _wait(self, done: Callable[[], bool], who: str, whom: str) -> None:
        def remedy() -> str:
            return (
                f" and the trainer did nothing in that time (trained step "
                f"{self._gate.trained_step}, served {self._gate.served_text}). "
                "Raise synchronizer.sync_timeout if a train step takes longer."
            )

        await self._waits.until(done, who, whom, remedy)

    async def _wait_for_engines(self, version: Version) -> None:
        if self._engines.numbers:
            return
        whom = "an explorer to join"
        log.info("version %s waits for %s", version, whom)
        await self._waits.until(
            lambda: bool(self._engines.numbers), f"version {version}", whom, lambda: _NO_EXPLORER
        )


def _run_metrics(
    restarts: Mapping[str, int], bound: int | None, idle_share: float | None
) -> list[Metric]:
    """Return the metrics of the time since the last version."""
    collected = [Metric(f"sync/{name}", float(count), "sum") for name, count in restarts.items()]
    if bound is not None:
        collected.append(Metric("sync/staleness_bound", float(bound), "last"))
    if idle_share is not None:
        collected.append(Metric("explorer/idle_ratio", idle_share, "mean"))
        collected.append(Metric("rollouter/idle_ratio", idle_share, "mean"))
    return collected

"""Brings one weight version at a time into all engines, proves it, and lets explorer batches start when they may.

Knows nothing of how weights are made or staged. The one invariant: engines run only with one whole version, and what
they generate with a version counts (`served` returns) only after its canary passed.

    publish:  pause -> load and check the reports -> resume -> canary, while rollouts of the version already run -> served
    on failure: pause -> load the version before -> resume -> prove it by its canary record -> try again -> WeightSyncFailed

Without partial rollouts, groups under way end before the pause and no other one begins.

An engine that died is restarted with the newest proven version, and proven by that version's canary record; one that dies while a version
is loaded makes that attempt fail, and is restarted on the way back.

A version whose canary failed is tried again only while no explore batch is under way: rows begun under the rejected
weights would carry the label that the second attempt makes good.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Protocol, TypeVar, runtime_checkable

from rft.errors import DeadlineExceeded, EngineFailed, EngineStalled, RftError, WeightSyncFailed
from rft.sync.canary import Canary, Probe, Verdict
from rft.sync.rounds import Rounds
from rft.sync.schedule import Schedule
from rft.sync.settings import SyncSettings
from rft.types.ids import Version
from rft.types.metrics import Metric
from rft.types.ports import Engine, LoadReport, Scorer, Sender, WeightManifest

log = logging.getLogger(__name__)
T = TypeVar("T")
PROBE_LIMIT = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}  # of a packed layer's output, relative to its scale


@runtime_checkable
class _Pool(Protocol):
    """A pool shows its engines; each is loaded and proven on its own."""

    engines: Sequence[Engine]


class _Gate:
    """How long somebody waited at the gate since the version before."""

    def __init__(self) -> None:
        self._began: float | None = None  # of the window; None before the first version
        self._since = self._waited = 0.0
        self._count = 0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        if self._count == 0:
            self._since = _now()
        self._count += 1
        try:
            yield
        finally:
            self._count -= 1
            if self._count == 0:
                self._waited += _now() - self._since

    def window(self) -> float | None:
        """Share of the window that ends now; None where there was none."""
        now, began, waited = _now(), self._began, self._waited + (_now() - self._since if self._count else 0.0)
        self._began, self._since, self._waited = now, now, 0.0
        return None if began is None or now <= began else min(1.0, waited / (now - began))


def _now() -> float:
    return asyncio.get_running_loop().time()


class _Rejected(Exception):
    """One attempt failed.  `generated` = engines may have written tokens with the weights in question."""

    def __init__(self, reason: str, *, generated: bool = False) -> None:
        super().__init__(reason)
        self.generated = generated


class Synchronizer:
    """Implements `WeightSync` for the trainer and `ExploreGate` for the explorer.  `start` is the version the run begins with.

    Prompts of the canary are given as token ids.  `restart(i)` gives engine i a new process, without weights; without it an engine that
    died ends the run.  `sender` sends versions that are broadcast.  Lives in one event loop; every wait ends by an event, an error or
    `timeout_s` without any news from the trainer.
    """

    def __init__(
        self,
        settings: SyncSettings,
        engine: Engine,
        scorer: Scorer,
        schedule: Schedule,
        probes: Sequence[Sequence[int]],
        start: Version,
        restart: Callable[[int], Awaitable[None]] | None = None,
        sender: Sender | None = None,
    ) -> None:
        self._restart = restart
        self._rounds = Rounds(sender, settings.workers, settings.timeout_s)
        self._dead: set[int] = set()  # engines to restart before anything is asked of them
        self._stalled: set[int] = set()  # of them, those that hang
        self._restarts = {"engines_restarted": 0, "engines_stalled": 0}  # since they were reported last
        self._settings, self._schedule, self._start = settings, schedule, start
        self._engines: tuple[Engine, ...] = tuple(engine.engines) if isinstance(engine, _Pool) else (engine,)
        self._canary = Canary(settings, probes, scorer)
        self._publishing = asyncio.Lock()
        self._changed = asyncio.Condition()
        self._loaded: Version | None = None  # in all engines, perhaps on probation
        self._manifest: WeightManifest | None = None  # of the newest proven version
        self._records: tuple[Probe, ...] = ()  # its canary, per engine
        self._proven: set[Version] = set()
        self._spoilt: set[Version] = set()  # wrote rows without a canary; the label cannot be made good any more
        self._trained, self._finished = start.step, False
        self._under_way: set[int] = set()  # explore batches
        self._asked: dict[int, int] = {}  # explore batches that wait: step of the weights that were there when they asked
        self._idle: object | None = None  # the trainer waits for rows
        self._playing = 0  # groups, where they are counted
        self._holding = False  # a version waits for them; no other one begins
        self._gate = _Gate()
        self._ahead = 0  # batches that went into earlier steps than the schedule counts with, because steps lacked rows
        self._error: BaseException | None = None
        self._waits: dict[int, str] = {}

    # ------------------------------------------------------------ trainer's side

    async def publish(self, manifest: WeightManifest) -> list[Metric]:
        """See `WeightSync`.  When cancelled, the version before is restored first."""
        async with self._publishing:
            self._raise_failure()
            self._check_order(manifest.version)
            for attempt in range(self._settings.retries + 1):
                try:
                    async with self._groups_ended(manifest.version):
                        return await self._attempt(manifest)
                except asyncio.CancelledError:
                    log.warning("publishing %s was cancelled", manifest.version)
                    if self._loaded == manifest.version and self._under_way:
                        self._spoilt.add(manifest.version)
                    await self._restore_although_cancelled()
                    raise
                except _Rejected as e:
                    log.error("version %s, attempt %d: %s", manifest.version, attempt + 1, e)
                    restored = await self._restore()
                    tainted = e.generated and bool(self._under_way)
                    if restored is not None or tainted or attempt == self._settings.retries:
                        await self.fail(self._failure(manifest.version, str(e), attempt + 1, restored))
                        break
            self._raise_failure()
            raise AssertionError("a publish ends with metrics or an error")

    async def trained(self, step: int, *, finished: bool = False) -> bool:
        """See `WeightSync`."""
        async with self._changed:
            self._trained, self._finished = max(step, self._trained), finished or self._finished
            self._changed.notify_all()
            return self._wanted(step)

    async def idle(self, step: int) -> bool:
        """See `WeightSync`.  It has no deadline of its own: the trainer's wait for rows has one."""
        async with self._changed:
            mine = self._idle = object()
            self._changed.notify_all()
            while self._idle is mine and not self._finished and not self._wanted(step):
                self._raise_failure()
                await self._changed.wait()
            return self._wanted(step)

    async def training(self, step: int) -> None:
        """See `WeightSync`."""
        async with self._changed:
            self._idle = None
            self._changed.notify_all()

    async def explore_on(self, batch: int) -> None:
        """See `WeightSync`."""
        first = self._schedule.first_after(self._trained + 1)
        ahead = 0 if first is None else batch + 1 - first
        log.info("explore batch %d may begin before its turn: step %d lacks rows", batch, self._trained + 1)
        async with self._changed:
            self._ahead = max(self._ahead, ahead)
            self._changed.notify_all()

    # ------------------------------------------------------------ explorer's side

    async def may_explore(self, batch: int) -> Version | None:
        """See `ExploreGate`."""
        whom = f"weights of train step {self._schedule.required_step(batch)} or later"
        if self._schedule.syncs_before(batch):
            before = f"the explore batches before {batch}"
            await self._wait(lambda: self._finished or not self._under_way, f"explore batch {batch}", before)
            whom = "the newest weights"
        async with self._changed:
            self._asked[batch] = -1 if self._loaded is None else self._loaded.step
            self._changed.notify_all()
        try:
            with self._gate.waiting():
                await self._wait(lambda: self._may(batch, 0 if self._schedule.by_group else None), f"explore batch {batch}", whom)
        finally:
            del self._asked[batch]
        if self._finished:
            return None
        self._under_way.add(batch)
        return self._loaded

    async def may_play(self, batch: int, group: int | None) -> bool:
        """See `ExploreGate`."""

        def ready() -> bool:
            return not self._holding and (group is None or not self._schedule.by_group or self._may(batch, group))

        with self._gate.waiting():
            await self._wait(lambda: self._finished or ready(), f"a group of explore batch {batch}", "newer weights")
        self._playing += not self._finished
        return not self._finished

    async def played(self) -> None:
        """See `ExploreGate`."""
        async with self._changed:
            self._playing -= 1
            self._changed.notify_all()

    def _may(self, batch: int, group: int | None) -> bool:
        """May it start now, or never any more?"""
        if self._finished or self._loaded is None:
            return self._finished
        return self._allows(batch, group, self._loaded.step, self._trained + (self._idle is None))

    def _allows(self, batch: int, group: int | None, step: int, newest: int) -> bool:
        held = self._asked.get(batch, -1)
        return self._schedule.may_explore(batch, step, group=group, held=held, newest=newest, ahead=self._ahead)

    def _wanted(self, step: int) -> bool:
        """Whether a batch that waits could start with the weights of `step`, which is trained, and cannot now."""
        if not self._schedule.on_demand or self._loaded is None or step <= self._loaded.step:
            return False
        return any(self._allows(batch, None, step, step) and not self._may(batch, None) for batch in self._asked)

    async def served(self, version: Version) -> None:
        """See `ExploreGate`."""

        def known() -> bool:
            return version in self._proven or self._never_served(version)

        if version in self._proven:
            return  # also after a failure: these rows are good
        await self._wait(known, f"rows of version {version}", "its canary")
        if version not in self._proven:
            raise WeightSyncFailed(f"version {version} was never proven and never will be; served is {self._served_text()}")

    async def explored(self, batch: int) -> None:
        """See `ExploreGate`."""
        async with self._changed:
            self._under_way.discard(batch)
            self._changed.notify_all()

    async def final(self) -> Version:
        """See `ExploreGate`."""
        last = self._start.lineage

        def done() -> bool:
            return self._finished and Version(last, self._trained) in self._proven

        await self._wait(done, "the explorer", "the trainer's last version")
        return Version(last, self._trained)

    # ------------------------------------------------------------ launcher's side

    async def fail(self, error: BaseException) -> None:
        """Release everyone who waits, now and later, with `error` (the first one counts)."""
        async with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    async def revive(self, index: int) -> None:
        """Engine `index` failed an answer: when it is dead, restart it with the newest proven version and prove that.

        Returns when it serves again.  Raises EngineFailed, and ends the run with it, when that cannot be reached.
        """
        async with self._publishing:
            self._raise_failure()
            why = f"engine {index} died"
            if index not in self._dead:
                try:
                    await self._ask(index, "health", lambda e: e.health(), False)
                    return
                except _Rejected as e:
                    why = str(e)
                    if self._restart is not None:
                        self._dead.add(index)  # also one that only hangs
            began = time.perf_counter()
            log.warning("%s; it is restarted with %s", why, self._served_text())
            try:
                await self._restart_dead()
                if self._manifest is not None:
                    await self._bring(index, self._manifest)
            except _Rejected as e:
                failure = EngineFailed(f"engine {index} could not be brought back: {e}")
                await self.fail(failure)
                raise failure from e
            log.info("engine %d serves %s again after %.1f s", index, self._served_text(), time.perf_counter() - began)

    async def _bring(self, index: int, manifest: WeightManifest) -> None:
        """One engine to the version that all others serve."""
        await self._ask(index, "pause", lambda e: e.pause(), False)
        await self._load(manifest, [index])
        await self._ask(index, "resume", lambda e: e.resume(), False)
        now = await self._ask(index, "probe", lambda e: self._canary.probe(e, manifest.version), False)
        try:
            self._canary.prove_same(now, self._records[index])
        except WeightSyncFailed as e:
            raise _Rejected(f"engine {index}: {e}") from e

    async def _restart_dead(self) -> None:
        for index in sorted(self._dead):
            assert self._restart is not None
            try:
                await self._restart(index)
            except Exception as e:  # whatever the launcher's side raises
                raise _Rejected(f"engine {index} could not be restarted: {type(e).__name__}: {e}") from e
            log.warning("engine %d was restarted", index)
            self._restarts["engines_restarted"] += 1
            self._restarts["engines_stalled"] += index in self._stalled
            self._dead.discard(index)
            self._stalled.discard(index)

    @property
    def manifest(self) -> WeightManifest | None:
        """The newest proven version: what a restarted engine has to load."""
        return self._manifest

    @property
    def waiting(self) -> list[str]:
        """Who waits for what at this moment."""
        return list(self._waits.values())

    # ------------------------------------------------------------ one attempt

    async def _attempt(self, manifest: WeightManifest) -> list[Metric]:
        version, began = manifest.version, time.perf_counter()
        await self._restart_dead()
        await self._pause()
        paused = time.perf_counter()
        reports = await self._load(manifest, range(len(self._engines)))
        loaded = time.perf_counter()
        await self._resume(version)
        resumed = time.perf_counter()
        probes, verdict = await self._prove(version)
        ended = time.perf_counter()
        window, bound = self._gate.window(), self._schedule.staleness_bound
        async with self._changed:
            self._manifest, self._records, self._loaded = manifest, probes, version
            self._trained = max(self._trained, version.step)
            self._proven.add(version)
            self._changed.notify_all()
        restarts, self._restarts = self._restarts, dict.fromkeys(self._restarts, 0)
        return [
            *(Metric(f"sync/{name}", float(count), "sum") for name, count in restarts.items()),
            Metric("sync/pause_s", paused - began, "max"),
            Metric("sync/load_s", loaded - paused, "max"),
            Metric("sync/load/meeting_s", max(r.meeting_s for r in reports), "max"),
            Metric("sync/load/transfer_s", max(r.transfer_s for r in reports), "max"),
            Metric("sync/load/verify_s", max(r.verify_s for r in reports), "max"),
            Metric("sync/load/model_s", max(r.load_s - r.meeting_s - r.transfer_s - r.verify_s for r in reports), "max"),
            Metric("sync/resume_s", resumed - loaded, "max"),
            Metric("sync/canary_s", ended - resumed, "max"),
            Metric("sync/total_s", ended - began, "max"),
            Metric("sync/version", float(version.step), "last"),
            Metric("sync/bytes", float(manifest.nbytes), "last"),
            Metric("sync/probed_layers", float(min(r.probed_layers for r in reports)), "min"),
            Metric("sync/probe_error", max(r.probe_error for r in reports), "max"),
            Metric("sync/canary_max_abs", verdict.max_abs, "max"),
            Metric("sync/canary_limit", verdict.limit, "last"),
            Metric("sync/canary_moved", verdict.moved, "max"),
            Metric("sync/canary_tokens", float(verdict.num_tokens), "last"),
            Metric("sync/below_noise", float(verdict.below_noise), "sum"),
            *([] if bound is None else [Metric("sync/staleness_bound", float(bound), "last")]),
            *(Metric(name, window, "mean") for name in ("explorer/idle_ratio", "rollouter/idle_ratio") if window is not None),
        ]

    @asynccontextmanager
    async def _groups_ended(self, version: Version) -> AsyncIterator[None]:
        """Without partial rollouts no group is under way meanwhile."""
        self._holding = not self._settings.partial_rollout
        try:
            if self._holding:
                await self._wait(lambda: not self._playing, f"version {version}", "groups under way (partial_rollout is off)")
            yield
        finally:
            async with self._changed:
                self._holding = False
                self._changed.notify_all()

    async def _pause(self) -> None:
        clear = self._settings.kv_cache == "recompute"
        await self._each("pause", lambda e: e.pause(clear_cache=clear))

    async def _load(self, manifest: WeightManifest, engines: Sequence[int]) -> list[LoadReport]:
        """The version in these engines, according to reports that have nothing against it."""

        def ask(index: int, manifest: WeightManifest) -> Awaitable[LoadReport]:
            return self._ask(index, "load", lambda e: e.load(manifest), False)

        if manifest.broadcast is None:
            reports = await _all(ask(i, manifest) for i in engines)
        else:
            try:
                reports = await self._rounds.load(manifest, engines, ask)
            except WeightSyncFailed as e:
                raise _Rejected(str(e)) from e
        for i, report in zip(engines, reports, strict=True):
            if why := self._objection(report, manifest):
                raise _Rejected(f"engine {i}: {why}")
        return reports

    async def _resume(self, version: Version) -> None:
        await self._each("resume", lambda e: e.resume(), generated=True)
        if self._manifest is not None:  # without a version to go back to, nothing starts before the canary
            async with self._changed:
                self._loaded = version
                self._changed.notify_all()

    async def _prove(self, version: Version) -> tuple[tuple[Probe, ...], Verdict]:
        probes = tuple(await self._each("probe", lambda e: self._canary.probe(e, version), generated=True))
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                return probes, await self._canary.check(probes, self._records)
        except TimeoutError:
            raise _Rejected(
                f"the trainer did not score the canary within {self._settings.timeout_s:g} s", generated=True
            ) from None
        except WeightSyncFailed as e:
            raise _Rejected(str(e), generated=True) from e
        except Exception as e:  # whatever the trainer's side raises, the engines must go back to proven weights
            raise _Rejected(f"the trainer could not score the canary: {type(e).__name__}: {e}", generated=True) from e

    def _objection(self, report: LoadReport, manifest: WeightManifest) -> str:
        limit = PROBE_LIMIT.get(self._settings.engine_dtype, PROBE_LIMIT["bfloat16"])
        if report.failed:
            return report.failed
        if report.bad_hash:
            return f"{_some(report.bad_hash)} arrived damaged (xxh3-128 differs)"
        if report.missing:
            return f"{_some(report.missing)} of the model did not get any weights"
        if report.unexpected:
            return f"{_some(report.unexpected)} of the published weights are not in the model"
        if report.version != manifest.version:
            return f"it loaded version {report.version}"
        if report.num_tensors != len(manifest.tensors):
            return f"it loaded {report.num_tensors} of {len(manifest.tensors)} tensors"
        if not report.probe_error <= limit:
            found = f"{report.probe_error:.2e}, allowed {limit:.0e}"
            return f"layer {report.probe_worst} computes with other weights than published: {found}"
        return ""

    # ------------------------------------------------------------ the way back

    async def _restore(self) -> str | None:
        """Serve the version before again, proven by its record.  None, or why that is not proven."""
        self._loaded = None  # nothing may start until an engine is whole again
        before = self._manifest
        if before is None:
            return None  # the first version: no task was admitted
        try:
            await self._restart_dead()
            await self._pause()
            await self._load(before, range(len(self._engines)))
            await self._each("resume", lambda e: e.resume())
            for i, (now, then) in enumerate(
                zip(await self._each("probe", lambda e: self._canary.probe(e, before.version)), self._records, strict=True)
            ):
                try:
                    self._canary.prove_same(now, then)
                except WeightSyncFailed as e:
                    raise _Rejected(f"engine {i}: {e}") from e
        except _Rejected as e:
            return str(e)
        async with self._changed:
            self._loaded = before.version
            self._changed.notify_all()
        return None

    async def _restore_although_cancelled(self) -> None:
        restoring = asyncio.ensure_future(self._restore())
        while not restoring.done():
            try:
                await asyncio.shield(restoring)
            except asyncio.CancelledError:
                continue  # asked again to stop: the way back has deadlines of its own
        if (why := restoring.result()) is not None:
            await self.fail(WeightSyncFailed(f"a cancelled publish could not be taken back: {why}. Restart the engines."))

    def _failure(self, version: Version, reason: str, attempts: int, restored: str | None) -> WeightSyncFailed:
        if self._manifest is None:
            back = "It is the first version, so the run does not start."
        elif restored is None:
            back = f"The engines serve {self._manifest.version} again, proven by its canary; resume from the last checkpoint."
        else:
            back = f"The roll-back to {self._manifest.version} is not proven ({restored}): restart the engines, then resume."
        return WeightSyncFailed(f"weights {version} are not served, {attempts} attempts, the last: {reason}. {back}")

    # ------------------------------------------------------------ waiting and asking

    async def _each(self, what: str, ask: Callable[[Engine], Awaitable[T]], *, generated: bool = False) -> list[T]:
        """Ask all engines at once and wait for all; a failure becomes _Rejected and names the engine."""
        return await _all(self._ask(i, what, ask, generated) for i in range(len(self._engines)))

    async def _ask(self, index: int, what: str, ask: Callable[[Engine], Awaitable[T]], generated: bool) -> T:
        limit = self._settings.timeout_s
        try:
            async with asyncio.timeout(limit):
                return await ask(self._engines[index])
        except TimeoutError:
            raise _Rejected(f"engine {index} did not answer `{what}` within {limit:g} s", generated=generated) from None
        except EngineFailed as e:  # nothing is said against the weights
            if self._restart is not None:
                self._dead.add(index)
                if isinstance(e, EngineStalled):
                    self._stalled.add(index)
                generated = False
            raise _Rejected(f"engine {index}: {what}: {type(e).__name__}: {e}", generated=generated) from e
        except Exception as e:  # a remote engine may raise anything; all of it means the way back
            raise _Rejected(f"engine {index}: {what}: {type(e).__name__}: {e}", generated=generated) from e

    async def _wait(self, done: Callable[[], bool], who: str, whom: str) -> None:
        limit, token = self._settings.timeout_s, object()
        self._waits[id(token)] = f"{who} waits for {whom}"
        try:
            async with self._changed:
                while not done() or self._error is not None:
                    self._raise_failure()
                    async with asyncio.timeout(limit):
                        await self._changed.wait()
        except TimeoutError:
            raise DeadlineExceeded(
                f"{who} waited {limit:g} s for {whom} and the trainer did nothing in that time (trained step {self._trained}, "
                f"served {self._served_text()}). Raise synchronizer.sync_timeout if a train step takes longer."
            ) from None
        finally:
            del self._waits[id(token)]

    def _raise_failure(self) -> None:
        if self._error is not None:
            raise self._error.with_traceback(None) if isinstance(self._error, RftError) else WeightSyncFailed(str(self._error))

    def _check_order(self, version: Version) -> None:
        if version.lineage != self._start.lineage:
            raise WeightSyncFailed(f"version {version} is of another lineage than the run's {self._start.lineage}")
        if self._manifest is not None and version <= self._manifest.version:
            raise WeightSyncFailed(f"version {version} is not newer than {self._manifest.version}, which is served")
        if version in self._spoilt:
            raise WeightSyncFailed(f"version {version} wrote rows before it was cancelled; publish the next one instead")

    def _never_served(self, version: Version) -> bool:
        return version.lineage != self._start.lineage or (self._manifest is not None and version < self._manifest.version)

    def _served_text(self) -> str:
        return str(self._manifest.version) if self._manifest is not None else "nothing yet"


async def _all(asked: Iterable[Awaitable[T]]) -> list[T]:
    """All answers; of several failures the one that says something against the weights counts, before an engine that died."""
    results = await asyncio.gather(*asked, return_exceptions=True)
    failures = [r for r in results if isinstance(r, BaseException)]
    if failures:
        raise next((f for f in failures if isinstance(f, _Rejected) and f.generated), failures[0])
    return results  # type: ignore[return-value]  # exceptions are gone


def _some(names: Sequence[Any]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{len(names)} tensors ({', '.join(map(str, names[:3]))}{more})"

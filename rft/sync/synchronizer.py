"""Brings one weight version at a time into all engines, proves it, and lets explorer batches start when they may.

Knows nothing of how weights are made or staged. The one invariant: engines run only with one whole version, and what
they generate with a version counts (`served` returns) only after its canary passed.

    publish:  pause -> load and check the reports -> resume -> canary, while rollouts of the version already run -> served
    on failure: pause -> load the version before -> resume -> prove it by its canary record -> try again -> WeightSyncFailed

Without partial rollouts, groups under way end before the pause and no other one begins.

An engine that died is restarted with the newest proven version, and proven by that version's canary record; one that dies while a version
is loaded makes that attempt fail, and is restarted on the way back.

Engines of explorers in other processes come and go (`join`, `leave`): new ones are proven against the newest version before they count,
and one that cannot be brought back leaves with all that its explorer brought, and the others go on.

A version whose canary failed is tried again only while no explore batch is under way: rows begun under the rejected
weights would carry the label that the second attempt makes good.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
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


class _Deserted(Exception):
    """All the engines that were asked have left."""


class _Rejected(Exception):
    """One attempt failed.  `generated` = engines may have written tokens with the weights in question."""

    def __init__(self, reason: str, *, generated: bool = False) -> None:
        super().__init__(reason)
        self.generated = generated


class Synchronizer:
    """Implements `WeightSync` for the trainer and `ExploreGate` for the explorer.  `start` is the version the run begins with.

    Without an `engine` it waits for such as join.  Prompts of the canary are given as token ids.  `sender` sends versions that are
    broadcast.  `restart(i)` gives engine i a new process, without weights; without it an engine that died ends the run.  Lives in one
    event loop; every wait ends by an event, an error or `timeout_s` without any news from the trainer.
    """

    def __init__(
        self,
        settings: SyncSettings,
        engine: Engine | None,
        scorer: Scorer,
        schedule: Schedule,
        probes: Sequence[Sequence[int]],
        start: Version,
        restart: Callable[[int], Awaitable[None]] | None = None,
        sender: Sender | None = None,
        put_out: Callable[[str, str], None] = lambda owner, why: None,
    ) -> None:
        """`put_out(owner, why)` hears that the engines of an owner had to leave."""
        self._restart, self._put_out = restart, put_out
        self._rounds = Rounds(sender, settings.timeout_s)
        self._dead: set[int] = set()  # engines to restart before anything is asked of them
        self._stalled: set[int] = set()  # of them, those that hang
        self._restarts = {"engines_restarted": 0, "engines_stalled": 0}  # since they were reported last
        self._settings, self._schedule, self._start = settings, schedule, start
        given = () if engine is None else tuple(engine.engines) if isinstance(engine, _Pool) else (engine,)
        self._engines: dict[int, Engine] = dict(enumerate(given))  # by number; numbers are never used again
        self._workers = dict(enumerate(settings.workers))  # of each engine, where there are several
        self._owners: dict[int, str] = {}  # of those that joined
        self._numbers = itertools.count(len(given))
        self._departures = 0
        self._canary = Canary(settings, probes, scorer)
        self._publishing = asyncio.Lock()
        self._changed = asyncio.Condition()
        self._loaded: Version | None = None  # in all engines, perhaps on probation
        self._manifest: WeightManifest | None = None  # of the newest proven version
        self._records: dict[int, Probe] = {}  # its canary, by engine
        self._proof: Probe | None = None  # one of them, kept when all engines have left
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
        """See `WeightSync`.  When cancelled, the version before is restored first.  Where no engine is there it waits for one to join."""
        while True:
            await self._peopled(manifest.version)
            async with self._publishing:
                self._raise_failure()
                try:
                    return await self._publish(manifest)
                except _Deserted:
                    self._loaded = None if self._manifest is None else self._manifest.version
                    log.warning("version %s: every engine has left; it is published to those that join", manifest.version)

    async def _publish(self, manifest: WeightManifest) -> list[Metric]:
        self._check_order(manifest.version)
        attempt = 0
        while True:
            departures = self._departures
            try:
                began = time.perf_counter()
                async with self._groups_ended(manifest.version):
                    waited = Metric("sync/wait_s", time.perf_counter() - began, "max")
                    return [waited, *await self._attempt(manifest)]
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
                left = self._departures > departures  # nothing is said against the weights
                if restored is not None or tainted or (attempt == self._settings.retries and not left):
                    await self.fail(self._failure(manifest.version, str(e), attempt + 1, restored))
                    break
                attempt += not left
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
            await self._wait(
                lambda: self._finished or min(self._under_way, default=batch) >= batch, f"explore batch {batch}", before
            )
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
            if index not in self._engines:
                raise EngineFailed(f"engine {index} has left")
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
                    await self._bring([index], self._manifest)
            except (_Rejected, _Deserted) as e:
                failure = EngineFailed(f"engine {index} could not be brought back: {e}")
                if (owner := self._owners.get(index)) is not None:
                    await self._send_away(owner, str(failure))
                else:
                    await self.fail(failure)
                raise failure from e
            if index not in self._engines:  # its explorer had to leave
                raise EngineFailed(f"engine {index} could not be brought back")
            log.info("engine %d serves %s again after %.1f s", index, self._served_text(), time.perf_counter() - began)

    async def _bring(self, numbers: Sequence[int], manifest: WeightManifest) -> None:
        """These engines to a version that was proven, and prove that they serve it."""
        await self._pause(numbers)
        await self._load(manifest, numbers)
        await self._all({i: self._ask(i, "resume", lambda e: e.resume(), False) for i in numbers})
        probing = {i: self._ask(i, "probe", lambda e: self._canary.probe(e, manifest.version), False) for i in numbers}
        for index, now in (await self._all(probing)).items():
            try:
                proof = self._records.get(index, self._proof)
                assert proof is not None, "what is served was proven"
                self._canary.prove_same(now, proof)
            except WeightSyncFailed as e:
                raise _Rejected(f"engine {index}: {e}") from e
            self._records.setdefault(index, now)

    async def _restart_dead(self) -> None:
        for index in sorted(self._dead):
            if index not in self._dead:
                continue  # it has left
            assert self._restart is not None
            try:
                await self._restart(index)
            except Exception as e:  # whatever the launcher's side raises
                why = f"engine {index} could not be restarted: {type(e).__name__}: {e}"
                if (owner := self._owners.get(index)) is None:
                    raise _Rejected(why) from e
                await self._send_away(owner, why)
                continue
            log.warning("engine %d was restarted", index)
            self._restarts["engines_restarted"] += 1
            self._restarts["engines_stalled"] += index in self._stalled
            self._dead.discard(index)
            self._stalled.discard(index)

    async def join(self, owner: str, engines: Sequence[Engine], workers: Sequence[int] = ()) -> tuple[int, ...]:
        """The engines that explorer `owner` brings count from now on: they serve the newest proven version, where there is one.

        `workers`: of each engine, empty = one each.  Returns their numbers.  Raises WeightSyncFailed, and leaves everything as it was, when
        they cannot be brought to it.
        """
        async with self._publishing:
            self._raise_failure()
            numbers = tuple(itertools.islice(self._numbers, len(engines)))
            self._engines |= dict(zip(numbers, engines, strict=True))
            self._owners |= dict.fromkeys(numbers, owner)
            self._workers |= dict(zip(numbers, workers or [1] * len(numbers), strict=True))
            try:
                if self._manifest is not None:
                    await self._bring(numbers, self._manifest)
            except BaseException as e:
                await self.leave(owner)
                if isinstance(e, _Rejected | _Deserted):
                    raise WeightSyncFailed(f"the engines of explorer {owner} do not serve {self._served_text()}: {e}") from e
                raise
        async with self._changed:
            self._changed.notify_all()
        return numbers

    async def leave(self, owner: str) -> None:
        """The engines of `owner` are gone, or must not be asked any more.  Also in the middle of a publish, which goes on without them."""
        async with self._changed:
            for index in [i for i, o in self._owners.items() if o == owner]:
                del self._engines[index], self._owners[index]
                self._records.pop(index, None)
                self._dead.discard(index)
                self._stalled.discard(index)
            self._departures += 1
            self._changed.notify_all()

    async def _send_away(self, owner: str, why: str) -> None:
        log.error("explorer %s leaves: %s", owner, why)
        await self.leave(owner)
        self._put_out(owner, why)

    def owned(self, owner: str) -> list[int]:
        """The numbers of the engines of `owner`."""
        return [i for i, o in self._owners.items() if o == owner]

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
        await self._pause(tuple(self._engines))
        paused = time.perf_counter()
        reports = tuple((await self._load(manifest, tuple(self._engines))).values())
        loaded = time.perf_counter()
        await self._resume(version)
        resumed = time.perf_counter()
        probes, verdict = await self._prove(version)
        ended = time.perf_counter()
        window, bound = self._gate.window(), self._schedule.staleness_bound
        async with self._changed:
            self._manifest, self._loaded = manifest, version
            self._records = {i: p for i, p in probes.items() if i in self._engines}
            self._proof = next(iter(probes.values()))
            self._trained = max(self._trained, version.step)
            self._proven.add(version)
            self._changed.notify_all()
        restarts, self._restarts = self._restarts, dict.fromkeys(self._restarts, 0)
        return [
            *(Metric(f"sync/{name}", float(count), "sum") for name, count in restarts.items()),
            Metric("sync/stage_s", manifest.stage_s, "max"),
            Metric("sync/pause_s", paused - began, "max"),
            Metric("sync/load_s", loaded - paused, "max"),
            Metric("sync/load/meeting_s", max(r.meeting_s for r in reports), "max"),
            Metric("sync/load/transfer_s", max(r.transfer_s for r in reports), "max"),
            Metric("sync/load/verify_s", max(r.verify_s for r in reports), "max"),
            Metric(
                "sync/load/model_s", max(r.load_s - r.meeting_s - r.transfer_s - r.verify_s - r.probe_s for r in reports), "max"
            ),
            Metric("sync/load/probe_s", max(r.probe_s for r in reports), "max"),
            Metric("sync/resume_s", resumed - loaded, "max"),
            Metric("sync/canary_s", ended - resumed, "max"),
            Metric("sync/total_s", ended - began, "max"),
            *_held(reports, resumed - began),
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

    async def _pause(self, numbers: Sequence[int]) -> None:
        clear = self._settings.kv_cache == "recompute"
        await self._all({i: self._ask(i, "pause", lambda e: e.pause(clear_cache=clear), False) for i in numbers})

    async def _load(self, manifest: WeightManifest, engines: Sequence[int]) -> dict[int, LoadReport]:
        """The version in these engines, according to reports that have nothing against it."""

        def ask(index: int, manifest: WeightManifest) -> Awaitable[LoadReport]:
            return self._ask(index, "load", lambda e: e.load(manifest), False)

        if manifest.broadcast is None:
            reports = await self._all({i: ask(i, manifest) for i in engines})
        else:
            try:
                reports = await self._rounds.load(manifest, {i: self._workers.get(i, 1) for i in engines}, ask)
            except WeightSyncFailed as e:
                raise _Rejected(str(e)) from e
        for i, report in reports.items():
            if why := self._objection(report, manifest):
                raise _Rejected(f"engine {i}: {why}")
        return reports

    async def _resume(self, version: Version) -> None:
        await self._each("resume", lambda e: e.resume(), generated=True)
        if self._manifest is not None:  # without a version to go back to, nothing starts before the canary
            async with self._changed:
                self._loaded = version
                self._changed.notify_all()

    async def _prove(self, version: Version) -> tuple[dict[int, Probe], Verdict]:
        probes = await self._each("probe", lambda e: self._canary.probe(e, version), generated=True)
        before = tuple(self._records.values()) or (() if self._proof is None else (self._proof,))
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                return probes, await self._canary.check(tuple(probes.values()), before, names=tuple(probes))
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
            await self._bring(tuple(self._engines), before)
        except _Rejected as e:
            return str(e)
        async with self._changed:
            self._loaded = before.version
            self._changed.notify_all()
        return None

    async def _restore_although_cancelled(self) -> None:
        restoring = asyncio.ensure_future(self._restore_or_leave())
        while not restoring.done():
            try:
                await asyncio.shield(restoring)
            except asyncio.CancelledError:
                continue  # asked again to stop: the way back has deadlines of its own
        if (why := restoring.result()) is not None:
            await self.fail(WeightSyncFailed(f"a cancelled publish could not be taken back: {why}. Restart the engines."))

    async def _restore_or_leave(self) -> str | None:
        try:
            return await self._restore()
        except _Deserted:
            return None  # those that join are brought to it

    def _failure(self, version: Version, reason: str, attempts: int, restored: str | None) -> WeightSyncFailed:
        if self._manifest is None:
            back = "It is the first version, so the run does not start."
        elif restored is None:
            back = f"The engines serve {self._manifest.version} again, proven by its canary; resume from the last checkpoint."
        else:
            back = f"The roll-back to {self._manifest.version} is not proven ({restored}): restart the engines, then resume."
        return WeightSyncFailed(f"weights {version} are not served, {attempts} attempts, the last: {reason}. {back}")

    # ------------------------------------------------------------ waiting and asking

    async def _each(self, what: str, ask: Callable[[Engine], Awaitable[T]], *, generated: bool = False) -> dict[int, T]:
        """Ask all engines at once and wait for all; a failure becomes _Rejected and names the engine."""
        return await self._all({i: self._ask(i, what, ask, generated) for i in self._engines})

    async def _all(self, asked: Mapping[int, Awaitable[T]]) -> dict[int, T]:
        """All answers.  Of several failures the one that says something against the weights counts, before an engine that died.

        Engines that have left meanwhile do not count; raises _Deserted when all have.
        """
        answers = await asyncio.gather(*asked.values(), return_exceptions=True)
        results = {i: r for i, r in zip(asked, answers, strict=True) if i in self._engines}
        failures = [r for r in results.values() if isinstance(r, BaseException)]
        if failures:
            raise next((f for f in failures if isinstance(f, _Rejected) and f.generated), failures[0])
        if not results:
            raise _Deserted
        return results  # type: ignore[return-value]  # exceptions are gone

    async def _ask(self, index: int, what: str, ask: Callable[[Engine], Awaitable[T]], generated: bool) -> T:
        limit = self._settings.timeout_s
        try:
            async with asyncio.timeout(limit):
                if (engine := self._engines.get(index)) is None:
                    raise EngineFailed("it has left")
                return await ask(engine)
        except TimeoutError:
            raise _Rejected(f"engine {index} did not answer `{what}` within {limit:g} s", generated=generated) from None
        except EngineFailed as e:  # nothing is said against the weights
            if self._restart is not None and index in self._engines:
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

    async def _peopled(self, version: Version) -> None:
        """Until an engine is there."""
        if self._engines:
            return
        limit, whom = self._settings.timeout_s, "an explorer to join"
        self._waits[id(version)] = f"version {version} waits for {whom}"
        log.info("version %s waits for %s", version, whom)
        try:
            async with asyncio.timeout(limit), self._changed:
                while not self._engines:
                    self._raise_failure()
                    await self._changed.wait()
        except TimeoutError:
            raise DeadlineExceeded(
                f"weights {version} waited {limit:g} s for {whom}, and none is there: start one (mode: explore), or raise "
                "synchronizer.sync_timeout.  The run goes on from its last checkpoint when it is started again"
            ) from None
        finally:
            del self._waits[id(version)]

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


def _held(reports: Sequence[LoadReport], paused_s: float) -> list[Metric]:
    """What a pause of `paused_s` did to the requests under way."""
    held = [r.held for r in reports]
    return [
        Metric("sync/requests_paused", float(sum(h.requests for h in held)), "sum"),
        Metric("sync/requests_aborted", float(sum(h.aborted for h in held)), "sum"),
        Metric("sync/recomputed_tokens", float(sum(h.recomputed_tokens for h in held)), "sum"),
        Metric("sync/lost_tokens", sum(h.tokens_per_s for h in held) * paused_s, "sum"),
    ]


def _some(names: Sequence[Any]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{len(names)} tensors ({', '.join(map(str, names[:3]))}{more})"

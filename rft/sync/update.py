"""One weight update: load a version into the engines, verify that they serve it, and go back to the
one before if they do not.

    update:  pause -> load and check the reports -> resume -> probes, then explorers may begin with
    it -> the trainer scores the probes rolling: drain -> the same -> admit, a few engines after the
    other, while the others serve the version before restore: pause -> load the version before ->
    resume -> compare with its canary record -> admit
    sleep:   pause -> sleep, until one of them; engines that share their GPUs with the trainer

The probes come first because they are short: behind the prompts of a batch or an evaluation they
would wait for all of these.  Engines that have no other work get new work together with the probes,
since eight more rows cost a step of generation next to nothing. In a rolling update an engine takes
requests again only after its canary, so clients meet no weights that are not verified.  What fails
concerns the engines that were touched: the others never stop.  Engines that share CPUs with the
trainer pause while it scores.

A version that is broadcast is loaded in rounds: the trainer sends while the engines receive, and no
side waits for an engine that failed.

Knows the engines, not who explores with them.  Invariant: after `run` or `restore` the engines
serve one whole verified version, or the error says that they do not.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from rft.errors import RftError, WeightSyncFailed
from rft.sync.canary import Canary, Probe, Verdict
from rft.sync.engines import EngineSet, NoEngines, Rejected
from rft.sync.settings import SyncSettings
from rft.types.ids import Version
from rft.types.metrics import Metric
from rft.types.ports import LoadReport, Sender, WeightManifest

log = logging.getLogger(__name__)
# of a packed layer's output, relative to its scale
PROBE_LIMIT = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
Ask = Callable[[int, WeightManifest], Awaitable[LoadReport]]


class Rounds:
    """Loads of versions that are broadcast, numbered.  When a round ends, in whatever way, everyone
    in it has been told.
    """

    def __init__(self, sender: Sender | None, timeout_s: float) -> None:
        self._sender = sender
        self._timeout_s = timeout_s
        self._number = 0

    async def load(
        self, manifest: WeightManifest, engines: Mapping[int, int], ask: Ask
    ) -> dict[int, LoadReport]:
        """The reports of `engines` (with the number of workers of each), each of which is asked by
        `ask`.

        Raises what an engine raised (the first one's), else WeightSyncFailed that says why the
        trainer could not send.
        """
        if self._sender is None or manifest.broadcast is None:
            raise WeightSyncFailed(
                f"version {manifest.version} has to be sent, but no sender was named"
            )
        self._number += 1
        group = replace(
            manifest.broadcast,
            round=self._number,
            engines=tuple(engines),
            workers=tuple(engines.values()),
        )
        sending = asyncio.ensure_future(
            self._send(self._sender, replace(manifest, broadcast=group))
        )
        loading = [
            asyncio.ensure_future(ask(i, replace(manifest, broadcast=replace(group, place=place))))
            for place, i in enumerate(engines)
        ]
        try:
            await self._ended([sending, *loading])
        except asyncio.CancelledError:
            await self._abandon("it was cancelled")
            for task in (sending, *loading):
                task.cancel()
            await asyncio.gather(sending, *loading, return_exceptions=True)
            raise
        # each is asked, since asyncio logs the exceptions that nobody asks for
        error, *unloaded = (task.exception() for task in (sending, *loading))
        if lost := next(filter(None, unloaded), None):
            raise lost
        reports = dict(zip(engines, (task.result() for task in loading), strict=True))
        if error is not None:
            told = "; ".join(f"engine {i}: {r.failed}" for i, r in reports.items() if r.failed)
            raise WeightSyncFailed(f"{error}{f' ({told})' if told else ''}")
        return reports

    async def _ended(self, tasks: list[asyncio.Future[None] | asyncio.Future[LoadReport]]) -> None:
        """All of them; the first that fails ends the meeting of the others."""
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if pending:
            why = next(e for task in done if (e := task.exception()) is not None)
            await self._abandon(str(why))
            await asyncio.wait(pending)

    async def _abandon(self, reason: str) -> None:
        assert self._sender is not None
        try:
            await self._sender.abandon(self._number, reason)
        except RftError as e:  # a trainer that died ends the run by itself; the engines' waits have their own deadlines
            log.warning("round %d could not be given up: %s", self._number, e)

    async def _send(self, sender: Sender, manifest: WeightManifest) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await sender.send(manifest)
        except TimeoutError:
            raise WeightSyncFailed(
                f"the trainer did not send {manifest.version} within {self._timeout_s:g} s"
            ) from None


@dataclass(frozen=True)
class Wave:
    """What the update of engines that load together says.  Times are moments of
    `time.perf_counter`.
    """

    probes: dict[int, Probe]
    reports: tuple[LoadReport, ...]
    verdict: Verdict
    began: float
    drained: float
    paused: float
    loaded: float
    resumed: float
    opened: float  # when explorers could begin
    probed: float
    ended: float


class WeightUpdates:
    """Updates of one set of engines, one at a time; the newest verified version is `manifest`."""

    def __init__(
        self, settings: SyncSettings, engines: EngineSet, canary: Canary, rounds: Rounds
    ) -> None:
        self._settings = settings
        self._engines = engines
        self._canary = canary
        self._rounds = rounds
        self.manifest: WeightManifest | None = None
        self._records: dict[int, Probe] = {}  # canary of `manifest`, by engine
        # engines that may hold other weights than those of `manifest`
        self._touched: set[int] = set()
        self._asleep = False
        # what engines may have written with, besides verified versions
        self.provisional: Version | None = None
        self._proofs: tuple[Probe, ...] = ()  # one of them, kept when all engines have left

    async def run(
        self,
        manifest: WeightManifest,
        resumed: Callable[[], Awaitable[None]],
        *,
        idle: bool = False,
    ) -> list[Wave]:
        """Serve `manifest`; `resumed` is awaited once all engines have answered its probes, or
        together with these where they are `idle`.

        Raises Rejected, NoEngines.
        """
        began = time.perf_counter()
        self._touched |= set(await self._engines.restart_dead())
        waves: list[Wave] = []
        left = list(self._engines.numbers)
        rolling = self._rolls and self.manifest is not None
        while left:
            size = self._settings.at_a_time if rolling else None
            numbers = left[:size]
            left = left[size or len(left) :]
            try:
                opens = resumed if not left and self.manifest is not None else _nothing
                waves.append(await self._wave(manifest, numbers, began, rolling, opens, idle))
            except NoEngines:
                if not self._engines.numbers:
                    raise
            began = time.perf_counter()
        if not waves:
            raise NoEngines
        self.manifest = manifest
        probes = {i: p for wave in waves for i, p in wave.probes.items()}
        self._records = {i: p for i, p in probes.items() if i in self._engines}
        self._proofs = tuple(probes.values())[:1]
        self._touched.clear()
        return waves

    async def _wave(
        self,
        manifest: WeightManifest,
        numbers: Sequence[int],
        began: float,
        rolling: bool,
        opens: Callable[[], Awaitable[None]],
        idle: bool,
    ) -> Wave:
        self._touched |= set(numbers)
        if rolling:
            await self._engines.ask_all("drain", lambda e: e.drain(self._settings.drain_s), numbers)
        drained = time.perf_counter()
        await self._pause(numbers)
        paused = time.perf_counter()
        reports = tuple((await self._load(manifest, numbers)).values())
        loaded = time.perf_counter()
        self.provisional = manifest.version
        await self._resume(numbers)
        at = time.perf_counter()
        probing = self._engines.ask_all(
            "probe", lambda e: self._canary.probe(e, manifest.version), numbers
        )
        probes, _ = await asyncio.gather(probing, opens() if idle else _nothing())
        if not idle:
            await opens()
        probed = time.perf_counter()
        if self._settings.shares_cores:
            await self._pause(numbers, clear=False)
        verdict = await self._verify(probes, numbers)
        if self._settings.shares_cores:
            await self._resume(numbers)
        if rolling:
            await self._engines.ask_all("admit", lambda e: e.admit(), numbers)
        ended = time.perf_counter()
        opened = ended if self.manifest is None else at if idle else probed
        return Wave(
            probes, reports, verdict, began, drained, paused, loaded, at, opened, probed, ended
        )

    @property
    def _rolls(self) -> bool:
        return self._settings.at_a_time is not None

    async def sleep(self, step: int) -> None:
        """The engines give their memory back for train step `step`, until the next load.  Raises
        WeightSyncFailed.
        """
        if self._asleep:
            return
        try:
            await self._pause(self._engines.numbers)
            await self._engines.ask_all("sleep", lambda e: e.sleep())
        except NoEngines:
            log.info("train step %d: every engine has left", step)
        except (
            Rejected
        ) as e:  # a process that died holds no memory, and is restarted with the next version
            if not self._engines.dead:
                raise WeightSyncFailed(
                    f"train step {step} needs the engines' memory, and they do not give it: {e}"
                ) from e
            log.warning("%s; it is restarted with the next weights", e)
        self._asleep = True

    async def sync(self, numbers: Sequence[int], manifest: WeightManifest) -> None:
        """Bring these engines to the verified version `manifest`, and verify that they serve it.
        Raises Rejected, NoEngines.
        """
        await self._pause(numbers)
        await self._load(manifest, numbers)
        await self._resume(numbers)
        probes = await self._engines.ask_all(
            "probe", lambda e: self._canary.probe(e, manifest.version), numbers
        )
        for index, now in probes.items():
            try:
                self._canary.prove_same(
                    now, self._records[index] if index in self._records else self._proofs[0]
                )
            except WeightSyncFailed as e:
                raise Rejected(f"engine {index}: {e}") from e
            self._records.setdefault(index, now)
        if self._rolls:
            await self._engines.ask_all("admit", lambda e: e.admit(), numbers)
        self._touched -= set(numbers)

    async def restore(self) -> str | None:
        """Serve the verified version again.  None, or why that is not verified.  Raises NoEngines."""
        if self.manifest is None:
            return None  # the first version: no task was admitted
        why: str | None = None
        for _ in range(self._settings.retries + 1):  # another engine may die on the way back
            try:
                self._touched |= set(await self._engines.restart_dead())
                if numbers := [i for i in self._engines.numbers if i in self._touched]:
                    await self.sync(numbers, self.manifest)
                return None
            except Rejected as e:
                why = str(e)
                if not self._engines.dead:
                    break
        return why

    # ------------------------------------------------------------ inside

    async def _pause(self, numbers: Sequence[int], *, clear: bool = True) -> None:
        clear = clear and self._settings.kv_cache == "recompute"
        await self._engines.ask_all("pause", lambda e: e.pause(clear_cache=clear), numbers)

    async def _resume(self, numbers: Sequence[int]) -> None:
        await self._engines.ask_all("resume", lambda e: e.resume(), numbers)

    async def _load(
        self, manifest: WeightManifest, numbers: Sequence[int]
    ) -> dict[int, LoadReport]:
        """Load the version; every engine's report is good."""
        self._asleep = False  # to load is to wake

        def ask(index: int, manifest: WeightManifest) -> Awaitable[LoadReport]:
            return self._engines.ask(index, "load", lambda e: e.load(manifest))

        if manifest.broadcast is None:
            reports = await self._engines.gather({i: ask(i, manifest) for i in numbers})
        else:
            try:
                reports = await self._rounds.load(manifest, self._engines.workers(numbers), ask)
            except WeightSyncFailed as e:
                raise Rejected(str(e)) from e
        for i, report in reports.items():
            if why := self._objection(report, manifest):
                raise Rejected(f"engine {i}: {why}")
        return reports

    async def _verify(self, probes: Mapping[int, Probe], numbers: Sequence[int]) -> Verdict:
        before = (
            tuple(p for i, p in self._records.items() if i in numbers and i in self._engines)
            or self._proofs
        )
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                return await self._canary.check(tuple(probes.values()), before, names=tuple(probes))
        except TimeoutError:
            why = f"the trainer did not score the canary within {self._settings.timeout_s:g} s"
            raise Rejected(why) from None
        except WeightSyncFailed as e:
            raise Rejected(str(e)) from e
        except (
            Exception
        ) as e:  # whatever the trainer's side raises, the engines must go back to verified weights
            raise Rejected(
                f"the trainer could not score the canary: {type(e).__name__}: {e}"
            ) from e

    def _objection(self, report: LoadReport, manifest: WeightManifest) -> str:
        limit = PROBE_LIMIT.get(self._settings.engine_dtype, PROBE_LIMIT["bfloat16"])
        if report.failed:
            return report.failed
        if report.bad_hash:
            return f"{_some(report.bad_hash)} arrived damaged (xxh3-128 differs)"
        if report.missing:
            return f"{_some(report.missing)} of the model got no weights"
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


def metrics(manifest: WeightManifest, waves: Sequence[Wave]) -> list[Metric]:
    """The numbers of one update."""
    reports = [r for w in waves for r in w.reports]
    verdict = max((w.verdict for w in waves), key=lambda v: v.error.largest)
    seconds = {
        "stage_s": manifest.stage_s,
        "drain_s": sum(w.drained - w.began for w in waves),
        "pause_s": sum(w.paused - w.drained for w in waves),
        "load_s": sum(w.loaded - w.paused for w in waves),
        "load/meeting_s": max(r.meeting_s for r in reports),
        "load/transfer_s": max(r.transfer_s for r in reports),
        "load/verify_s": max(r.verify_s for r in reports),
        "load/model_s": max(
            r.load_s - r.meeting_s - r.transfer_s - r.verify_s - r.probe_s for r in reports
        ),
        "load/probe_s": max(r.probe_s for r in reports),
        "resume_s": sum(w.resumed - w.loaded for w in waves),
        "opened_s": waves[-1].opened - waves[0].began,
        "canary_s": sum(w.ended - w.resumed for w in waves),
        "canary/score_s": sum(w.ended - w.probed for w in waves),
        "total_s": waves[-1].ended - waves[0].began,
    }
    held = [r.held for r in reports]
    return [
        *(Metric(f"sync/{name}", value, "max") for name, value in seconds.items()),
        Metric("sync/requests_paused", float(sum(h.requests for h in held)), "sum"),
        Metric("sync/requests_aborted", float(sum(h.aborted for h in held)), "sum"),
        Metric("sync/recomputed_tokens", float(sum(h.recomputed_tokens for h in held)), "sum"),
        Metric(
            "sync/lost_tokens",
            sum(
                sum(r.held.tokens_per_s for r in w.reports) * (w.resumed - w.drained) for w in waves
            ),
            "sum",
        ),
        Metric("sync/version", float(manifest.version.step), "last"),
        Metric("sync/attempt", float(manifest.version.attempt), "max"),
        Metric("sync/bytes", float(manifest.nbytes), "last"),
        Metric("sync/moved_bytes", float(max(r.moved_bytes for r in reports)), "max"),
        Metric("sync/probed_layers", float(min(r.probed_layers for r in reports)), "min"),
        Metric("sync/probe_error", max(r.probe_error for r in reports), "max"),
        Metric("sync/canary_max_abs", verdict.error.largest, "max"),
        Metric("sync/canary_limit", verdict.limit.largest, "last"),
        *_short_type_metrics(verdict),
        Metric("sync/canary_moved", verdict.moved, "max"),
        Metric("sync/canary_tokens", float(sum(w.verdict.num_tokens for w in waves)), "last"),
        Metric("sync/below_noise", float(any(w.verdict.below_noise for w in waves)), "sum"),
    ]


def _short_type_metrics(verdict: Verdict) -> list[Metric]:
    if verdict.noise is None:
        return []
    return [
        Metric("sync/canary_mean_abs", verdict.error.mean, "max"),
        Metric("sync/canary_mean_limit", verdict.limit.mean, "last"),
        Metric("sync/canary_noise", verdict.noise.mean, "max"),
    ]


async def _nothing() -> None: ...


def _some(names: Sequence[Any]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{len(names)} tensors ({', '.join(map(str, names[:3]))}{more})"

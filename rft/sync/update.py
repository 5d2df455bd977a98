"""One weight update: load a version into the engines, verify that they serve it, and roll back if
they do not.

    update:   pause -> load and check the reports -> resume -> answer the canary's probes, then
              explorers may begin with the version -> the trainer verifies the answers
    rolling:  drain -> the same -> admit, a few engines at a time,
              while the others serve the previous version
    restore:  pause -> load the previous version -> resume -> compare the probes with its earlier
              ones -> admit
    sleep:    pause -> sleep, until the next update or restore; for engines that share their GPUs
              with the trainer

The probes come first, because they are short: queued behind the prompts of a batch or an evaluation
they would wait for all of these.  Idle engines get new work together with the probes, since these
few rows (`canary_prompts`) hardly slow a generation step.  In a rolling update an engine accepts
requests again only after its canary, so clients never meet unverified weights.  A failure pauses
only the engines being updated.  Engines that share CPUs with the trainer pause while it recomputes
the log-probs of the probes.

A broadcast version is loaded in rounds: the trainer sends while the engines receive, and no side
waits for a failed engine.

Depends on engines, not on their explorers.  Invariant: after `run` or `restore` the engines serve
one complete verified version, or the error says that they do not.
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
from rft.sync.settings import SyncConfig, SyncRuntime
from rft.types.ids import Version
from rft.types.metrics import Metric
from rft.types.ports import LoadReport, Sender, WeightManifest

log = logging.getLogger(__name__)
# allowed error of a fused layer's output, relative to its scale
LAYER_LIMIT = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
Ask = Callable[[int, WeightManifest], Awaitable[LoadReport]]


class Rounds:
    """Numbers the loads of broadcast versions.  If a round fails, all its members stop waiting."""

    def __init__(self, sender: Sender | None, timeout_s: float) -> None:
        self._sender = sender
        self._timeout_s = timeout_s
        self._number = 0

    async def load(
        self, manifest: WeightManifest, engines: Mapping[int, int], ask: Ask
    ) -> dict[int, LoadReport]:
        """Load the version into `engines` (number -> workers) in one round, calling `ask` for each;
        return the reports.

        Raises the first engine's error, else WeightSyncFailed with the reason why the trainer could
        not send.
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
        # read every exception, since asyncio logs unread ones
        error, *unloaded = (task.exception() for task in (sending, *loading))
        if lost := next(filter(None, unloaded), None):
            raise lost
        reports = dict(zip(engines, (task.result() for task in loading), strict=True))
        if error is not None:
            engine_errors = "; ".join(
                f"engine {i}: {r.failed}" for i, r in reports.items() if r.failed
            )
            raise WeightSyncFailed(f"{error}{f' ({engine_errors})' if engine_errors else ''}")
        return reports

    async def _ended(self, tasks: list[asyncio.Future[None] | asyncio.Future[LoadReport]]) -> None:
        """Wait for all tasks; the first failure ends the round for the others."""
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if pending:
            error = next(e for task in done if (e := task.exception()) is not None)
            await self._abandon(str(error))
            await asyncio.wait(pending)

    async def _abandon(self, reason: str) -> None:
        assert self._sender is not None
        try:
            await self._sender.abort_round(self._number, reason)
        except RftError as e:  # engines' waits have deadlines
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
    """Results of engines that load together.  Times are values of `time.perf_counter`."""

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
    """Updates a set of engines, one version at a time; `manifest`: the newest verified version."""

    def __init__(
        self,
        config: SyncConfig,
        runtime: SyncRuntime,
        engines: EngineSet,
        canary: Canary,
        rounds: Rounds,
    ) -> None:
        self._config = config
        self._runtime = runtime
        self._engines = engines
        self._canary = canary
        self._rounds = rounds
        self.manifest: WeightManifest | None = None
        self._probes: dict[int, Probe] = {}  # the canary's probes of `manifest`, by engine
        # one of them, also after all engines have left
        self._first_probe: tuple[Probe, ...] = ()
        # engines whose weights may differ from `manifest`
        self._changed: set[int] = set()
        self._asleep = False
        # unverified version with which engines may have generated
        self.provisional: Version | None = None

    async def run(
        self,
        manifest: WeightManifest,
        on_open: Callable[[], Awaitable[None]],
        *,
        idle: bool = False,
    ) -> list[Wave]:
        """Load the version of `manifest` into all engines and verify it.

        `on_open` is awaited once all engines have answered the probes, or together with the probes
        if the engines are `idle`; never for the first version, which must be verified before work
        begins.  Raises Rejected, NoEngines.
        """
        began = time.perf_counter()
        self._changed |= set(await self._engines.restart_dead())
        waves: list[Wave] = []
        remaining = list(self._engines.numbers)
        rolling = self._rolling and self.manifest is not None
        while remaining:
            size = self._runtime.at_a_time if rolling else None
            numbers = remaining[:size]
            remaining = remaining[size or len(remaining) :]
            try:
                opening = on_open if not remaining and self.manifest is not None else _nothing
                waves.append(await self._wave(manifest, numbers, began, rolling, opening, idle))
            except NoEngines:
                if not self._engines.numbers:
                    raise
            began = time.perf_counter()
        if not waves:
            raise NoEngines
        self.manifest = manifest
        probes = {i: p for wave in waves for i, p in wave.probes.items()}
        self._probes = {i: p for i, p in probes.items() if i in self._engines}
        self._first_probe = tuple(probes.values())[:1]
        self._changed.clear()
        return waves

    async def _wave(
        self,
        manifest: WeightManifest,
        numbers: Sequence[int],
        began: float,
        rolling: bool,
        on_open: Callable[[], Awaitable[None]],
        idle: bool,
    ) -> Wave:
        """Update the engines `numbers` together; `began`: start of the work of this wave."""
        self._changed |= set(numbers)
        if rolling:
            await self._engines.ask_all("drain", lambda e: e.drain(self._runtime.drain_s), numbers)
        drained = time.perf_counter()
        await self._pause(numbers)
        paused = time.perf_counter()
        reports = tuple((await self._load(manifest, numbers)).values())
        loaded = time.perf_counter()
        self.provisional = manifest.version
        await self._resume(numbers)
        resumed = time.perf_counter()
        probing = self._engines.ask_all(
            "probe", lambda e: self._canary.probe(e, manifest.version), numbers
        )
        probes, _ = await asyncio.gather(probing, on_open() if idle else _nothing())
        if not idle:
            await on_open()
        probed = time.perf_counter()
        if self._runtime.shares_cores:
            await self._pause(numbers, clear=False)
        verdict = await self._verify(probes, numbers)
        if self._runtime.shares_cores:
            await self._resume(numbers)
        if rolling:
            await self._engines.ask_all("admit", lambda e: e.admit(), numbers)
        ended = time.perf_counter()
        return Wave(
            probes=probes,
            reports=reports,
            verdict=verdict,
            began=began,
            drained=drained,
            paused=paused,
            loaded=loaded,
            resumed=resumed,
            opened=ended if self.manifest is None else resumed if idle else probed,
            probed=probed,
            ended=ended,
        )

    @property
    def _rolling(self) -> bool:
        return self._runtime.at_a_time is not None

    async def sleep(self, step: int) -> None:
        """Let the engines free their memory for train step `step`, until the next load.

        Raises WeightSyncFailed.
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
        ) as e:  # a dead process has no memory, and is restarted with the next version
            if not self._engines.dead:
                raise WeightSyncFailed(
                    f"train step {step} needs the engines' memory, and they do not give it: {e}"
                ) from e
            log.warning("%s; it is restarted with the next weights", e)
        self._asleep = True

    async def sync(self, numbers: Sequence[int], manifest: WeightManifest) -> None:
        """Load the verified version `manifest` into these engines, and verify that they serve it.

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
                    now, self._probes[index] if index in self._probes else self._first_probe[0]
                )
            except WeightSyncFailed as e:
                raise Rejected(f"engine {index}: {e}") from e
            self._probes.setdefault(index, now)
        if self._rolling:
            await self._engines.ask_all("admit", lambda e: e.admit(), numbers)
        self._changed -= set(numbers)

    async def restore(self) -> str | None:
        """Serve the verified version again; return None, or why it failed.  Raises NoEngines."""
        if self.manifest is None:
            return None  # the first version: no batch has started
        reason: str | None = None
        for _ in range(self._runtime.retries + 1):  # another engine may die during the roll-back
            try:
                self._changed |= set(await self._engines.restart_dead())
                if numbers := [i for i in self._engines.numbers if i in self._changed]:
                    await self.sync(numbers, self.manifest)
                return None
            except Rejected as e:
                reason = str(e)
                if not self._engines.dead:
                    break
        return reason

    # ------------------------------------------------------------ inside

    async def _pause(self, numbers: Sequence[int], *, clear: bool = True) -> None:
        clear = clear and self._config.kv_cache == "recompute"
        await self._engines.ask_all("pause", lambda e: e.pause(clear_cache=clear), numbers)

    async def _resume(self, numbers: Sequence[int]) -> None:
        await self._engines.ask_all("resume", lambda e: e.resume(), numbers)

    async def _load(
        self, manifest: WeightManifest, numbers: Sequence[int]
    ) -> dict[int, LoadReport]:
        """Load the version; return the engines' reports, all valid."""
        self._asleep = False  # a load wakes the engines

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
            if reason := self._objection(report, manifest):
                raise Rejected(f"engine {i}: {reason}")
        return reports

    async def _verify(self, probes: Mapping[int, Probe], numbers: Sequence[int]) -> Verdict:
        before = (
            tuple(p for i, p in self._probes.items() if i in numbers and i in self._engines)
            or self._first_probe
        )
        try:
            async with asyncio.timeout(self._config.sync_timeout):
                return await self._canary.check(tuple(probes.values()), before, names=tuple(probes))
        except TimeoutError:
            reason = f"the trainer did not score the canary within {self._config.sync_timeout:g} s"
            raise Rejected(reason) from None
        except WeightSyncFailed as e:
            raise Rejected(str(e)) from e
        except (
            Exception
        ) as e:  # after any error of the trainer the engines must return to verified weights
            raise Rejected(
                f"the trainer could not score the canary: {type(e).__name__}: {e}"
            ) from e

    def _objection(self, report: LoadReport, manifest: WeightManifest) -> str:
        limit = LAYER_LIMIT.get(self._runtime.engine_dtype, LAYER_LIMIT["bfloat16"])
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
            difference = f"{report.probe_error:.2e}, allowed {limit:.0e}"
            return f"layer {report.probe_worst} computes with other weights than published: {difference}"
        return ""


def metrics(manifest: WeightManifest, waves: Sequence[Wave]) -> list[Metric]:
    """Return the metrics of one update."""
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
    held_requests = [r.paused for r in reports]
    return [
        *(Metric(f"sync/{name}", value, "max") for name, value in seconds.items()),
        Metric("sync/requests_paused", float(sum(h.requests for h in held_requests)), "sum"),
        Metric("sync/requests_aborted", float(sum(h.aborted for h in held_requests)), "sum"),
        Metric(
            "sync/recomputed_tokens", float(sum(h.recomputed_tokens for h in held_requests)), "sum"
        ),
        Metric(
            "sync/lost_tokens",
            sum(
                sum(r.paused.tokens_per_s for r in w.reports) * (w.resumed - w.drained)
                for w in waves
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

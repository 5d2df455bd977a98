"""The training loop: lease a batch, train on it, publish and save if due, log its metrics.

Depends on ranks, checkpoints and the interfaces of the other parts (`rft.types.ports`), not on
tasks, engines or losses.  Offline training publishes nothing.  Invariant: each leased row is
recorded as used or discarded, in the order of the steps, and a checkpoint records exactly the uses
up to its step.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rft.errors import RunFailed
from rft.fault_injection import fault
from rft.monitor.monitor import FILE as METRICS
from rft.sync.base import Transport
from rft.trainer.checkpoint import manifest as manifests
from rft.trainer.checkpoint.checkpoints import BestSteps, Checkpoints
from rft.trainer.checkpoint.manifest import Manifest
from rft.trainer.checkpoint.save_schedule import SaveSchedule
from rft.trainer.loop import token_numbers
from rft.trainer.loop.numbers import step_values
from rft.trainer.loop.offline_reader import HeldOut
from rft.trainer.loop.outlet import Outlet
from rft.trainer.loop.ranks import Ranks
from rft.trainer.loop.step_result import StepResult
from rft.trainer.loop.window import Window
from rft.trainer.rows import batch_builder
from rft.trainer.rows.batch_builder import StepBatch
from rft.trainer.settings import TrainerSettings, WeightSet
from rft.types.ids import Version
from rft.types.metrics import MetricRecord, Role
from rft.types.ports import (
    BufferReader,
    EndOfData,
    Lease,
    MetricSink,
    NeedMore,
    ScoreRow,
    WeightSync,
)
from rft.worker.waiting import works

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Trainer:
    """Trains from `start_step` on."""

    settings: TrainerSettings
    ranks: Ranks
    buffer: BufferReader
    sync: WeightSync | None
    sink: MetricSink
    _: KW_ONLY
    transport: Transport | None
    average: Outlet | None = None  # sends the weights' moving average, a teacher
    lineage: int
    start_step: int
    parent: Version | None  # of the checkpoint that is continued; None: the base model
    must_publish: Callable[[int], bool]
    first_after: Callable[[int], int | None] = lambda step: None  # see `Schedule.first_after`
    on_demand: bool = False  # publish also at the explorer's request, between two steps
    held_out: HeldOut | None = None

    def __post_init__(self) -> None:
        s = self.settings
        folder = s.checkpoint_dir
        best = None
        if s.best_metric is not None:
            best = BestSteps(folder.parent / METRICS, s.best_metric, s.best_mode)
        self._checkpoints = Checkpoints(folder, s.max_checkpoints_to_keep, best)
        self._leases: deque[Lease] = deque()  # leases of the next steps
        self._window = Window()
        self._early_batches = 0  # explore batches begun early because a step lacked rows
        # the checkpoint being written while steps go on
        self._checkpoint: asyncio.Future[Manifest] | None = None
        self._stop = asyncio.Event()
        self._policy: Outlet | None = None
        self._published: Version | None = None
        self._saved_step = None if self.parent is None else self.parent.step
        self._save_schedule = SaveSchedule(s.save_interval, s.save_after_s)
        self._nonfinite = 0  # steps in a row with a non-finite gradient
        self._seconds: dict[str, float] = defaultdict(float)
        self._notes: tuple[str, ...] = ()  # for the metrics of the current step
        self._factors: dict[str, float] = {}  # of the loss terms in the current step

    async def run(self) -> None:
        """Train until `total_steps`, the end of data, or `stop`.

        Raises RunFailed after too many non-finite steps in a row.
        """
        try:
            await self._run()
        finally:  # finish writing a checkpoint even if the run failed
            if self._checkpoint is not None:
                await asyncio.gather(self._checkpoint, return_exceptions=True)

    async def _run(self) -> None:
        """Publish the first weights, then train step by step, then save and publish the last."""
        s = self.settings
        step = self.start_step
        await self._publish(step)
        if self.parent is None:
            await self._evaluate(step)
        while step < s.total_steps:
            began = time.perf_counter()
            self._seconds.clear()
            if self._checkpoint is not None and self._checkpoint.done():
                await self._end_checkpoint()
            if (lease := await self._next(step)) is None:
                break
            step += 1
            fault("trainer.leased")
            batch, report = await self._train(lease)
            publishes = self.must_publish(step)
            if not publishes and self.sync is not None:  # then an explorer may request the weights
                publishes = await self.sync.step_finished(step)
            if publishes:
                await self._publish(step)
            if step < s.total_steps and s.eval_interval and step % s.eval_interval == 0:
                await self._evaluate(step)
            self._save_schedule.trained(step)
            if step < s.total_steps:
                await self._save_if_due()
            await self._log(step, batch, report, lease, time.perf_counter() - began)
            if self._nonfinite >= s.max_nonfinite_steps:
                await self._save(step, export=False)
                raise RunFailed(
                    f"the last {self._nonfinite} train steps, up to step {step}, had a gradient "
                    f"that is not finite and changed no weights.  A checkpoint of step {step} is "
                    f"saved.  Lower the learning rate or look at the rows of these steps"
                )
        if step >= s.total_steps or not self._stop.is_set():
            await self._finish(step)
        elif self._saved_step != step:
            await self._save(step, export=False)
        await self._end_checkpoint()

    async def stop(self) -> None:
        """End after the current step, with a checkpoint; a wait for data ends at once."""
        self._stop.set()

    async def score(
        self, rows: Sequence[ScoreRow], weights: WeightSet = "current"
    ) -> list[np.ndarray]:
        """Return log-probs, see `ports.Scorer`; the synchronizer calls it outside of steps."""
        return await self.ranks.score(rows, weights)

    # ------------------------------------------------------------ one step

    async def _next(self, done: int) -> Lease | None:
        """Return the lease of step `done` + 1, None at the end of data or after `stop`.

        The rows of `require_batches` steps are leased at once.
        """
        if not self._leases:
            count = self.settings.require_batches
            last = min(done - done % count + count, self.settings.total_steps)
            for step in range(done + 1, last + 1):
                if (lease := await self._wait_for_lease(step)) is None:
                    break
                self._leases.append(lease)
        if not self._leases or self._stop.is_set():
            return None
        if self.sync is not None:
            await self.sync.step_started(done + 1)
        return self._leases.popleft()

    async def _wait_for_lease(self, step: int) -> Lease | None:
        """Wait for the lease of `step`; return None at the end of data or after `stop`."""
        with self._timed("wait"):
            lease = asyncio.ensure_future(self._request_lease(step))
            stop = asyncio.ensure_future(self._stop.wait())
            try:
                await self._wait(lease, stop, step - 1)
                return lease.result() if lease.done() and not stop.done() else None
            except EndOfData as e:
                log.info("end of data before step %d: %s", step, e)
                return None
            finally:
                await _cancel(lease, stop)

    async def _wait(self, lease: asyncio.Future[Any], stop: asyncio.Future[Any], step: int) -> None:
        """Wait for `lease` or `stop`; meanwhile save if due, and publish `step` if an explorer
        requests it.
        """
        requests: list[asyncio.Future[bool]] = []  # at most one
        try:
            while not lease.done() and not stop.done():
                if self.on_demand and self.sync is not None and not requests:
                    requests = [asyncio.ensure_future(self.sync.wait_for_demand(step))]
                await asyncio.wait(
                    {lease, stop, *requests},
                    timeout=self._save_schedule.left_s,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                began = time.perf_counter()
                await self._save_if_due()
                answered = requests and requests[0].done() and not lease.done()
                if answered and requests.pop().result():
                    await self._publish(step)
                # publishing and saving are `sync` and `checkpoint` time, not `wait`
                self._seconds["wait"] -= time.perf_counter() - began
        finally:
            await _cancel(*requests)

    async def _request_lease(self, step: int) -> Lease:
        """Lease the rows of `step`; request a later batch if only that can supply missing rows."""
        s = self.settings
        first = self.first_after(step)
        while True:
            try:
                return await self.buffer.lease(
                    step,
                    groups=s.batch_groups,
                    rows=s.batch_rows,
                    deadline_s=s.read_deadline_s,
                    max_staleness=s.max_staleness,
                    until=None if first is None else first + self._early_batches,
                )
            except NeedMore as e:
                if self.sync is None:  # without an explorer
                    raise
                await self.sync.allow_batch(e.batch)
                self._early_batches = max(self._early_batches, e.batch + 1 - (first or 0))

    async def _train(self, lease: Lease) -> tuple[StepBatch, StepResult | None]:
        """Train on the lease and record its rows as used or discarded; the result is None if the
        loss has no token.
        """
        ranks = self.ranks
        needs = ranks.algorithm.needs
        report = None
        logprobs = None
        with self._timed("train"), works(f"train step {lease.step}"):
            decoded = batch_builder.decode_lease(
                lease,
                samples=needs.samples,
                pairs=needs.pairs,
                any_sampling=needs.any_sampling,
                teacher_top=needs.teacher_top,
            )
            if self.sync is not None:
                self._window.rows(decoded.experiences)
            else:  # without engines there is no canary, so compare the log-probs here
                self._notes = await ranks.check_rows(decoded.rows)
            with self._timed("train/before"):
                computed = await ranks.prepare(decoded.rows)
            with self._timed("train/advantages"):
                batch = batch_builder.build_step(
                    decoded,
                    ranks.algorithm,
                    ranks.budget,
                    world_size=ranks.world_size,
                    computed=computed,
                    seed=ranks.settings.seed,
                    critic_budget=ranks.critic_budget,
                    factors=ranks.factors,
                )
            self._factors = ranks.factors
            if batch.tokens:
                report, logprobs = await token_numbers.train_step(ranks, decoded, batch)
        if report is None:
            rejected = "step %d is skipped: the algorithm rejected every token of its %d rows"
            log.warning(rejected, lease.step, len(decoded.rows))
            await self.buffer.discard(lease.step, "rejected")
            return batch, None
        self._nonfinite = self._nonfinite + 1 if (nonfinite := report.nonfinite) else 0
        if nonfinite is not None:
            what = "critic" if nonfinite is report.critic else "policy"
            norm = nonfinite.grad_norm
            log.warning(
                "step %d: gradient norm %s, so the %s keeps its weights", lease.step, norm, what
            )
        if report.finite:
            ranks.update_controllers(batch.kl, report, batch.rows, batch.tokens)
            await self.buffer.use(lease.step, logprobs)
            fault("trainer.used")
        else:
            await self.buffer.discard(lease.step, "nonfinite")
        return batch, report

    async def _publish(self, step: int) -> None:
        """Stage the weights and wait until every engine serves them; then let the ranks remember
        them as the proximal policy.  Without engines the ranks only remember them.
        """
        if self.sync is not None and self.transport is not None:
            self._policy = self._policy or Outlet(self.transport, self.sync.publish)
            version = Version(self.lineage, step)
            with self._timed("sync"), works(f"the weights of step {step} go to the engines"):
                if self.average is not None:  # first: it teaches the next version's rows
                    await self.average.send(self.ranks, version)
                await self._policy.send(self.ranks, version)
            self._published = version
            self._window.publish(step)
            fault("trainer.published")
        await self.ranks.remember()

    async def _save_if_due(self) -> None:
        """Save if the schedule says so; with `async_save` steps go on meanwhile."""
        if self._save_schedule.due:
            export = self.settings.save_hf_checkpoint == "always"
            wait = export or not self.settings.async_save
            await self._save(self._save_schedule.step, export=export, wait=wait)

    async def _save(self, step: int, *, export: bool, wait: bool = True) -> None:
        """Commit a checkpoint of `step`; without `wait`, write it while steps go on, one at a time."""
        with self._timed("checkpoint"), works(f"saving the checkpoint of step {step}"):
            await self._end_checkpoint()
            consumption = await self.buffer.consumption(step)
            await self.ranks.take(step, copy=not wait)
            fault("checkpoint.taken")

            async def fill(folder: Path) -> dict[str, str]:
                hashes = await self.ranks.write(folder / "trainer")
                # without "model" only the export contains the weights
                if export or "model" not in self.ranks.settings.save_contents:
                    await self.ranks.export(folder / "huggingface")
                return {f"trainer/{name}": digest for name, digest in hashes.items()}

            version = Version(self.lineage, step)
            self._checkpoint = asyncio.ensure_future(
                self._checkpoints.save(version, self.parent, consumption, fill)
            )
            self._saved_step = step
            self._save_schedule.saved()
            if wait:
                await self._end_checkpoint()

    async def _end_checkpoint(self) -> None:
        """Wait until the checkpoint being written is committed; raise its error."""
        checkpoint = self._checkpoint
        self._checkpoint = None
        if checkpoint is not None:
            log.info("checkpoint of step %d committed", (await checkpoint).version.step)

    async def _finish(self, step: int) -> None:
        """Publish the last weights, save and export them, and announce the end."""
        if self._published != Version(self.lineage, step):
            await self._publish(step)
        await self._evaluate(step)
        await self._end_checkpoint()
        export = self.settings.save_hf_checkpoint != "never"
        folder = self.settings.checkpoint_dir / manifests.folder_name(step)
        if self._saved_step != step or (export and not (folder / "huggingface").is_dir()):
            await self._save(step, export=export)
        if self.sync is not None:
            await self.sync.step_finished(step, finished=True)

    # ------------------------------------------------------------ numbers

    async def _evaluate(self, step: int) -> None:
        """Log the loss on held-out rows after `step`."""
        if self.held_out is not None:
            with works("evaluating the held-out rows"):
                values = await self.held_out.evaluate(self.ranks)
            await self._emit("eval", step, values)

    async def _log(
        self, step: int, batch: StepBatch, report: StepResult | None, lease: Lease, seconds: float
    ) -> None:
        values = {
            "experience/available": float(lease.available_after),
            "experience/missing": float(lease.missing),
        }
        values |= step_values(batch, report, self._factors, seconds, self._seconds)
        if self.sync is not None:
            self._window.step(self._seconds["wait"], seconds)
            values |= self._window.closed()
        await self._emit("trainer", step, values, self._notes)

    async def _emit(
        self, role: Role, step: int, values: dict[str, float], notes: tuple[str, ...] = ()
    ) -> None:
        record = MetricRecord(role=role, step=step, values=values, notes=notes)
        await self.sink.log(record)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] += time.perf_counter() - began


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

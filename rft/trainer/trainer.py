"""The training loop: lease a batch, train on it, publish if due, checkpoint if due, say what
happened.

Knows ports, ranks and checkpoints; not tasks, engines or losses.  With offline data
(`rft.trainer.offline_reader`) nothing is published. Invariant: leased rows are used or explained
step by step, in order, and a checkpoint counts exactly the uses up to its step.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from rft.errors import RunFailed, WeightSyncFailed
from rft.fault_injection import fault
from rft.monitor.monitor import FILE as METRICS
from rft.sync.base import Transport
from rft.trainer import batch_builder, kept_logprobs
from rft.trainer import manifest as manifests
from rft.trainer.batch_builder import StepBatch
from rft.trainer.checkpoints import BestSteps, Checkpoints
from rft.trainer.manifest import Manifest
from rft.trainer.numbers import step_values
from rft.trainer.offline_reader import HeldOut
from rft.trainer.ranks import Ranks
from rft.trainer.save_schedule import SaveSchedule
from rft.trainer.settings import TrainerSettings
from rft.trainer.step_result import StepResult
from rft.trainer.window import Window
from rft.types.ids import Version
from rft.types.metrics import MetricRecord
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


class Trainer:
    """Trains from `start_step` on.  `parent` is the checkpoint's version this lineage goes on from;
    None: the base model.
    """

    def __init__(
        self,
        settings: TrainerSettings,
        ranks: Ranks,
        buffer: BufferReader,
        sync: WeightSync | None,
        sink: MetricSink,
        *,
        transport: Transport | None,
        lineage: int,
        start_step: int,
        parent: Version | None,
        must_publish: Callable[[int], bool],
        first_after: Callable[[int], int | None] | None = None,
        on_demand: bool = False,
        held_out: HeldOut | None = None,
    ) -> None:
        """`on_demand`: weights are also published when the explorer asks, between two steps."""
        self.settings = settings
        self._ranks = ranks
        self._buffer = buffer
        self._sync = sync
        self._sink = sink
        self._transport = transport
        self._lineage = lineage
        self._start = start_step
        self._parent = parent
        self._must_publish = must_publish
        self._on_demand = on_demand
        self._first_after = first_after
        self._held_out = held_out
        self._taken: deque[Lease] = deque()  # of the steps that come next
        self._window = Window()
        self._ahead = 0  # explore batches that steps which lacked rows took beyond their own
        folder = settings.checkpoint_dir
        metric = settings.best_metric
        mode = settings.best_mode
        best = None if metric is None else BestSteps(folder.parent / METRICS, metric, mode)
        self._checkpoints = Checkpoints(folder, keep=settings.max_checkpoints_to_keep, beside=best)
        # a checkpoint that is written while steps go on
        self._writing: asyncio.Future[Manifest] | None = None
        self._stop = asyncio.Event()
        self._published: Version | None = None
        self._saved: int | None = parent.step if parent is not None else None
        self._due = SaveSchedule(settings.save_interval, settings.save_after_s)
        self._nonfinite = 0
        self._seconds: dict[str, float] = {}
        self._notes: tuple[str, ...] = ()  # of the step
        self._kl_coefs: dict[str, float] = {}  # of the current step

    async def run(self) -> None:
        """Until `total_steps`, the end of data, or `stop`.  Raises RunFailed after too many
        non-finite steps in a row.
        """
        try:
            await self._run()
        finally:  # what is being written is finished even where the run failed
            if self._writing is not None:
                await asyncio.gather(self._writing, return_exceptions=True)

    async def _run(self) -> None:
        await self._publish(self._start)
        if self._parent is None:
            await self._evaluate(self._start)
        step = self._start
        whole = True
        while step < self.settings.total_steps:
            began = time.perf_counter()
            self._seconds = {}
            if self._writing is not None and self._writing.done():
                await self._written()
            lease = await self._next(step)
            if lease is None:
                whole = not self._stop.is_set()
                break
            step += 1
            fault("trainer.leased")
            batch, report = await self._train(lease)
            if self._must_publish(step) or (
                self._sync is not None and await self._sync.step_finished(step)
            ):
                await self._publish(step)
            if (
                step < self.settings.total_steps
                and self.settings.eval_interval
                and step % self.settings.eval_interval == 0
            ):
                await self._evaluate(step)
            self._due.trained(step)
            if step < self.settings.total_steps:
                await self._save_if_due()
            await self._log(step, batch, report, lease, time.perf_counter() - began)
            if self._nonfinite >= self.settings.max_nonfinite_steps:
                await self._save(step, export=False)
                raise RunFailed(
                    f"{self._nonfinite} train steps in a row, the last being {step}, had a "
                    f"gradient that is not finite, which changes no "
                    f"weights.  A checkpoint of step {step} is saved.  Lower the learning rate or "
                    f"look at the rows of these steps"
                )
        if whole:
            await self._finish(step)
        elif self._saved != step:
            await self._save(step, export=False)
        await self._written()

    async def stop(self) -> None:
        """End after the current step, with a checkpoint; a wait for data ends at once."""
        self._stop.set()

    async def score(self, rows: Sequence[ScoreRow]) -> list[np.ndarray]:
        """See `ports.Scorer`: the synchronizer asks while it publishes, when nothing trains."""
        return await self._ranks.score(rows)

    # ------------------------------------------------------------ one step

    async def _next(self, step: int) -> Lease | None:
        """The rows of the step after `step`, once those of `require_batches` steps are there; None
        when no more come or to stop.
        """
        if not self._taken:
            together = self.settings.require_batches
            for later in range(
                step + 1, min(step - step % together + together, self.settings.total_steps) + 1
            ):
                if (lease := await self._lease(later)) is None:
                    break
                self._taken.append(lease)
        if not self._taken or self._stop.is_set():
            return None
        if self._sync is not None:
            await self._sync.step_started(step + 1)
        return self._taken.popleft()

    async def _lease(self, step: int) -> Lease | None:
        """The rows of `step`; None when no more come or a stop was asked for."""
        with self._timed("wait"):
            lease = asyncio.ensure_future(self._read(step))
            stop = asyncio.ensure_future(self._stop.wait())
            try:
                await self._wait(lease, stop, step - 1)
                return lease.result() if lease.done() and not stop.done() else None
            except EndOfData as e:
                log.info("end of data before step %d: %s", step, e)
                return None
            finally:
                for task in (lease, stop):
                    task.cancel()
                await asyncio.gather(lease, stop, return_exceptions=True)

    async def _wait(self, lease: asyncio.Future[Any], stop: asyncio.Future[Any], step: int) -> None:
        """Until one of the two is there; the weights of `step` are published meanwhile when the
        explorer asks for them.
        """
        wanted: asyncio.Future[Any] | None = None
        try:
            while not lease.done() and not stop.done():
                if self._on_demand and self._sync is not None and wanted is None:
                    wanted = asyncio.ensure_future(self._sync.wait_for_demand(step))
                waited = {lease, stop, *([] if wanted is None else [wanted])}
                await asyncio.wait(
                    waited, timeout=self._due.left_s, return_when=asyncio.FIRST_COMPLETED
                )
                began = time.perf_counter()
                await self._save_if_due()
                if wanted is not None and wanted.done() and not lease.done():
                    asked = wanted.result()
                    wanted = None
                    if asked:
                        await self._publish(step)
                self._seconds["wait"] = self._seconds.get("wait", 0.0) - (
                    time.perf_counter() - began
                )  # it is `sync`, `checkpoint`
        finally:
            if wanted is not None:
                wanted.cancel()
                await asyncio.gather(wanted, return_exceptions=True)

    async def _read(self, step: int) -> Lease:
        """The lease of `step`.  Where rows are missing that only a later batch can give, that batch
        is asked for.
        """
        s = self.settings
        first = None if self._first_after is None else self._first_after(step)
        while True:
            try:
                return await self._buffer.lease(
                    step,
                    groups=s.batch_groups,
                    rows=s.batch_rows,
                    deadline_s=s.read_deadline_s,
                    max_staleness=s.max_staleness,
                    until=None if first is None else first + self._ahead,
                )
            except NeedMore as e:
                if self._sync is None:  # there is no explorer to ask
                    raise
                await self._sync.allow_batch(e.batch)
                self._ahead = max(self._ahead, e.batch + 1 - (first or 0))

    async def _train(self, lease: Lease) -> tuple[StepBatch, StepResult | None]:
        """Train on the lease and account for its rows.  No report: none of its tokens counts, and
        nothing was done.
        """
        ranks = self._ranks
        needs = self._ranks.algorithm.needs
        report = None
        kept = None
        with self._timed("train"), works(f"train step {lease.step}"):
            given = batch_builder.read(
                lease, samples=needs.samples, pairs=needs.pairs, any_sampling=needs.any_sampling
            )
            if self._sync is not None:
                self._window.rows(given.experiences)
            else:  # no canary looks at this run
                self._notes = await ranks.check_rows(given.rows)
            with self._timed("train/before"):
                computed = await ranks.prepare(given.rows)
            with self._timed("train/advantages"):
                batch = batch_builder.make(
                    given,
                    ranks.algorithm,
                    ranks.budget,
                    world_size=ranks.world_size,
                    computed=computed,
                    seed=ranks.settings.seed,
                    critic_budget=ranks.critic_budget,
                    kl_coefs=ranks.kl_coefs,
                )
            self._kl_coefs = ranks.kl_coefs
            if batch.tokens:
                report, kept = await kept_logprobs.step(ranks, given, batch)
        if report is None:
            log.warning(
                "step %d: the algorithm rejects all tokens of its %d rows, so it is skipped",
                lease.step,
                len(given.rows),
            )
            await self._buffer.discard(lease.step, "rejected")
            return batch, None
        self._nonfinite = self._nonfinite + 1 if (stuck := report.stuck) else 0
        if stuck is not None:
            who = "critic" if stuck is report.critic else "policy"
            log.warning(
                "step %d: gradient norm is %s; the %s learns nothing from it",
                lease.step,
                stuck.grad_norm,
                who,
            )
        if report.finite:
            ranks.steer(batch.kl, report, batch.rows, batch.tokens)
            await self._buffer.use(lease.step, kept)
            fault("trainer.used")
        else:
            await self._buffer.discard(lease.step, "nonfinite")
        return batch, report

    async def _publish(self, step: int) -> None:
        """Stage the weights and wait until every engine serves them; where there are none, they
        begin a window all the same.
        """
        if self._sync is None or self._transport is None:
            return await self._ranks.remember()
        version = Version(self._lineage, step)
        before = self._published
        with self._timed("sync"), works(f"the weights of step {step} go to the engines"):
            manifest = await self._ranks.stage(version, self._transport)
            fault("trainer.staged")
            try:
                await self._sync.publish(manifest)
            except WeightSyncFailed:
                self._transport.release(version)
                raise
        if before is not None:
            self._transport.release(before)
        self._published = version
        self._window.publish(step)
        fault("trainer.published")
        return await self._ranks.remember()

    async def _save_if_due(self) -> None:
        """Before the last step; written while steps go on, where that is wanted."""
        if self._due.due:
            export = self.settings.save_hf_checkpoint == "always"
            await self._save(
                self._due.step, export=export, wait=export or not self.settings.async_save
            )

    async def _save(self, step: int, *, export: bool, wait: bool = True) -> None:
        """Commit a checkpoint of `step`.  Without `wait` it is written while steps go on, one at a
        time.
        """
        with self._timed("checkpoint"), works(f"saving the checkpoint of step {step}"):
            await self._written()
            consumption = await self._buffer.consumption(step)
            await self._ranks.take(step, copy=not wait)
            fault("checkpoint.taken")

            async def fill(folder: Path) -> dict[str, str]:
                hashes = await self._ranks.write(folder / "trainer")
                # then the weights are in that folder alone
                if export or "model" not in self._ranks.settings.save_contents:
                    await self._ranks.export(folder / "huggingface")
                return {f"trainer/{name}": digest for name, digest in hashes.items()}

            self._writing = asyncio.ensure_future(
                self._checkpoints.save(
                    Version(self._lineage, step), self._parent, consumption, fill
                )
            )
            self._saved = step
            self._due.saved()
            if wait:
                await self._written()

    async def _written(self) -> None:
        """Wait until the checkpoint that is being written, if any, is committed; raises what went
        wrong with it.
        """
        writing = self._writing
        self._writing = None
        if writing is not None:
            log.info("checkpoint of step %d committed", (await writing).version.step)

    async def _finish(self, step: int) -> None:
        """Training is over: publish the last weights, save and, if wanted, export them; then
        announce the end.
        """
        if self._published != Version(self._lineage, step):
            await self._publish(step)
        await self._evaluate(step)
        await self._written()
        export = self.settings.save_hf_checkpoint != "never"
        exported = (
            self.settings.checkpoint_dir / manifests.folder_name(step) / "huggingface"
        ).is_dir()
        if self._saved != step or (export and not exported):
            await self._save(step, export=export)
        if self._sync is not None:
            await self._sync.step_finished(step, finished=True)

    # ------------------------------------------------------------ numbers

    async def _evaluate(self, step: int) -> None:
        """The loss on held-out rows after `step`."""
        if self._held_out is not None:
            with works("evaluating the held-out rows"):
                values = await self._held_out.evaluate(self._ranks)
            await self._sink.log(
                MetricRecord(role="eval", step=step, time=time.time(), values=values)
            )

    async def _log(
        self, step: int, batch: StepBatch, report: StepResult | None, lease: Lease, seconds: float
    ) -> None:
        values = {
            "experience/available": float(lease.available_after),
            "experience/missing": float(lease.missing),
        }
        values |= step_values(batch, report, self._kl_coefs, seconds, self._seconds)
        if self._sync is not None:
            self._window.step(self._seconds.get("wait", 0.0), seconds)
            values |= self._window.closed()
        await self._sink.log(
            MetricRecord(
                role="trainer", step=step, time=time.time(), values=values, notes=self._notes
            )
        )

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - began

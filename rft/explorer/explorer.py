"""The exploring loop: tasks into runs, runs into the buffer, evaluation in between.  Knows neither trainer nor algorithm.

    may explore b? ─> evaluate if due ─> room? ─> groups of b play ─> version proven? ─> operators ─> append ─> close b ─> explored b
                                                     └ rejected: the next candidate, until the refills are used up

Invariant: a batch is closed after all its groups are appended, and batches are closed in ascending order.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from rft.buffer.operators.pipeline import OperatorFailed, Pipeline
from rft.buffer.operators.settings import ROLLOUT_MODEL
from rft.errors import ConfigError, FrameRejected, RftError, ShortBatch
from rft.explorer.evaluate import eval_metrics, play_taskset, sample_rows
from rft.explorer.metrics import pipeline_metrics, rollout_metrics
from rft.explorer.settings import ExplorerSettings
from rft.explorer.state import Batch, Breaker
from rft.plugins import load_all
from rft.reward import pool
from rft.taskset.base import open_taskset
from rft.taskset.order import Order, evaluation_order
from rft.types.block import encode
from rft.types.ids import GroupId, Version
from rft.types.metrics import Metric, MetricRecord, Role
from rft.types.ports import BufferWriter, ChatModel, ExploreGate, HeldGroup, MetricSink, TaskOutcome
from rft.types.task import Task
from rft.workflow.base import NO_MODELS
from rft.workflow.build import Recipes
from rft.workflow.group import Group, judge, run_group
from rft.workflow.run import Limits
from rft.workflow.seeds import seed_for

log = logging.getLogger(__name__)


class Explorer:
    """Plays explore batches from `cursor` on, under weights of `lineage`."""

    def __init__(
        self,
        settings: ExplorerSettings,
        *,
        model: ChatModel,
        buffer: BufferWriter,
        gate: ExploreGate,
        sink: MetricSink,
        lineage: int,
        cursor: int = 0,
        models: Mapping[str, ChatModel] = NO_MODELS,
    ) -> None:
        """Opens the tasksets and finds every workflow and reward they name.  Raises ConfigError, PluginError."""
        load_all(settings.plugin_dirs)
        self.settings = settings
        self._model, self._buffer, self._gate, self._sink = model, buffer, gate, sink
        self._lineage, self._cursor, self._models = lineage, cursor, models
        self.order = Order(
            [open_taskset(t) for t in settings.tasksets], settings.batch_size, settings.seed, lag=settings.feedback_lag
        )
        self._eval_tasksets = {t: evaluation_order(t) for t in map(open_taskset, settings.eval_tasksets)}
        self._pipeline = Pipeline(settings.pipeline, judge, settings.max_timeout_s)
        self._recipes = Recipes()
        for taskset in (*self.order.tasksets, *self._eval_tasksets):
            self._recipes.of(taskset.task(0))
        self.num_batches = settings.total_batches
        if self.num_batches is None and settings.total_epochs is not None:
            self.num_batches = self.order.num_batches(settings.total_epochs)
        if settings.on_short_batch not in ("stop", "train", "carry"):
            raise ConfigError(f"{settings.on_short_batch!r} is not known; use stop, train or carry", key="buffer.on_short_batch")
        self._max_refill = 3 * settings.batch_size if settings.max_refill is None else settings.max_refill
        self._limits = Limits(settings.max_timeout_s, settings.max_retry_times)
        self._slots = asyncio.Semaphore(settings.max_concurrent_runs)
        self._breaker = Breaker(settings.breaker)
        self._served: set[Version] = set()
        self._under_way: dict[int, asyncio.Event] = {}  # where a selector learns: set when the batch is closed
        self._main: asyncio.Task[None] | None = None
        self._stopping = False

    async def run(self) -> None:
        """Explores until the tasks are used up or the trainer is finished, then evaluates the final weights.

        Raises RunFailed (breaker, short batch, all of an evaluation failed) and what engine, gate and buffer raise.
        """
        if self._stopping:
            return
        self._main = asyncio.ensure_future(self._run())
        try:
            await asyncio.shield(self._main)
        except asyncio.CancelledError:
            if not self._stopping:
                self._main.cancel()
                await asyncio.wait({self._main})
                raise
        finally:
            await asyncio.to_thread(pool.close_all)

    async def stop(self) -> None:
        """Ends `run` early.  Groups in flight are given up; they are not in the buffer, so a resumed run plays them again."""
        self._stopping = True
        if self._main is not None:
            self._main.cancel()
            await asyncio.wait({self._main})

    async def _run(self) -> None:
        try:
            await self._recipes.prepare(self._models)
            await self._pipeline.prepare({**self._models, ROLLOUT_MODEL: self._model})
            reason = await self._explore()
        except BaseException as error:
            for close in (self._pipeline.close, self._recipes.close):
                try:
                    await close()
                except RftError as e:
                    log.error("while closing: %s", e)
            if isinstance(error, BaseExceptionGroup):
                raise _first(error) from None
            raise
        await self._pipeline.close()
        await self._buffer.finish(reason)
        version = await self._gate.final()
        if self.settings.eval_at_end:
            await self._evaluate(version)
        await self._recipes.close()

    async def _explore(self) -> str:
        """The loop.  Returns why it ended."""
        held: defaultdict[int, list[HeldGroup]] = defaultdict(list)
        for group in await self._buffer.held(self._cursor):
            held[group.batch].append(group)
        await self._buffer.same_tasksets({t.settings.name: t.fingerprint for t in self.order.tasksets})
        before = asyncio.Event()
        before.set()
        async with asyncio.TaskGroup() as tasks:
            for b in itertools.count(self._cursor):
                if self.num_batches is not None and b >= self.num_batches:
                    return f"all {self.num_batches} explore batches are in the buffer"
                if (version := await self._gate.may_explore(b)) is None:
                    return "the trainer is finished"
                if self._eval_due(b):
                    await self._evaluate(version)
                await self._buffer.room(b)
                await self._learn(b)
                batch = Batch(b, self.settings.batch_size, self._max_refill, held.pop(b, ()))
                tasks.create_task(self._explore_batch(batch, before))
                before = batch.closed
                if self.order.learns:
                    self._under_way[b] = before
                await batch.submitted.wait()
        raise AssertionError("unreachable")

    async def _learn(self, b: int) -> None:
        """Selectors that learn hear, from the buffer alone, of every batch that the choice of batch `b` depends on."""
        first, end = self.order.learned, self.order.horizon(b)
        if first >= end:
            return
        for n in [n for n in self._under_way if n < end]:
            await self._under_way.pop(n).wait()
        found: defaultdict[int, list[TaskOutcome]] = defaultdict(list)
        for outcome in await self._buffer.outcomes(first, end):
            found[outcome.batch].append(outcome)
        for n in range(first, end):
            self.order.learn(n, found[n])

    async def _explore_batch(self, batch: Batch, before: asyncio.Event) -> None:
        """Fills the places of one batch, waits for the batch before it, closes it and reports."""
        tasks = self.order.batch(batch.number)
        numbers = [batch.first(place) for place in range(batch.size)]
        batch.expect(sum(self._task(batch, tasks, n).num_runs for n in numbers if n is not None))
        async with asyncio.TaskGroup() as places:
            for number in numbers:
                if number is not None:
                    places.create_task(self._fill(batch, tasks, number))
        await before.wait()
        await self._buffer.close_batch(batch.number, accepted=batch.accepted, wanted=batch.size, reasons=dict(batch.reasons))
        if batch.accepted < batch.size and self.settings.on_short_batch == "stop":
            raise ShortBatch(self._short(batch))
        await self._gate.explored(batch.number)
        values = rollout_metrics(batch.played, batch.wall_s) | pipeline_metrics(batch.pipeline)
        values |= {f"reward/{k}": float(v) for k, v in pool.counts().items()}
        await self._log("explorer", batch.number + 1, values)
        batch.closed.set()

    async def _fill(self, batch: Batch, tasks: list[Task], number: int | None) -> None:
        """Plays candidates for one place until one is accepted or the refills are used up.  Each group is appended once."""
        first = True
        while number is not None:
            played = await self._play(batch, self._task(batch, tasks, number), number, first)
            first = False
            for version in played.versions:
                if version not in self._served:
                    await self._gate.served(version)
                    self._served.add(version)
            processed = await self._process(batch, played) if self._pipeline.active else played
            began = time.monotonic()
            group = await self._store(processed)
            if self._pipeline.active:
                batch.pipeline += [Metric(f"time/{name}", time.monotonic() - began, "sum") for name in ("write", "total")]
            batch.add(group, played if group is processed else group)
            self._breaker.see(group)
            number = None if group.accepted else batch.after(number)

    async def _process(self, batch: Batch, played: Group) -> Group:
        """The group after the operators.  One that an operator cannot handle becomes failed runs, with the traceback."""
        try:
            done = await self._pipeline.process(played.task, played.rows)
        except OperatorFailed as e:
            log.warning("group %s: %s", played.id, e)
            batch.pipeline.append(Metric("failed_count", len(played.rows), "sum"))
            return played.refused(str(e), reason="operator", traceback=e.traceback)
        batch.pipeline += done.metrics
        return played.after(done.rows, accepted=done.accepted, reason=done.reason)

    async def _store(self, group: Group) -> Group:
        """Appends the group.  One that the buffer refuses (too large, no token) is stored as failed runs instead."""
        try:
            await self._buffer.append(encode(group.rows), accepted=group.accepted, reason=group.reason)
        except FrameRejected as e:
            log.warning("group %s: %s", group.id, e)
            group = group.refused(f"rejected by the buffer: {e}")
            await self._buffer.append(encode(group.rows), accepted=False, reason=group.reason)
        return group

    async def _play(self, batch: Batch, task: Task, number: int, first: bool) -> Group:
        @asynccontextmanager
        async def slot() -> AsyncIterator[None]:
            async with self._slots:
                if first:
                    batch.begun()
                yield

        s = self.settings
        return await run_group(
            task,
            await self._recipes.get(task),
            self._model,
            GroupId(self._lineage, s.index, batch.number, number),
            limits=self._limits,
            slot=slot,
            seed=(lambda run: seed_for(s.seed, batch.number, number, run)) if s.deterministic else None,
            models=self._models,
        )

    def _task(self, batch: Batch, tasks: list[Task], number: int) -> Task:
        return tasks[number] if number < batch.size else self.order.spare(batch.number, number - batch.size)

    def _eval_due(self, b: int) -> bool:
        s = self.settings
        if b == 0:
            return s.eval_on_startup and self._cursor == 0
        return s.eval_interval > 0 and b % s.eval_interval == 0

    async def _evaluate(self, version: Version) -> None:
        """Evaluation under `version`, reported at its train step, once every version that answered has been proven."""
        s = self.settings
        for taskset, order in self._eval_tasksets.items():
            name, began = taskset.settings.name, time.monotonic()
            groups = await play_taskset(
                taskset,
                order,
                self._recipes,
                self._model,
                version,
                limits=self._limits,
                slot=self._eval_slot,
                explorer=s.index,
                seed=s.seed if s.deterministic else None,
                models=self._models,
            )
            played_s = time.monotonic() - began
            for used in sorted({v for g in groups for v in g.versions}):
                await self._gate.served(used)
            values = eval_metrics(name, groups, taskset.settings.num_runs, played_s)
            await self._log("eval", version.step, values)
            if s.eval_samples != 0:
                await self._sink.samples(f"eval/{name}", version.step, sample_rows(groups, s.eval_samples))

    @asynccontextmanager
    async def _eval_slot(self) -> AsyncIterator[None]:
        async with self._slots:
            yield

    async def _log(self, role: Role, step: int, values: dict[str, float]) -> None:
        await self._sink.log(MetricRecord(role=role, step=step, time=time.time(), values=values))

    def _short(self, batch: Batch) -> str:
        reasons = ", ".join(f"{n} {why}" for why, n in batch.reasons.items())
        last = f"  The last failed run was {self._breaker.last}" if self._breaker.last else ""
        return (
            f"explore batch {batch.number}: only {batch.accepted} of {batch.size} groups can be trained ({reasons}), and all "
            f"{self._max_refill} refills are used up.  Correct the workflow or reward, make the tasks easier, or set "
            f"buffer.on_short_batch to train or carry.{last}"
        )


def _first(error: BaseException) -> BaseException:
    """The first error that is not a group: task groups wrap what one of their tasks raised."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error

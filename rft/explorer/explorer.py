"""The exploring loop: tasks into runs, runs into the buffer, evaluation in between.  Knows neither trainer nor algorithm.

    may explore b? ─> evaluate if due ─> room? ─> groups of b play ─> version proven? ─> operators ─> append ─> close b ─> explored b
                                                     └ rejected: the next candidate, until the refills are used up

Invariant: a batch is closed after all its groups are appended; one explorer alone closes batches in ascending order.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

from rft.buffer.operators.pipeline import OperatorFailed, Pipeline
from rft.buffer.operators.settings import ROLLOUT_MODEL
from rft.errors import ConfigError, FrameRejected, RftError, ShortBatch
from rft.explorer.deal import Begun, Dealer
from rft.explorer.evaluate import Evaluator
from rft.explorer.metrics import engine_metrics, pipeline_metrics, rollout_metrics
from rft.explorer.settings import ExplorerSettings
from rft.explorer.state import Batch, Breaker, RunTimes, Slots
from rft.plugins import load_all
from rft.reward import pool
from rft.reward.judge import meter
from rft.taskset.base import Taskset, open_taskset
from rft.taskset.order import Order
from rft.types.block import encode
from rft.types.ids import GroupId, Version
from rft.types.metrics import Metric, MetricRecord, Role
from rft.types.ports import BufferWriter, ChatModel, ExploreGate, HeldGroup, MetricSink, TaskOutcome
from rft.types.task import Task
from rft.workflow.base import NO_MODELS
from rft.workflow.build import Recipes, refuse_group_reward
from rft.workflow.group import Group, judge, run_group
from rft.workflow.run import Limits
from rft.workflow.seeds import seed_for

log = logging.getLogger(__name__)


class Explorer:
    """Plays explore batches from `cursor` on, under weights of `lineage`: all of them, or those that a `dealer` gives it."""

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
        dealer: Dealer | None = None,
    ) -> None:
        """Opens the tasksets and finds every workflow and reward they name.  Raises ConfigError, PluginError."""
        load_all(settings.plugin_dirs)
        self.settings = settings
        self._model, self._buffer, self._gate, self._sink = model, buffer, gate, sink
        self._lineage, self._cursor, self._models, self._dealer = lineage, cursor, models, dealer
        self._next = cursor  # batch, where they are not dealt
        self.order = self._order([open_taskset(t) for t in settings.tasksets])
        self._pipeline = Pipeline(settings.pipeline, judge, settings.max_timeout_s)
        self._recipes = Recipes()
        self._slots = Slots(settings.max_concurrent_runs)
        self._evaluator = Evaluator(settings, self._recipes, model, sink, self._slots, proven=gate.served, models=models)
        for taskset in (*self.order.tasksets, *self._evaluator.tasksets):
            recipe = self._recipes.of(taskset.task(0))
            if settings.baseline and taskset in self.order.tasksets:
                refuse_group_reward(recipe, taskset.task(0))
        self.num_batches = settings.total_batches
        if self.num_batches is None and settings.total_epochs is not None:
            self.num_batches = self.order.num_batches(settings.total_epochs)
        if settings.on_short_batch not in ("stop", "train", "carry"):
            raise ConfigError(f"{settings.on_short_batch!r} is not known; use stop, train or carry", key="buffer.on_short_batch")
        self._max_refill = 3 * settings.batch_size if settings.max_refill is None else settings.max_refill
        self._limits = Limits(
            settings.max_timeout_s,
            settings.max_retry_times,
            max_group_s=settings.max_group_timeout_s,
            whole_groups=settings.whole_groups,
            stop_hopeless=settings.stop_hopeless,
        )
        self._times = RunTimes(settings.max_timeout_s, settings.timeout_ratio, settings.timeout_warmup)
        self._engines = engine_metrics(model, models)
        self._earlier: dict[int, Order] = {}  # where a selector learns: of batches dealt again that are behind `order`
        self._playing: dict[GroupId, float] = {}  # since when
        self._batches: dict[int, Batch] = {}  # under way
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
                await asyncio.gather(self._main, return_exceptions=True)  # nobody is there to hear what else went wrong
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
        if self.settings.eval_at_end and (self._dealer is None or await self._dealer.evaluates()):
            await self._evaluator.run(version)
        await self._recipes.close()

    async def _explore(self) -> str:
        """The loop.  Returns why it ended."""
        held: defaultdict[int, list[HeldGroup]] = defaultdict(list)
        for group in await self._buffer.held(self._cursor):
            held[group.batch].append(group)
        await self._buffer.same_tasksets({t.settings.name: t.fingerprint for t in self.order.tasksets})
        before = asyncio.Event()
        before.set()
        under_way: deque[asyncio.Event] = deque()
        evaluation: asyncio.Task[object] | None = None
        async with AsyncExitStack() as over, asyncio.TaskGroup() as tasks:
            if self.settings.report_interval_s > 0:
                over.callback(asyncio.ensure_future(self._report_often()).cancel)
            while isinstance(begun := await self._begin(under_way), Begun):
                b = begun.batch
                if begun.again:
                    held[b] = [g for g in await self._buffer.held(b) if g.batch == b]
                if self._eval_due(b):
                    if evaluation is not None:
                        await evaluation
                    evaluation = tasks.create_task(self._evaluator.run(begun.version))
                    if not self.settings.eval_in_background:
                        await evaluation
                if self._dealer is None:  # else it was dealt when there was room
                    await self._buffer.room(b)
                await self._learn(b)
                batch = self._batches[b] = self._batch(b, held.pop(b, ()))
                tasks.create_task(self._explore_batch(batch, before))
                under_way.append(batch.closed)
                if self._dealer is None:  # else one that is dealt again would wait for those after it, which may wait for it
                    before = batch.closed
                if self.order.learns:
                    self._under_way[b] = batch.closed
                await batch.submitted.wait()
            return begun

    async def _begin(self, under_way: deque[asyncio.Event]) -> Begun | str:
        """The next batch, when it may begin, or why there is none."""
        if self._dealer is not None:
            return await self._dealer.begin(self.order.lag if self.order.learns else None, self.order.fingerprint)
        b, self._next = self._next, self._next + 1
        if self.num_batches is not None and b >= self.num_batches:
            return f"all {self.num_batches} explore batches are in the buffer"
        while self.settings.max_inflight is not None and len(under_way) >= self.settings.max_inflight:
            await under_way.popleft().wait()
        version = await self._gate.may_explore(b)
        return "the trainer is finished" if version is None else Begun(batch=b, version=version)

    def _order(self, tasksets: Sequence[Taskset]) -> Order:
        return Order(tasksets, self.settings.batch_size, self.settings.seed, lag=self.settings.feedback_lag)

    def _batch(self, number: int, held: Iterable[HeldGroup]) -> Batch:
        s = self.settings
        more: dict[str, Any] = {
            "over_rollout": s.over_rollout,
            "wait_after_s": s.wait_after_s,
            "keep_partial": s.keep_partial,
        }
        return Batch(number, s.batch_size, self._max_refill, held, **more)

    async def _learn(self, b: int) -> None:
        """Selectors that learn hear, from the buffer alone, of every batch that the choice of batch `b` depends on."""
        order, end = self.order, self.order.horizon(b)
        if order.learned > end:  # a batch that is dealt again, chosen by what was known then
            order = self._earlier[b] = self._order(order.tasksets)
        first = order.learned
        if first >= end:
            return
        for n in [n for n in self._under_way if n < end]:
            await self._under_way.pop(n).wait()
        found: defaultdict[int, list[TaskOutcome]] = defaultdict(list)
        for outcome in await self._buffer.outcomes(first, end):
            found[outcome.batch].append(outcome)
        for n in range(first, end):
            order.learn(n, found[n])

    async def _explore_batch(self, batch: Batch, before: asyncio.Event) -> None:
        """Fills the places of one batch, waits for the batch before it, closes it and reports."""
        tasks = self._earlier.get(batch.number, self.order).batch(batch.number)
        numbers = [batch.first(place) for place in range(batch.size)]
        batch.expect(sum(self._task(batch, tasks, n).num_runs for n in numbers if n is not None))
        async with asyncio.TaskGroup() as places:
            for number in numbers:
                if number is not None:
                    places.create_task(self._fill(batch, tasks, number))
        await before.wait()
        if batch.unplayed:
            del self._batches[batch.number]
            batch.close()
            return
        await self._buffer.close_batch(batch.number, accepted=batch.accepted, wanted=batch.size, reasons=dict(batch.reasons))
        if batch.accepted < batch.size and self.settings.on_short_batch == "stop":
            raise ShortBatch(self._short(batch))
        await self._gate.explored(batch.number)
        values = rollout_metrics(batch.played, batch.wall_s, self.settings.percentiles) | pipeline_metrics(batch.pipeline)
        values |= {f"reward/{k}": float(v) for k, v in pool.counts().items()}
        values |= {f"judge/{k}": v for k, v in meter.counts().items()}
        for engines in self._engines:
            values |= await engines.since()
        if self.settings.timeout_ratio is not None:
            values["rollout/time/limit"] = self._times.limit_s
        self._times.see(batch.played)
        await self._log("explorer", batch.number + 1, values)
        self._earlier.pop(batch.number, None)
        del self._batches[batch.number]
        batch.close()

    async def _fill(self, batch: Batch, tasks: list[Task], number: int | None) -> None:
        """Plays candidates for one place until one is accepted or the refills are used up.  Each group is appended once."""
        first = True
        while number is not None:
            task = self._task(batch, tasks, number)
            async with self._begun(batch, number % batch.size if first else None) as may:
                if not may:
                    batch.unplayed = True
                    batch.begun(task.num_runs if first else 0)
                    return
                played = await self._play(batch, task, number, first)
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

    @asynccontextmanager
    async def _begun(self, batch: Batch, place: int | None) -> AsyncIterator[bool]:
        """While a group plays, where groups are paced one by one.  `place` None: it replaces another.  False: nobody trains any more."""
        if not self.settings.by_group:
            yield True
        elif not await self._gate.may_play(batch.number, place):
            yield False
        else:
            try:
                yield True
            finally:
                await self._gate.played()

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
        """Appends the group.  One that cannot be stored (values of its workflow, too large, no token) becomes failed runs instead."""
        try:
            await self._buffer.append(_encoded(group), accepted=group.accepted, reason=group.reason)
        except FrameRejected as e:
            log.warning("group %s: %s", group.id, e)
            group = group.refused(f"rejected by the buffer: {e}")
            await self._buffer.append(encode(group.rows), accepted=False, reason=group.reason)
        return group

    async def _play(self, batch: Batch, task: Task, number: int, first: bool) -> Group:
        left = task.num_runs if first else 0  # runs of the batch's first tasks that have not begun

        @asynccontextmanager
        async def slot(count: int) -> AsyncIterator[None]:
            nonlocal left
            async with self._slots.take(count):
                began = min(count, left)
                left -= began
                batch.begun(began)
                yield

        s = self.settings
        group = GroupId(self._lineage, s.index, batch.number, number)
        self._playing[group] = time.monotonic()
        try:
            return await run_group(
                task,
                await self._recipes.get(task),
                self._model,
                group,
                limits=replace(self._limits, max_timeout_s=self._times.limit_s),
                slot=slot,
                seed=(lambda run: seed_for(s.seed, batch.number, number, run)) if s.deterministic else None,
                models=self._models,
                ending=batch.ending,
                baseline=self._slots.take if s.baseline else None,
            )
        finally:
            batch.begun(left)  # a group that was ended early has runs that never began
            del self._playing[group]

    async def _report_often(self) -> None:
        while True:
            await asyncio.sleep(self.settings.report_interval_s)
            log.info("%s", self.report())

    def report(self) -> str:
        """What every batch under way does, and what has been playing longest."""
        slots = self._slots
        said = [f"{slots.limit - slots.free} of {slots.limit} runs under way, {slots.waiting} wait for room"]
        for b in self._batches.values():
            groups = sum(g.batch == b.number for g in self._playing)
            said.append(f"batch {b.number}: {b.accepted} of {b.size} groups accepted, {groups} playing, since {b.wall_s:.0f} s")
        if self._playing:
            group, since = min(self._playing.items(), key=lambda item: item[1])
            said.append(f"longest: group {group}, {time.monotonic() - since:.0f} s")
        return "; ".join(said)

    def _task(self, batch: Batch, tasks: list[Task], number: int) -> Task:
        if number < batch.size:
            return tasks[number]
        return self._earlier.get(batch.number, self.order).spare(batch.number, number - batch.size)

    def _eval_due(self, b: int) -> bool:
        s = self.settings
        if b == 0:
            return s.eval_on_startup and self._cursor == 0
        return s.eval_interval > 0 and b % s.eval_interval == 0

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


def _encoded(group: Group) -> bytes:
    """Raises FrameRejected for what a workflow put into messages, info or metrics and that is no JSON."""
    try:
        return encode(group.rows)
    except (TypeError, ValueError, OverflowError, RecursionError) as e:
        raise FrameRejected(f"not_storable: {type(e).__name__}: {e}") from e


def _first(error: BaseException) -> BaseException:
    """The first error that is not a group: task groups wrap what one of their tasks raised."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error

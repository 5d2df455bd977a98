"""The exploring loop: run each batch, close it in the buffer, report it; evaluate in between.

    next batch ─> evaluate if due ─> choose tasks ─> batch runner: run and append the groups ─>
    close the batch ─> report it to the gate

Independent of trainer and algorithm.
Invariant: batches close in order, each after its groups are appended; a reassigned batch, which
another explorer began, does not wait for earlier ones.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial

from rft.buffer.operators.experience_pipeline import ExperiencePipeline
from rft.buffer.settings import ROLLOUT_MODEL
from rft.errors import ShortBatch
from rft.explorer.batch_runner import BatchRunner
from rft.explorer.evaluate import Evaluator
from rft.explorer.rollout_metrics import engine_metrics, pipeline_metrics, rollout_metrics
from rft.explorer.settings import ExplorerSettings
from rft.explorer.state import Batch, Slots
from rft.explorer.stoppable import StoppableWork
from rft.plugins import load_all
from rft.reward import judge_metrics
from rft.taskset.base import OTHER_ROWS, Taskset
from rft.taskset.open_source import open_taskset
from rft.taskset.task_order import TaskOrder, num_batches
from rft.types.metrics import MetricRecord
from rft.types.ports import (
    Assignment,
    BufferWriter,
    ChatModel,
    ExploreGate,
    MetricSink,
    StoredGroup,
    TaskOutcome,
)
from rft.worker import job_pool
from rft.worker.waiting import activities, sentence, works
from rft.workflow.base import NO_MODELS
from rft.workflow.group import judge
from rft.workflow.recipes import Recipes, refuse_group_reward

log = logging.getLogger(__name__)


class Explorer:
    """Runs the explore batches assigned by the gate, from `cursor` on, with weights of `lineage`."""

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
        resumes_evaluation: bool = False,  # during which an earlier process of the run ended
        models: Mapping[str, ChatModel] = NO_MODELS,
    ) -> None:
        """Open the tasksets and find all their workflows and rewards.  Raises ConfigError,
        PluginError.
        """
        load_all(settings.plugin_dirs)
        self.settings = settings
        self._model = model
        self._buffer = buffer
        self._gate = gate
        self._sink = sink
        self._cursor = cursor
        self._models = models
        self._resume_evaluation = resumes_evaluation and settings.eval_interval > 0
        self.order = self._order([open_taskset(t) for t in settings.tasksets])
        self._pipeline = ExperiencePipeline(settings.pipeline, judge, settings.max_timeout_s)
        self._recipes = Recipes()
        self._slots = Slots(settings.max_concurrent_runs)
        self._evaluator = Evaluator(
            settings,
            self._recipes,
            model,
            sink,
            self._slots,
            verified=gate.wait_verified,
            models=models,
        )
        for taskset in (*self.order.tasksets, *self._evaluator.tasksets):
            recipe = self._recipes.find(taskset.task(0))
            if settings.baseline and taskset in self.order.tasksets:
                refuse_group_reward(recipe, taskset.task(0))
        self.num_batches = settings.total_batches
        if self.num_batches is None and settings.total_epochs is not None:
            self.num_batches = num_batches(
                [len(t) for t in self.order.tasksets], settings.batch_size, settings.total_epochs
            )
        self._runner = BatchRunner(
            settings,
            model=model,
            models=models,
            recipes=self._recipes,
            pipeline=self._pipeline,
            buffer=buffer,
            gate=gate,
            slots=self._slots,
            sink=sink,
            lineage=lineage,
        )
        self._engines = engine_metrics(model, models)
        # with learning selectors: the order of each reassigned batch that `order` has passed
        self._orders_of_reassigned: dict[int, TaskOrder] = {}
        self._reported = cursor  # last reported explore step
        self._main = StoppableWork()

    async def run(self) -> None:
        """Explore until the tasks are used up or the trainer is finished, then evaluate the final
        weights.

        Raises RunFailed (breaker, short batch, failed evaluation) and the errors of engine, gate
        and buffer.
        """
        try:
            await self._main.run(self._run)
        finally:
            await asyncio.to_thread(job_pool.close_all)

    async def stop(self) -> None:
        """End `run` early.  Groups in flight are dropped; they are not in the buffer, so a resumed
        run plays them again.
        """
        await self._main.stop()

    async def _run(self) -> None:
        try:
            with works("preparing rewards and operators"):
                await self._recipes.prepare(self._models)
                await self._pipeline.prepare({**self._models, ROLLOUT_MODEL: self._model})
            reason = await self._explore()
            with works("closing the operators"):
                await self._pipeline.close()
            await self._buffer.finish(reason)
            version = await self._gate.wait_final()
            if self.settings.eval_at_end and await self._gate.evaluates():
                await self._evaluator.run(version)
                judges = judge_metrics.counts()  # includes the judge calls of this evaluation
                if judges and self._evaluator.tasksets:
                    await self._sink.log(
                        MetricRecord(role="explorer", step=self._reported + 1, values=judges)
                    )
            with works("closing the rewards"):
                await self._recipes.close()
        except BaseException as error:
            for close in (self._pipeline.close, self._recipes.close):
                try:
                    await close()
                except Exception as e:  # e.g. of a plugin; the earlier error explains the end
                    log.error("while closing: %s", e)
            if isinstance(error, BaseExceptionGroup):
                raise _first(error) from None
            raise

    async def _explore(self) -> str:
        """Run all batches; return why there is no further one."""
        stored: defaultdict[int, list[StoredGroup]] = defaultdict(list)
        for group in await self._buffer.stored_groups(self._cursor):
            stored[group.batch].append(group)
        fingerprints = {t.settings.name: t.fingerprint for t in self.order.tasksets}
        fingerprints |= {f"eval/{t.settings.name}": t.fingerprint for t in self._evaluator.tasksets}
        if changed := await self._buffer.check_taskset_fingerprints(fingerprints):
            note = OTHER_ROWS.format(", ".join(changed))
            await self._sink.log(
                MetricRecord(role="explorer", step=self._cursor + 1, values={}, notes=(note,))
            )
        previous: Batch | None = None
        evaluation: asyncio.Task[object] | None = None
        async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
            if self.settings.report_interval_s > 0:
                stack.callback(asyncio.ensure_future(self._report_often()).cancel)
            lag = self.order.lag if self.order.learns else None
            fingerprint = self.order.fingerprint
            next_batch = partial(
                self._gate.next_batch, lag=lag, fingerprint=fingerprint, total=self.num_batches
            )
            while isinstance(assignment := await next_batch(), Assignment):
                b = assignment.batch
                again = assignment.again
                if again:
                    stored[b] = [g for g in await self._buffer.stored_groups(b) if g.batch == b]
                if self._eval_due(b) or self._resume_evaluation:
                    self._resume_evaluation = False
                    await self._evaluator.announce(assignment.version)
                    if evaluation is not None:
                        await evaluation
                    evaluation = tasks.create_task(self._evaluator.run(assignment.version))
                    if not self.settings.eval_in_background:
                        await evaluation
                await self._update_selectors(b)
                batch = Batch(b, self.settings, stored.pop(b, ()))
                tasks.create_task(self._explore_batch(batch, None if again else previous))
                # a reassigned batch does not block later ones: a train step may need those first
                if not again:
                    previous = batch
                await batch.all_begun.wait()
            return assignment  # the reason

    def _order(self, tasksets: Sequence[Taskset]) -> TaskOrder:
        return TaskOrder(
            tasksets, self.settings.batch_size, self.settings.seed, lag=self.settings.feedback_lag
        )

    async def _update_selectors(self, b: int) -> None:
        """Give learning selectors the stored outcomes of every batch on which the tasks of batch `b`
        depend.
        """
        order = self.order
        end = self.order.horizon(b)
        if order.learned > end:  # a reassigned batch: choose with the knowledge of that time
            order = self._orders_of_reassigned[b] = self._order(order.tasksets)
        first = order.learned
        if first >= end:
            return
        outcomes: defaultdict[int, list[TaskOutcome]] = defaultdict(list)
        for outcome in await self._buffer.outcomes(first, end):
            outcomes[outcome.batch].append(outcome)
        for n in range(first, end):
            order.learn(n, outcomes[n])

    async def _explore_batch(self, batch: Batch, previous: Batch | None) -> None:
        """Run `batch`, wait until `previous` is closed, close `batch` and report it."""
        order = self._orders_of_reassigned.pop(batch.number, self.order)
        await self._runner.run(batch, order)
        if previous is not None:
            await previous.closed.wait()
        if not batch.cut_short:
            await self._buffer.close_batch(
                batch.number,
                accepted=batch.accepted,
                expected=batch.size,
                reasons=dict(batch.reasons),
            )
            if batch.accepted < batch.size and self.settings.on_short_batch == "stop":
                raise ShortBatch(self._short(batch))
            await self._gate.explored(batch.number)
            await self._report(batch)
        batch.close()

    # ------------------------------------------------------------ reports

    async def _report(self, batch: Batch) -> None:
        values = rollout_metrics(
            batch.played, batch.wall_s, self.settings.percentiles
        ) | pipeline_metrics(batch.pipeline)
        values |= {f"reward/{k}": float(v) for k, v in job_pool.counts().items()}
        values |= judge_metrics.counts()
        for engines in self._engines:
            values |= await engines.since()
        if self.settings.timeout_ratio is not None:
            values["rollout/time/limit"] = self._runner.times.limit_s
        self._runner.times.add(batch.played)
        self._reported = batch.number + 1
        await self._sink.log(MetricRecord(role="explorer", step=self._reported, values=values))

    async def _report_often(self) -> None:
        while True:
            await asyncio.sleep(self.settings.report_interval_s)
            log.info("%s", sentence(activities()))

    def _eval_due(self, b: int) -> bool:
        s = self.settings
        if b == 0:
            return s.eval_on_startup and self._cursor == 0
        return s.eval_interval > 0 and b % s.eval_interval == 0

    def _short(self, batch: Batch) -> str:
        reasons = ", ".join(f"{n} {reason}" for reason, n in batch.reasons.items())
        breaker = self._runner.breaker
        last = f"  The last failed run was {breaker.last}" if breaker.last else ""
        return (
            f"explore batch {batch.number}: only {batch.accepted} of {batch.size} groups can be "
            f"trained ({reasons}), and all "
            f"{batch.max_refill} refills are used up.  Correct the workflow or reward, or make the "
            f"tasks easier, and raise "
            f"buffer.max_refill (a resumed run repeats only groups without a reward); or set "
            f"buffer.on_short_batch to train or carry.{last}"
        )


def _first(error: BaseException) -> BaseException:
    """Return the first error inside nested exception groups, which task groups raise."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error

"""Run one explore batch: run, verify, process and append each group, and replace rejected ones.
Independent of other batches.

    run the group ─> wait for the canary of its weights ─> operators ─> append
    rejected by any of them: append it as rejected, run a replacement, up to `max_refill` per batch

Invariant: each group is appended once, and only after every version that generated its tokens is
verified or rejected.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace

from rft.buffer.operators.experience_pipeline import ExperiencePipeline, OperatorFailed
from rft.errors import FrameRejected
from rft.explorer.settings import ExplorerSettings
from rft.explorer.state import Batch, Breaker, RunTimes, Slots
from rft.taskset.task_order import TaskOrder
from rft.types.block import encode
from rft.types.ids import GroupId, Version
from rft.types.metrics import Metric, MetricRecord
from rft.types.ports import BufferWriter, ChatModel, ExploreGate, MetricSink
from rft.types.task import Task
from rft.worker.waiting import waits, works
from rft.workflow.base import seed_for
from rft.workflow.group import REJECTED_WEIGHTS, PlayedGroup, run_group
from rft.workflow.play_run import RunLimits
from rft.workflow.recipes import Recipes

log = logging.getLogger(__name__)


class BatchRunner:
    """Runs the batches of one explorer with shared models, limits and buffer."""

    def __init__(
        self,
        settings: ExplorerSettings,
        *,
        model: ChatModel,
        models: Mapping[str, ChatModel],
        recipes: Recipes,
        pipeline: ExperiencePipeline,
        buffer: BufferWriter,
        gate: ExploreGate,
        slots: Slots,
        sink: MetricSink,
        lineage: int,
    ) -> None:
        self._settings = settings
        self._model = model
        self._models = models
        self._recipes = recipes
        self._pipeline = pipeline
        self._buffer = buffer
        self._gate = gate
        self._slots = slots
        self._lineage = lineage
        self._sink = sink
        self._limits = RunLimits(
            settings.max_timeout_s,
            settings.max_retry_times,
            max_group_s=settings.max_group_timeout_s,
            whole_groups=settings.whole_groups,
            stop_hopeless=settings.stop_hopeless,
            reproducible=settings.reproducible,
            sampled=settings.sampled,
            teacher_top=settings.teacher_top,
        )
        self.times = RunTimes(
            settings.max_timeout_s, settings.timeout_ratio, settings.timeout_warmup
        )
        self.breaker = Breaker(settings.breaker)
        self._verified: set[Version] = set()
        self._reported: set[str] = set()  # reasons of rejection that have been in a note

    async def run(self, batch: Batch, order: TaskOrder) -> None:
        """Run groups until each place of the batch has an accepted one, or the refills are used up.

        Raises RunFailed (breaker) and the errors of engine, gate and buffer.
        """
        tasks = order.batch(batch.number)

        def task_of(number: int) -> Task:
            return (
                tasks[number]
                if number < batch.size
                else order.spare(batch.number, number - batch.size)
            )

        numbers = [n for place in range(batch.size) if (n := batch.first_task(place)) is not None]
        batch.expect_runs(sum(task_of(n).num_runs for n in numbers))
        with works(lambda: str(batch)):
            async with asyncio.TaskGroup() as places:
                for number in numbers:
                    places.create_task(self._fill(batch, task_of, number))

    async def _fill(self, batch: Batch, task_of: Callable[[int], Task], first_number: int) -> None:
        """Run candidates for one place until one is accepted or the refills are used up.

        `first_number`: the number of the first candidate's task.
        """
        number: int | None = first_number
        while number is not None:
            task = task_of(number)
            replacement = number != first_number
            # the first candidate of a resumed batch may have a number above the place's
            place = None if replacement else number % batch.size
            async with self._permit(batch, place) as permitted:
                if not permitted:
                    batch.cut_short = True
                    batch.note_begun(0 if replacement else task.num_runs)
                    return
                played = await self._run_group(batch, task, number, replacement)
            if rejected := [v for v in played.versions if not await self._is_verified(v)]:
                played = processed = played.refused(
                    f"weights {rejected[0]} failed their canary", reason=REJECTED_WEIGHTS
                )
            else:
                processed = await after_operators(self._pipeline, played, batch.pipeline)
            began = time.monotonic()
            group = await self._store(processed)
            if self._pipeline.active:
                batch.pipeline += [  # the operators have counted their own share of the total
                    Metric(f"time/{name}", time.monotonic() - began, "sum")
                    for name in ("write", "total")
                ]
            # metrics are of the group before the operators, unless the buffer refused it
            batch.add(group, played if group is processed else group)
            if group.reason and group.reason not in self._reported:
                self._reported.add(group.reason)
                note = (
                    f"group {group.id} cannot be trained: {group.detail}.  `rft buffer stats` and "
                    f"rollout/groups/rejected count all such groups"
                )
                record = MetricRecord(
                    role="explorer", step=batch.number + 1, values={}, notes=(note,)
                )
                await self._sink.log(record)
            self.breaker.check(group)
            number = None if group.accepted else batch.replacement(number)

    async def _is_verified(self, version: Version) -> bool:
        if version not in self._verified and await self._gate.wait_verified(version):
            self._verified.add(version)
        return version in self._verified

    @asynccontextmanager
    async def _permit(self, batch: Batch, place: int | None) -> AsyncIterator[bool]:
        """Hold the gate's permission for one group, if every group needs one.

        `place` None: the group replaces another.  Yields False once training is over.
        """
        if not self._settings.by_group:
            yield True
        elif not await self._gate.acquire_group(batch.number, place):
            yield False
        else:
            try:
                yield True
            finally:
                await self._gate.release_group()

    async def _run_group(
        self, batch: Batch, task: Task, number: int, replacement: bool
    ) -> PlayedGroup:
        # runs that have not begun; the batch does not wait for replacements to begin
        waiting = 0 if replacement else task.num_runs

        @asynccontextmanager
        async def slot(count: int) -> AsyncIterator[None]:
            nonlocal waiting
            async with self._slots.take(count):
                began = min(count, waiting)
                waiting -= began
                batch.note_begun(began)
                yield

        s = self._settings
        try:
            return await run_group(
                task,
                await self._recipes.get(task),
                self._model,
                GroupId(self._lineage, s.index, batch.number, number),
                limits=replace(self._limits, max_timeout_s=self.times.limit_s),
                slot=slot,
                seed=(lambda run: seed_for(s.seed, batch.number, number, run))
                if s.deterministic
                else None,
                models=self._models,
                ending=batch.ending,
                baseline=self._slots.take if s.baseline else None,
            )
        finally:
            batch.note_begun(waiting)  # the skipped runs of a group that was ended early

    async def _store(self, group: PlayedGroup) -> PlayedGroup:
        """Append the group; if the buffer refuses it (e.g. as too large), append its runs as failed."""
        try:
            images = {"images": group.images} if group.images else {}
            await self._buffer.append(
                encoded(group), accepted=group.accepted, reason=group.reason, **images
            )
        except FrameRejected as e:
            log.warning("group %s: %s", group.id, e)
            group = group.refused(f"rejected by the buffer: {e}")
            await self._buffer.append(encode(group.rows), accepted=False, reason=group.reason)
        return group


async def after_operators(
    pipeline: ExperiencePipeline, played: PlayedGroup, metrics: list[Metric]
) -> PlayedGroup:
    """Return the group after the operators, and add their metrics to `metrics`; if an operator
    fails, return failed runs with its traceback.
    """
    if not pipeline.active:
        return played
    try:
        with waits("group", "operators"):
            done = await pipeline.process(played.task, played.rows, played.needed)
    except OperatorFailed as e:
        log.warning("group %s: %s", played.id, e)
        metrics.append(Metric("failed_count", len(played.runs), "sum"))
        return played.refused(str(e), reason="operator", traceback=e.traceback)
    metrics += done.metrics
    return played.with_rows(done.rows, accepted=done.accepted, reason=done.reason)


def encoded(group: PlayedGroup) -> bytes:
    """Encode the rows.  Raises FrameRejected if a workflow put non-JSON values into messages, info
    or metrics.
    """
    try:
        return encode(group.rows)
    except (TypeError, ValueError, OverflowError, RecursionError) as e:
        raise FrameRejected(f"not_storable: {type(e).__name__}: {e}") from e

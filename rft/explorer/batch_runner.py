"""Play one explore batch: its groups, replacements of rejected groups, operators, the append.
Knows no other batch.

    group plays ─> version verified? ─> operators ─> append
                         └ rejected: the next candidate, until the refills are used up

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
    """Plays the batches of one explorer with shared models, limits and buffer."""

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
        self._noted: set[str] = set()  # kinds of rejection already reported

    async def run(self, batch: Batch, order: TaskOrder) -> None:
        """Fill every place of the batch.  Raises RunFailed (breaker) and the errors of engine, gate
        and buffer.
        """
        tasks = order.batch(batch.number)

        def task(number: int) -> Task:
            return (
                tasks[number]
                if number < batch.size
                else order.spare(batch.number, number - batch.size)
            )

        numbers = [n for place in range(batch.size) if (n := batch.first(place)) is not None]
        batch.expect(sum(task(n).num_runs for n in numbers))
        with works(lambda: str(batch)):
            async with asyncio.TaskGroup() as places:
                for number in numbers:
                    places.create_task(self._fill(batch, task, number))

    async def _fill(self, batch: Batch, task: Callable[[int], Task], first: int) -> None:
        """Play candidates for one place until one is accepted or the refills are used up."""
        number: int | None = first
        while number is not None:
            async with self._acquired(
                batch, number % batch.size if number == first else None
            ) as acquired:
                if not acquired:
                    batch.unplayed = True
                    batch.begun(task(number).num_runs if number == first else 0)
                    return
                played = await self._play(batch, task(number), number, number == first)
            if rejected := [v for v in played.versions if not await self._is_verified(v)]:
                played = played.refused(
                    f"weights {rejected[0]} failed their canary", reason=REJECTED_WEIGHTS
                )
            processed = (
                played
                if rejected
                else await after_operators(self._pipeline, played, batch.pipeline)
            )
            began = time.monotonic()
            group = await self._store(processed)
            if self._pipeline.active:
                batch.pipeline += [
                    Metric(f"time/{name}", time.monotonic() - began, "sum")
                    for name in ("write", "total")
                ]
            batch.add(group, played if group is processed else group)
            if group.reason and group.reason not in self._noted:
                self._noted.add(group.reason)
                note = (
                    f"group {group.id} cannot be trained, {group.detail}; all of its kind: `rft "
                    f"buffer stats`, rollout/groups/rejected"
                )
                record = MetricRecord(
                    role="explorer",
                    step=batch.number + 1,
                    time=time.time(),
                    values={},
                    notes=(note,),
                )
                await self._sink.log(record)
            self.breaker.see(group)
            number = None if group.accepted else batch.after(number)

    async def _is_verified(self, version: Version) -> bool:
        if version not in self._verified and await self._gate.wait_verified(version):
            self._verified.add(version)
        return version in self._verified

    @asynccontextmanager
    async def _acquired(self, batch: Batch, place: int | None) -> AsyncIterator[bool]:
        """Hold the gate's permission for one group, if groups are paced individually.

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

    async def _play(self, batch: Batch, task: Task, number: int, first: bool) -> PlayedGroup:
        waiting = (
            task.num_runs if first else 0
        )  # runs of the batch's first tasks that have not begun

        @asynccontextmanager
        async def slot(count: int) -> AsyncIterator[None]:
            nonlocal waiting
            async with self._slots.take(count):
                began = min(count, waiting)
                waiting -= began
                batch.begun(began)
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
            batch.begun(waiting)  # runs of a group that was ended early never began

    async def _store(self, group: PlayedGroup) -> PlayedGroup:
        """Append the group; append failed runs instead if it cannot be stored (e.g. it is too large
        or has no token).
        """
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

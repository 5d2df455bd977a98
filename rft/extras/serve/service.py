"""Serves the policy and learns from it: rewarded sessions become groups, groups fill explore
batches, the trainer takes them.

    client ── calls, rewards ──> gateway ──> book (stored before answered) ──> closed groups ──>
    explore batches ──> buffer

To the run it is an explorer: it joins, is assigned batches, appends and closes them.  It runs no
task by itself. Invariant: a session becomes rows of one group in the transaction that ends its
waiting, and of this attempt's weights only under verified ones.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import msgspec

from rft.buffer.operators.experience_pipeline import ExperiencePipeline
from rft.buffer.settings import ROLLOUT_MODEL, PipelineSettings
from rft.errors import FrameRejected
from rft.explorer.batch_runner import after_operators, encoded
from rft.explorer.rollout_metrics import engine_metrics, pipeline_metrics, rollout_metrics
from rft.explorer.service_settings import ServeRuntime
from rft.explorer.stoppable import StoppableWork
from rft.extras.serve.access import clients
from rft.extras.serve.book import WORKFLOW, SessionBook, patient, task_of
from rft.extras.serve.gateway import Gateway
from rft.extras.serve.live_session import LiveSession
from rft.extras.serve.session_groups import SessionGroup
from rft.files.disk import write_whole
from rft.types.experience import Experience, failed
from rft.types.ids import ExperienceId, GroupId, Version
from rft.types.metrics import Metric, MetricRecord
from rft.types.ports import (
    NO_IMAGES,
    AppendResult,
    Assignment,
    BufferWriter,
    ChatModel,
    MetricSink,
)
from rft.types.sessions import SessionStore
from rft.types.task import Task
from rft.worker.waiting import works
from rft.workflow.base import NO_MODELS
from rft.workflow.group import REJECTED_WEIGHTS, PlayedGroup, judge
from rft.workflow.play_run import PlayedRun, image_files
from rft.workflow.run_rows import experiences, run_reward

log = logging.getLogger(__name__)
ADDRESS = "serve.json"  # in the run folder, while the service listens


def service_of_a_process(*args: Any, **sides: Any) -> Service:
    """A service that has its process for itself."""
    return Service(*args, **sides, on_listening=settle)


def settle() -> None:
    """What this process has loaded stays: the garbage collector need not look through it while
    clients wait, 0.2 s each time.

    What hundreds of requests under way are made of is no garbage either: it looks less often.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)


class ServiceBuffer(BufferWriter, SessionStore, Protocol):
    """The buffer as a service sees it."""

    async def append(
        self,
        frame: bytes,
        *,
        accepted: bool,
        reason: str = "",
        images: Mapping[str, bytes] = NO_IMAGES,
        sessions: tuple[str, ...] = (),
    ) -> AppendResult:
        """As `BufferWriter`; the group's runs are those of `sessions`, in run order, which do not
        wait for anything any more.
        """
        ...


class ServiceGate(Protocol):
    """What a service asks of the coordinator; see `ExploreGate`."""

    async def next_batch(
        self, *, lag: int | None, fingerprint: str, total: int | None
    ) -> Assignment | str: ...
    async def wait_verified(self, version: Version) -> bool: ...
    async def explored(self, batch: int) -> None: ...
    async def finished(self) -> None:
        """Wait, however long, until the trainer makes no further step."""
        ...

    async def wait_final(self) -> Version: ...


class Service:
    """Serves under weights of `lineage`, and fills explore batches from the one that is assigned
    first.
    """

    def __init__(
        self,
        settings: ServeRuntime,
        pipeline: PipelineSettings,
        *,
        model: ChatModel,
        buffer: ServiceBuffer,
        gate: ServiceGate,
        sink: MetricSink,
        lineage: int,
        models: Mapping[str, ChatModel] = NO_MODELS,
        folder: Path,
        on_listening: Callable[[], None] = lambda: None,
    ) -> None:
        """`folder` gets serve.json, with the address.  Raises SetupError where no client has a key."""
        self.settings = settings
        self._model = model
        self._buffer = buffer
        self._gate = gate
        self._sink = sink
        self._lineage = lineage
        self._models = models
        self._folder = folder
        self._on_listening = on_listening
        self._pipeline = ExperiencePipeline(pipeline, judge, settings.max_timeout_s)
        self.gateway = Gateway(
            settings, clients(settings) if settings.clients is None else settings.clients, model
        )
        self.book = SessionBook(settings, model, buffer, self.gateway.add, self.gateway.remove)
        self._engines = engine_metrics(model, models)
        self._verified: set[Version] = set()
        self._main = StoppableWork()

    async def run(self) -> None:
        """Serves until the trainer is finished.  Raises SetupError for a port that is taken, and
        what buffer and gate raise.
        """
        await self._main.run(self._run)

    async def stop(self) -> None:
        """Ends `run` early.  What waits, waits in the buffer for the next start."""
        await self._main.stop()

    async def _run(self) -> None:
        await self._pipeline.prepare({**self._models, ROLLOUT_MODEL: self._model})
        try:
            assignment = await self._next_batch()  # engines serve from here on
            await self.book.restore()
            await self.gateway.serve(self.book)
            write_whole(
                self._folder / ADDRESS, json.dumps({"base_url": f"{self.gateway.address}/v1"})
            )
            self._on_listening()
            step = assignment.batch + 1 if isinstance(assignment, Assignment) else 0
            where = f"the policy is served at {self.gateway.address}/v1"
            await self._sink.log(
                MetricRecord(role="explorer", step=step, values={}, notes=(where,))
            )
            feeding = asyncio.ensure_future(self._feed(assignment))
            finished = asyncio.ensure_future(self._gate.finished())
            try:
                await asyncio.wait({feeding, finished}, return_when=asyncio.FIRST_COMPLETED)
                if feeding.done():
                    feeding.result()
                await finished
            finally:
                for job in (feeding, finished):
                    job.cancel()
                await asyncio.gather(feeding, finished, return_exceptions=True)
        finally:
            (self._folder / ADDRESS).unlink(missing_ok=True)
            await self.gateway.close()
            await self._pipeline.close()
        await self._buffer.finish("the trainer is finished")
        await self._gate.wait_final()

    async def _next_batch(self) -> Assignment | str:
        return await self._gate.next_batch(lag=None, fingerprint=WORKFLOW, total=None)

    async def _feed(self, assignment: Assignment | str) -> None:
        """Fills one batch after the other with groups."""
        accepted_groups = Counter[int]()
        next_task: dict[int, int] = {}
        first = assignment.batch if isinstance(assignment, Assignment) else 0
        for stored in await self._buffer.stored_groups(first):
            accepted_groups[stored.batch] += stored.accepted
            next_task[stored.batch] = max(next_task.get(stored.batch, 0), stored.task + 1)
        while isinstance(assignment, Assignment):
            await self._fill(
                assignment.batch,
                accepted_groups.pop(assignment.batch, 0),
                next_task.pop(assignment.batch, 0),
            )
            assignment = await self._next_batch()

    async def _fill(self, batch: int, accepted: int, task: int) -> None:
        """Fills a batch that has so many groups, the next one numbered `task`, closes it and
        reports.
        """
        began = time.monotonic()
        batch_size = self.settings.batch_size
        played: list[PlayedGroup] = []
        operated: list[Metric] = []
        reasons: Counter[str] = Counter()
        with works(
            lambda: (
                f"explore step {batch + 1}: {accepted} of {batch_size} groups, {self.book.waiting}"
            )
        ):
            while accepted < batch_size:
                closed = await self.book.next_group()
                group = await self._append(GroupId(self._lineage, 0, batch, task), closed, operated)
                if group is None:
                    continue
                task += 1
                accepted += group.accepted
                played.append(group)
                if not group.accepted:
                    reasons[group.reason] += 1
        await self._buffer.close_batch(
            batch, accepted=accepted, expected=batch_size, reasons=dict(reasons)
        )
        await self._gate.explored(batch)
        await self._report(batch, played, time.monotonic() - began, operated)

    async def _append(
        self, id: GroupId, closed: SessionGroup, operated: list[Metric]
    ) -> PlayedGroup | None:
        """Stores a closed group and returns it as it was rewarded; None where that cannot be
        trained: its sessions end or wait again.
        """
        open_sessions = [self.book.sessions[s] for s in closed.sessions if s in self.book.sessions]
        sessions = [s for s in open_sessions if await self._is_whole(s)]
        if len(sessions) < self.book.groups.needed:
            self._again(s.id for s in sessions)
            return None
        for session in sessions:
            async with session.scoring:  # a reward that was acknowledged is the rows' reward
                session.forming = True
        ids = [s.id for s in sessions]
        try:
            played = self._group(id, closed.task_id, sessions)
            group = await after_operators(self._pipeline, played, operated)
            await self._stored(group, ids)
        except FrameRejected as e:
            await self._refused(e, ids)
            return None
        self.book.accepted(ids)
        return replace(played, accepted=group.accepted, reason=group.reason)

    async def _refused(self, error: FrameRejected, ids: list[str]) -> None:
        """Explains the session whose row the buffer names, else all; the others wait for partners
        again.
        """
        log.warning("%s", error)
        reason, _, text = str(error).partition(": ")
        waiting = [i for i in ids if i in self.book.sessions]  # one may be withdrawn by now
        bad = [] if reason == "session_over" else waiting
        with suppress(ValueError):  # a text without one
            bad = [ids[ExperienceId.parse(text.partition(" ")[0]).run]]
        await patient(lambda: self.book.explain([i for i in bad if i in waiting], reason))
        self._again(i for i in waiting if i not in bad)

    def _again(self, ids: Iterable[str]) -> None:
        """These sessions wait for partners again, as long as their group's deadline has not passed."""
        for id in ids:
            if (session := self.book.sessions.get(id)) is not None:
                session.forming = False
                stored = session.stored
                self.book.groups.add(
                    stored.client, stored.task_id, id, stored.rewarded or stored.created
                )

    async def _stored(self, group: PlayedGroup, ids: list[str]) -> None:
        how: dict[str, Any] = {
            "accepted": group.accepted,
            "reason": group.reason,
            "sessions": tuple(ids),
            **({"images": group.images} if group.images else {}),
        }
        await patient(lambda: self._buffer.append(encoded(group), **how))

    def _group(self, id: GroupId, task_id: str, sessions: list[LiveSession]) -> PlayedGroup:
        task = task_of(self.settings, task_id)
        runs = []
        for number, session in enumerate(sessions):
            transcript = session.transcript()
            try:
                rows = _unanswered(task, session, id.run(number))
                rows = rows or experiences(
                    task, WORKFLOW, transcript, transcript.score, id, number, 0
                )
            except ValueError as e:  # log-probs of an engine that are no numbers, for example
                raise FrameRejected(f"not_storable: {id.run(number)} {e}") from e
            took = (session.stored.rewarded or session.stored.created) - session.stored.created
            value = run_reward(transcript, transcript.score)
            files = image_files(rows, transcript)
            runs.append(PlayedRun(rows, value, took, 0.0, 1, images=files))
        # all runs are scored, so that a single one that can be trained is compared with the others
        needed = 1
        accepted, reason = judge([x for r in runs for x in r.experiences], len(runs), needed)
        return PlayedGroup(id, task, tuple(runs), accepted, reason, needed)

    async def _is_whole(self, session: LiveSession) -> bool:
        """Whether all weights that wrote it are verified; else the store says why it is never
        trained.
        """
        await session.load()
        for version in {
            s.version for turn in session.transcript().turns for s in turn.completion.version_spans
        }:
            if (
                version in self._verified or version.lineage != self._lineage
            ):  # nobody verifies those of an attempt that has ended
                continue
            if not await self._gate.wait_verified(version):
                await patient(lambda: self.book.explain([session.id], REJECTED_WEIGHTS))
                return False
            self._verified.add(version)
        return True

    async def _report(
        self, batch: int, played: list[PlayedGroup], wall_s: float, operated: list[Metric]
    ) -> None:
        values = rollout_metrics(played, wall_s, False) | pipeline_metrics(operated)
        values |= self.gateway.values()
        for engines in self._engines:
            values |= await engines.since()
        await self._sink.log(MetricRecord(role="explorer", step=batch + 1, values=values))


def _unanswered(task: Task, session: LiveSession, id: ExperienceId) -> tuple[Experience, ...]:
    """The header row of a session whose first call failed: it has nothing to train, and its reward
    counts for its group.
    """
    if session.calls:
        return ()
    about = {"session": session.id, "client": session.stored.client}
    header: dict[str, Any] = {
        "taskset": task.taskset,
        "task_index": task.index,
        "workflow": WORKFLOW,
        "info": about,
    }
    row = failed(id, **header, reason="the session has no answer")
    score = session.stored.score
    assert score is not None, "a session without answers is rewarded as a whole"
    return (msgspec.structs.replace(row, reward=score.value, reward_parts=score.parts),)

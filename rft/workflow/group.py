"""Perform all runs of one task and decide whether the group can be trained.  Depends on no buffer; the
caller appends the rows.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from rft.types.credit import run_rewards
from rft.types.experience import BASELINE_KEY, Experience, failed, scored_members
from rft.types.ids import GroupId, Version
from rft.types.ports import NO_IMAGES, ChatModel
from rft.types.task import Task
from rft.workflow.base import NO_MODELS, RunContext
from rft.workflow.call_workflow import RunError
from rft.workflow.play_run import Ended, PlayedRun, Run, RunLimits, TaskRuns
from rft.workflow.recipes import Recipe, refuse_group_reward

log = logging.getLogger(__name__)
REJECTED_WEIGHTS = "rejected_weights"
Slot = Callable[[int], AbstractAsyncContextManager[None]]
"""`async with slot(n)`: room for n runs at once, so that two groups never wait for each other."""


@asynccontextmanager
async def no_slot(count: int) -> AsyncIterator[None]:
    yield


@dataclass(frozen=True)
class PlayedGroup:
    """All runs of one task, in run order.

    `accepted`: it can be trained; else `reason`: failed, unscored, too_few, group_timeout,
    over_rollout, no_baseline, filtered (by operators), operator (one broke), rejected (by the
    buffer), rejected_weights (their canary failed).  `needed`: trainable runs that it must have,
    also after operators have changed rewards; more than its runs: it can never be trained; None:
    two, or one in a group of one.
    """

    id: GroupId
    task: Task
    runs: tuple[PlayedRun, ...]
    accepted: bool
    reason: str
    needed: int | None = None

    @property
    def rows(self) -> list[Experience]:
        return [x for r in self.runs for x in r.experiences]

    @property
    def images(self) -> dict[str, bytes]:
        """Files of the images in `rows`, by name."""
        return {name: data for r in self.runs for name, data in r.images.items()}

    @property
    def wholly_failed(self) -> bool:
        return all(r.failed for r in self.runs)

    @property
    def versions(self) -> list[Version]:
        """Weight versions that wrote tokens of the group, oldest first."""
        return sorted({s.version for r in self.rows for s in r.version_spans})

    @property
    def rewards(self) -> list[float]:
        """Rewards of the scored runs."""
        return [r.value for r in self.runs if r.value is not None]

    @property
    def detail(self) -> str:
        """`reason`, with the first reason of a run that is not a consequence of other runs."""
        reasons = (r.reason or str(r.info.get("reward_reason", "")) for r in self.rows)
        first = next((text for text in reasons if text and text not in _ENDED.values()), "")
        return ": ".join(filter(None, (self.reason, first)))

    def refused(self, detail: str, *, reason: str = "rejected", traceback: str = "") -> PlayedGroup:
        """Return the group with every run as a failed row, for rows that cannot be stored."""
        info = {"traceback": _unicode(traceback)} if traceback else None
        runs = tuple(
            replace(
                run,
                experiences=(self._failed(run, detail, info),),
                value=None,
                images=NO_IMAGES,
            )
            for run in self.runs
        )
        return PlayedGroup(self.id, self.task, runs, accepted=False, reason=reason)

    def _failed(self, run: PlayedRun, reason: str, info: dict[str, Any] | None) -> Experience:
        """Return the header row of a run; a run that had failed before keeps its reason."""
        first = run.experiences[0]
        if run.failed:
            reason = first.reason
            info = {k: _unicode(v) if isinstance(v, str) else v for k, v in first.info.items()}
        return failed(
            first.id,
            taskset=self.task.taskset,
            task_index=self.task.index,
            workflow=first.workflow,
            reason=_unicode(reason[:300]),
            info=info,
        )

    def with_rows(self, rows: Sequence[Experience], *, accepted: bool, reason: str) -> PlayedGroup:
        """Return the group with the rows that operators returned, and the rewards of its runs; a
        group that was rejected before keeps its reason.
        """
        remaining = iter(rows)
        runs = []
        for run in self.runs:
            experiences = tuple(next(remaining) for _ in run.experiences)
            reward = next(iter(run_rewards(scored_members(experiences)).values()), None)
            runs.append(replace(run, experiences=experiences, value=reward))
        if not accepted and reason != "filtered":
            reason = self.reason or reason
        return replace(self, runs=tuple(runs), accepted=accepted, reason=reason)


class Ending:
    """Ends groups in progress, and groups that begin later.

    `partial`: train an ended group with two trainable runs (one, in a group of one).
    """

    def __init__(self, *, partial: bool = False) -> None:
        self.partial = partial
        self.reason: Ended = ""
        self._listeners: set[Callable[[Ended], None]] = set()

    def end(self, reason: Ended) -> None:
        """Call the listeners on the first call."""
        if not self.reason:
            self.reason = reason
            for listener in list(self._listeners):
                listener(reason)

    @contextmanager
    def listening(self, listener: Callable[[Ended], None]) -> Iterator[None]:
        """Call `listener` when the end comes, or immediately if it has come."""
        self._listeners.add(listener)
        if self.reason:
            listener(self.reason)
        try:
            yield
        finally:
            self._listeners.discard(listener)


async def run_group(
    task: Task,
    recipe: Recipe,
    model: ChatModel,
    id: GroupId,
    *,
    limits: RunLimits,
    slot: Slot = no_slot,
    seed: Callable[[int], Callable[[int], int]] | None = None,
    request_prefix: str = "",
    models: Mapping[str, ChatModel] = NO_MODELS,
    ending: Ending | None = None,
    baseline: Slot | None = None,
) -> PlayedGroup:
    """Play `task.num_runs` runs concurrently, each inside a `slot(1)`, with the seeds of
    `seed(run)`.

    Raises only RftError.  `models`: auxiliary models by name.  Scoring also happens inside the
    slot, except by a reward that sees all runs at once.  `ending` may end the group early.  With
    `baseline` the task is also played once at temperature 0 inside that slot, and the info of every
    row gets its reward as "baseline_reward"; the reward must then score each run alone.
    """
    play = _GroupPlay(task, recipe, model, id, limits, slot, seed, request_prefix, models, ending)
    if baseline is None:
        return await play.run()
    refuse_group_reward(recipe, task)
    greedy_play = replace(
        play, task=_greedy(task), slot=baseline, request_prefix=f"{request_prefix}greedy-"
    )
    jobs = [asyncio.ensure_future(play.run()), asyncio.ensure_future(greedy_play.run())]
    try:
        group, greedy = await asyncio.gather(*jobs)
    finally:
        for job in jobs:
            job.cancel()
    return _with_baseline(group, greedy)


def _greedy(task: Task) -> Task:
    sampling = msgspec.structs.replace(
        task.sampling, temperature=0.0, top_p=1.0, top_k=-1, min_p=0.0
    )
    return msgspec.structs.replace(task, num_runs=1, sampling=sampling)


def _with_baseline(group: PlayedGroup, greedy: PlayedGroup) -> PlayedGroup:
    """Add the reward of the greedy run; without it the group cannot be trained."""
    baseline = greedy.runs[0].value
    if baseline is None:
        reason = greedy.runs[0].experiences[0].reason
        log.warning("group %s: its greedy run has no reward: %s", group.id, reason)
        return replace(
            group,
            accepted=False,
            reason=group.reason or "no_baseline",
            needed=group.task.num_runs + 1,
        )
    runs = tuple(
        replace(run, experiences=tuple(_add_baseline(x, baseline) for x in run.experiences))
        for run in group.runs
    )
    return replace(group, runs=runs)


def _unicode(text: str) -> str:
    """Write surrogates, which no file can hold, as escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def _add_baseline(row: Experience, baseline: float) -> Experience:
    if row.status == "failed":
        return row
    return msgspec.structs.replace(row, info={**row.info, BASELINE_KEY: baseline})


@dataclass(eq=False)
class _GroupPlay:
    """One call of `run_group`, or its greedy run."""

    task: Task
    recipe: Recipe
    model: ChatModel
    id: GroupId
    limits: RunLimits
    slot: Slot
    seed: Callable[[int], Callable[[int], int]] | None
    request_prefix: str
    models: Mapping[str, ChatModel]
    ending: Ending | None

    def __post_init__(self) -> None:
        self._runs = TaskRuns(self.task, self.recipe, self.limits, self.id)
        self._cut: Ended = ""
        self._jobs: list[asyncio.Future[list[Run | PlayedRun]]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._began: dict[int, float] = {}
        self._attempt: dict[int, int] = {}
        self._failures = 0

    async def run(self) -> PlayedGroup:
        if self.recipe.plays_group:
            plays = [self._play_together()]
        else:
            plays = [self._play_one(run) for run in range(self.task.num_runs)]
        self._jobs = [asyncio.ensure_future(play) for play in plays]
        if self.limits.stop_hopeless:
            for job in self._jobs:
                job.add_done_callback(self._cancel_if_hopeless)
        try:
            with self.ending.listening(self._end) if self.ending is not None else nullcontext():
                await asyncio.wait(self._jobs, return_when=asyncio.FIRST_EXCEPTION)
            runs = [
                r for job in self._jobs if job.done() and not job.cancelled() for r in job.result()
            ]
        finally:
            self._end("")
        return self._group(await self._complete(runs))

    async def _play_one(self, run: int) -> list[Run | PlayedRun]:
        async with self.slot(1):
            self._begin(run)
            played = await self._runs.play_one(self._context, run)
            if self.recipe.scores_group:
                return [played]
            return [await self._runs.score_one(played)]

    async def _play_together(self) -> list[Run | PlayedRun]:
        async with self.slot(self.task.num_runs):
            for run in range(self.task.num_runs):
                self._begin(run)
            runs = await self._runs.play_together(self._context)
        if self.recipe.scores_group:
            return list(runs)
        return list(await asyncio.gather(*(self._runs.score_one(r) for r in runs)))

    def _context(self, run: int, attempt: int) -> RunContext:
        self._attempt[run] = attempt
        seed = None if self.seed is None else self.seed(run)
        request_id = f"{self.request_prefix}{self.id.run(run, attempt)}"
        return RunContext(
            self.model,
            self.task,
            run=run,
            request_id=request_id,
            seed=seed,
            models=self.models,
            reward=self._runs.reward,
            teacher_top=self.limits.teacher_top,
        )

    def _begin(self, run: int) -> None:
        self._began[run] = time.monotonic()
        if self._timer is None and self.limits.max_group_s is not None:
            self._timer = asyncio.get_running_loop().call_later(
                self.limits.max_group_s, self._end, "group_timeout"
            )

    def _cancel_if_hopeless(self, job: asyncio.Future[list[Run | PlayedRun]]) -> None:
        if job.cancelled() or job.exception() is not None:
            return
        for r in job.result():
            # an unscored run does not count: an operator may score it later
            self._failures += r.error is not None if isinstance(r, Run) else r.failed
        if self.task.num_runs - self._failures < self.limits.needed(self.task.num_runs):
            self._end("hopeless")

    def _end(self, reason: Ended) -> None:
        """Cancel the runs in progress.

        With an empty `reason` they get no record, because the caller is cancelled or all runs are
        done.
        """
        running = [job for job in self._jobs if not job.done()]
        if running and not self._cut:
            self._cut = reason
        for job in running:
            job.cancel()
        if self._timer is not None and not reason:
            self._timer.cancel()

    async def _complete(self, runs: list[Run | PlayedRun]) -> list[PlayedRun]:
        """Return records of all runs in order, including runs that were ended early."""
        numbers = {r.number if isinstance(r, Run) else r.experiences[0].id.run for r in runs}
        played = [r for r in runs if isinstance(r, PlayedRun)]
        unscored = [r for r in runs if isinstance(r, Run)]
        unscored += [self._cut_run(n) for n in range(self.task.num_runs) if n not in numbers]
        enough = not self._cut or sum(r.error is None for r in unscored) >= self._needed
        if unscored and self.recipe.scores_group and enough:
            unscored.sort(key=lambda r: r.number)
            return await self._runs.score_together(unscored)
        for run in unscored:
            if run.error is None:
                run = replace(run, error=RunError(_ENDED[self._cut]), ended=self._cut)
            played.append(self._runs.make_rows(run))
        return sorted(played, key=lambda r: r.experiences[0].id.run)

    def _cut_run(self, run: int) -> Run:
        seconds = time.monotonic() - self._began[run] if run in self._began else 0.0
        error = RunError(_ENDED[self._cut])
        return Run(run, self._attempt.get(run, 0), seconds, error=error, ended=self._cut)

    @property
    def _needed(self) -> int:
        """Minimum number of trainable runs; more than the group has if its ending prevents
        training.
        """
        runs = self.task.num_runs
        if self._cut != "over_rollout":
            return self.limits.needed(runs)
        return min(2, runs) if self.ending is not None and self.ending.partial else runs + 1

    def _group(self, played: Sequence[PlayedRun]) -> PlayedGroup:
        rows = [x for r in played for x in r.experiences]
        accepted, reason = judge(rows, self.task.num_runs, self._needed)
        if self._cut in ("group_timeout", "over_rollout") and not accepted:
            reason = str(self._cut)
        return PlayedGroup(self.id, self.task, tuple(played), accepted, reason, self._needed)


_ENDED: dict[Ended, str] = {
    "group_timeout": "ended: the runs of its task took longer than explorer.max_group_timeout",
    "hopeless": "ended: too many runs of its task have failed",
    "over_rollout": "ended: enough tasks of its step were done (explorer.over_rollout)",
}


def judge(rows: list[Experience], num_runs: int, needed: int | None = None) -> tuple[bool, str]:
    """Return whether a group can be trained, and the reason if not.

    `needed`: trainable runs that it must have; None: two, or one in a group of one.
    """
    if needed is None:
        needed = min(2, num_runs)
    if len({r.id.run for r in rows if r.trainable}) >= needed:
        return True, ""
    if all(r.status == "failed" for r in rows):
        return False, "failed"
    if all(r.reward is None for r in rows if r.status != "failed"):
        return False, "unscored"
    return False, "too_few"

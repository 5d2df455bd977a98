"""Plays all runs of one task and judges whether the group can be trained.  Knows no buffer; the
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
from rft.types.ports import ChatModel
from rft.types.task import Task
from rft.workflow.base import NO_MODELS, RunContext
from rft.workflow.play_run import Ended, PlayedRun, Run, RunError, RunLimits, TaskRuns
from rft.workflow.recipes import Recipe, refuse_group_reward

log = logging.getLogger(__name__)
REJECTED_WEIGHTS = "rejected_weights"
Slot = Callable[[int], AbstractAsyncContextManager[None]]
"""`async with slot(n)`: room for n runs, all at once, so that two groups never wait for each
other's half.
"""


@asynccontextmanager
async def no_slot(count: int) -> AsyncIterator[None]:
    yield


@dataclass(frozen=True)
class PlayedGroup:
    """All runs of one task, in run order.  `accepted` = it can be trained; else `reason`: failed,
    unscored, too_few, group_timeout, over_rollout, no_baseline, filtered (by operators), operator
    (one broke), rejected (by the buffer), rejected_weights (their canary failed).  `needed`: runs
    with something to train that it takes, also after operators have changed rewards; more than it
    has: nothing makes it trainable any more; None: two, or the only one of a group of one.
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
    def wholly_failed(self) -> bool:
        return all(r.failed for r in self.runs)

    @property
    def versions(self) -> list[Version]:
        """Every weight version that wrote a token of the group, oldest first."""
        return sorted({s.version for r in self.rows for s in r.version_spans})

    @property
    def rewards(self) -> list[float]:
        """Rewards of the scored runs."""
        return [r.value for r in self.runs if r.value is not None]

    @property
    def why(self) -> str:
        """Why it is not accepted, with what the first run that tells more says."""
        told = [r.reason or str(r.info.get("reward_reason", "")) for r in self.rows]
        # not that it was ended because of other runs
        own = (text for text in told if text and text not in _WHY.values())
        return ": ".join(filter(None, (self.reason, next(own, ""))))

    def refused(self, why: str, *, reason: str = "rejected", traceback: str = "") -> PlayedGroup:
        """The same group with every run turned into a failed record, which can be stored: what is
        left when its rows cannot be used.
        """
        info = {"traceback": _unicode(traceback)} if traceback else None
        runs = tuple(
            replace(run, experiences=(self._gone(run, why, info),), value=None) for run in self.runs
        )
        return PlayedGroup(self.id, self.task, runs, accepted=False, reason=reason)

    def _gone(self, run: PlayedRun, why: str, info: dict[str, Any] | None) -> Experience:
        """The header row of a run; one that had failed before keeps its own reason."""
        first = run.experiences[0]
        if run.failed:
            why = first.reason
            info = {k: _unicode(v) if isinstance(v, str) else v for k, v in first.info.items()}
        told: dict[str, Any] = {
            "taskset": self.task.taskset,
            "task_index": self.task.index,
            "workflow": first.workflow,
        }
        return failed(first.id, **told, reason=_unicode(why[:300]), info=info)

    def after(self, rows: Sequence[Experience], *, accepted: bool, reason: str) -> PlayedGroup:
        """The same group as operators give it back, with the rewards of its runs; what was rejected
        before keeps its reason.
        """
        left = iter(rows)
        runs = []
        for run in self.runs:
            mine = tuple(next(left) for _ in run.experiences)
            runs.append(
                replace(
                    run,
                    experiences=mine,
                    value=next(iter(run_rewards(scored_members(mine)).values()), None),
                )
            )
        if not accepted and reason != "filtered":
            reason = self.reason or reason
        return replace(self, runs=tuple(runs), accepted=accepted, reason=reason)


class Ending:
    """Asks groups under way to end: `end` may be called once, at any time, also before they begin."""

    def __init__(self, *, partial: bool = False) -> None:
        # what is left of a group is trained if it has two trainable runs (one, if it was to have
        # one)
        self.partial = partial
        self.why: Ended = ""
        self._tell: set[Callable[[Ended], None]] = set()

    def end(self, why: Ended) -> None:
        if not self.why:
            self.why = why
            for tell in list(self._tell):
                tell(why)

    @contextmanager
    def telling(self, tell: Callable[[Ended], None]) -> Iterator[None]:
        """While open, `tell` is called when it ends; at once if it has ended."""
        self._tell.add(tell)
        if self.why:
            tell(self.why)
        try:
            yield
        finally:
            self._tell.discard(tell)


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
    """Plays `task.num_runs` runs at the same time, each inside a `slot(1)`; `seed(run)` gives its
    seeds.  Raises RftError only.

    `models` are the auxiliary ones, by name.  Scoring is inside the slot too, except where the
    reward sees all runs at once. `ending` may end it early.  With `baseline` the task is also
    played once at temperature 0, inside that slot, and its reward stands in the info of every row
    as "baseline_reward"; the reward must see each run alone.
    """
    play = _Play(task, recipe, model, id, limits, slot, seed, request_prefix, models, ending)
    if baseline is None:
        return await play.run()
    refuse_group_reward(recipe, task)
    plays = (
        play,
        replace(play, task=_greedy(task), slot=baseline, request_prefix=f"{request_prefix}greedy-"),
    )
    both = [asyncio.ensure_future(play.run()) for play in plays]
    try:
        group, greedy = await asyncio.gather(*both)
    finally:
        for job in both:
            job.cancel()
    return _with_baseline(group, greedy)


def _greedy(task: Task) -> Task:
    sampling = msgspec.structs.replace(
        task.sampling, temperature=0.0, top_p=1.0, top_k=-1, min_p=0.0
    )
    return msgspec.structs.replace(task, num_runs=1, sampling=sampling)


def _with_baseline(group: PlayedGroup, greedy: PlayedGroup) -> PlayedGroup:
    """The group with the reward of the greedy run; without one it cannot be trained."""
    value = greedy.runs[0].value
    if value is None:
        why = greedy.runs[0].experiences[0].reason
        log.warning("group %s: its greedy run has no reward: %s", group.id, why)
        return replace(
            group,
            accepted=False,
            reason=group.reason or "no_baseline",
            needed=group.task.num_runs + 1,
        )
    runs = tuple(
        replace(run, experiences=tuple(_told(x, value) for x in run.experiences))
        for run in group.runs
    )
    return replace(group, runs=runs)


def _unicode(text: str) -> str:
    """Halves of surrogate pairs, which a text of errors may hold and no file, written as escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def _told(row: Experience, baseline: float) -> Experience:
    return (
        row
        if row.status == "failed"
        else msgspec.structs.replace(row, info={**row.info, BASELINE_KEY: baseline})
    )


@dataclass(eq=False)
class _Play:
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
        self._lost = 0  # runs that failed

    async def run(self) -> PlayedGroup:
        numbers = range(self.task.num_runs)
        make = (
            [self._together()] if self.recipe.plays_group else [self._one(run) for run in numbers]
        )
        self._jobs = [asyncio.ensure_future(coroutine) for coroutine in make]
        if self.limits.stop_hopeless:
            for job in self._jobs:
                job.add_done_callback(self._hope)
        try:
            with self.ending.telling(self._end) if self.ending is not None else nullcontext():
                await asyncio.wait(self._jobs, return_when=asyncio.FIRST_EXCEPTION)
            done = [
                r for job in self._jobs if job.done() and not job.cancelled() for r in job.result()
            ]
        finally:
            self._end("")
        return self._group(await self._scored(done))

    async def _one(self, run: int) -> list[Run | PlayedRun]:
        async with self.slot(1):
            self._begins(run)
            played = await self._runs.play_one(self._context, run)
            if self.recipe.scores_group:
                return [played]
            return [await self._runs.score_one(played)]

    async def _together(self) -> list[Run | PlayedRun]:
        async with self.slot(self.task.num_runs):
            for run in range(self.task.num_runs):
                self._begins(run)
            runs = await self._runs.play_together(self._context)
        if self.recipe.scores_group:
            return list(runs)
        return list(await asyncio.gather(*(self._runs.score_one(r) for r in runs)))

    def _context(self, run: int, attempt: int) -> RunContext:
        self._attempt[run] = attempt
        own = None if self.seed is None else self.seed(run)
        request_id = f"{self.request_prefix}{self.id.run(run, attempt)}"
        return RunContext(
            self.model, self.task, run=run, request_id=request_id, seed=own, models=self.models
        )

    def _begins(self, run: int) -> None:
        self._began[run] = time.monotonic()
        if self._timer is None and self.limits.max_group_s is not None:
            self._timer = asyncio.get_running_loop().call_later(
                self.limits.max_group_s, self._end, "group_timeout"
            )

    def _hope(self, job: asyncio.Future[list[Run | PlayedRun]]) -> None:
        if job.cancelled() or job.exception() is not None:
            return
        for r in job.result():
            # an operator may score it yet
            self._lost += r.error is not None if isinstance(r, Run) else r.failed
        if self.task.num_runs - self._lost < self.limits.needed(self.task.num_runs):
            self._end("hopeless")

    def _end(self, why: Ended) -> None:
        """Ends the runs that are under way.  Empty: they are not to be accounted for (the caller is
        cancelled, or all are done).
        """
        left = [job for job in self._jobs if not job.done()]
        if left and not self._cut:
            self._cut = why
        for job in left:
            job.cancel()
        if self._timer is not None and not why:
            self._timer.cancel()

    async def _scored(self, done: list[Run | PlayedRun]) -> list[PlayedRun]:
        """All runs in order; those that were cut short are records that say so."""
        there = {r.number if isinstance(r, Run) else r.experiences[0].id.run for r in done}
        played = [r for r in done if isinstance(r, PlayedRun)]
        waiting = [r for r in done if isinstance(r, Run)]
        waiting += [self._cut_short(run) for run in range(self.task.num_runs) if run not in there]
        enough = not self._cut or sum(r.error is None for r in waiting) >= self._needed
        if waiting and self.recipe.scores_group and enough:
            waiting.sort(key=lambda r: r.number)
            return await self._runs.score_together(waiting)
        for r in waiting:
            ended = (
                r
                if r.error is not None
                else replace(r, error=RunError(_WHY[self._cut]), ended=self._cut)
            )
            played.append(self._runs.record(ended))
        return sorted(played, key=lambda r: r.experiences[0].id.run)

    def _cut_short(self, run: int) -> Run:
        took = time.monotonic() - self._began[run] if run in self._began else 0.0
        return Run(
            run, self._attempt.get(run, 0), took, error=RunError(_WHY[self._cut]), ended=self._cut
        )

    @property
    def _needed(self) -> int:
        """How many runs of the group must be trainable; more than there are where its end leaves
        nothing to train.
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


_WHY: dict[Ended, str] = {
    "group_timeout": "ended: the runs of its task took longer than explorer.max_group_timeout",
    "hopeless": "ended: too many runs of its task have failed",
    "over_rollout": "ended: enough tasks of its step were done (explorer.over_rollout)",
}


def judge(rows: list[Experience], num_runs: int, needed: int | None = None) -> tuple[bool, str]:
    """Whether a group can be trained: `needed` runs with something to train; None: two, or the only
    one of a group of one.
    """
    if len({r.id.run for r in rows if r.trainable}) >= (
        min(2, num_runs) if needed is None else needed
    ):
        return True, ""
    if all(r.status == "failed" for r in rows):
        return False, "failed"
    return False, "unscored" if all(
        r.reward is None for r in rows if r.status != "failed"
    ) else "too_few"

"""Plays all runs of one task and judges whether the group can be trained.  Knows no buffer; the caller appends the rows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from rft.types.experience import Experience, failed
from rft.types.ids import GroupId, Version
from rft.types.ports import ChatModel
from rft.types.task import Task
from rft.workflow.base import NO_MODELS, RunContext
from rft.workflow.build import Recipe
from rft.workflow.run import Limits, Played, Run, play_one, play_together, score_one, score_together

Slot = Callable[[], AbstractAsyncContextManager[None]]


@asynccontextmanager
async def no_slot() -> AsyncIterator[None]:
    yield


@dataclass(frozen=True)
class Group:
    """All runs of one task, in run order.  `accepted` = it can be trained; else `reason`: failed, unscored, too_few,
    filtered (by operators), operator (one broke), rejected (by the buffer)."""

    id: GroupId
    task: Task
    runs: tuple[Played, ...]
    accepted: bool
    reason: str

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

    def refused(self, why: str, *, reason: str = "rejected", traceback: str = "") -> Group:
        """The same group with every run turned into a failed record: what is left when its rows cannot be used."""
        info = {"traceback": traceback} if traceback else None
        runs = tuple(
            run if run.failed else replace(run, experiences=(self._gone(run, why, info),), value=None) for run in self.runs
        )
        return Group(self.id, self.task, runs, accepted=False, reason=reason)

    def _gone(self, run: Played, why: str, info: dict[str, Any] | None) -> Experience:
        first = run.experiences[0]
        return failed(
            first.id,
            taskset=self.task.taskset,
            task_index=self.task.index,
            workflow=first.workflow,
            reason=why[:300],
            info=info,
        )

    def after(self, rows: Sequence[Experience], *, accepted: bool, reason: str) -> Group:
        """The same group with other rows for the same runs.  A run of one row has that row's reward."""
        left, runs = iter(rows), []
        for run in self.runs:
            mine = tuple(next(left) for _ in run.experiences)
            runs.append(replace(run, experiences=mine, value=mine[0].reward if len(mine) == 1 else run.value))
        return Group(self.id, self.task, tuple(runs), accepted, reason)


async def run_group(
    task: Task,
    recipe: Recipe,
    model: ChatModel,
    id: GroupId,
    *,
    limits: Limits,
    slot: Slot = no_slot,
    seed: Callable[[int], Callable[[int], int]] | None = None,
    request_prefix: str = "",
    models: Mapping[str, ChatModel] = NO_MODELS,
) -> Group:
    """Plays `task.num_runs` runs at the same time, each inside a `slot()`; `seed(run)` gives its seeds.  Raises RftError only.

    `models` are the auxiliary ones, by name.  Scoring is inside the slot too, except where the reward sees all runs at once.
    """

    def context(run: int, attempt: int) -> RunContext:
        own = None if seed is None else seed(run)
        return RunContext(model, task, run=run, request_id=f"{request_prefix}{id.run(run, attempt)}", seed=own, models=models)

    async def one(run: int) -> Run | Played:
        async with slot():
            played = await play_one(task, recipe, context, run, limits=limits, group=id)
            return played if recipe.scores_group else await score_one(task, recipe, played, limits=limits, group=id)

    async def together() -> list[Run]:
        async with AsyncExitStack() as slots:
            for _ in range(task.num_runs):
                await slots.enter_async_context(slot())
            return await play_together(task, recipe, [context(run, 0) for run in range(task.num_runs)], limits=limits)

    done: list[Run | Played]
    if recipe.plays_group:
        done = list(await together())
    else:
        jobs = [asyncio.ensure_future(one(run)) for run in range(task.num_runs)]
        try:
            done = list(await asyncio.gather(*jobs))
        finally:
            for job in jobs:
                job.cancel()
    played = [r for r in done if isinstance(r, Played)]
    if waiting := [r for r in done if isinstance(r, Run)]:
        if recipe.scores_group:
            played += await score_together(task, recipe, waiting, limits=limits, group=id)
        else:
            played += await asyncio.gather(*(score_one(task, recipe, r, limits=limits, group=id) for r in waiting))
    runs = tuple(played)
    accepted, reason = judge([x for r in runs for x in r.experiences], task.num_runs)
    return Group(id, task, runs, accepted, reason)


def judge(rows: list[Experience], num_runs: int) -> tuple[bool, str]:
    """Whether a group can be trained: two runs with something to train, or the only one of a group of one."""
    if len({r.id.run for r in rows if r.trainable}) >= min(2, num_runs):
        return True, ""
    if all(r.status == "failed" for r in rows):
        return False, "failed"
    return False, "unscored" if all(r.reward is None for r in rows if r.status != "failed") else "too_few"

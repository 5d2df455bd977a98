"""Plays all runs of one task and judges whether the group can be trained.  Knows no buffer; the caller appends the rows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace

from rft.types.experience import Experience, failed
from rft.types.ids import GroupId, Version
from rft.types.ports import ChatModel
from rft.types.task import Task
from rft.workflow.build import Recipe
from rft.workflow.run import Limits, Played, run_one

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
        return [r.experience for r in self.runs]

    @property
    def wholly_failed(self) -> bool:
        return all(r.status == "failed" for r in self.rows)

    @property
    def versions(self) -> list[Version]:
        """Every weight version that wrote a token of the group, oldest first."""
        return sorted({s.version for r in self.rows for s in r.version_spans})

    @property
    def rewards(self) -> list[float]:
        """Rewards of the scored runs."""
        return [r.reward for r in self.rows if r.reward is not None]

    def refused(self, why: str, *, reason: str = "rejected", traceback: str = "") -> Group:
        """The same group with every run turned into a failed record: what is left when its rows cannot be used."""
        info = {"traceback": traceback} if traceback else None
        runs = tuple(
            run
            if run.experience.status == "failed"
            else replace(
                run,
                experience=failed(
                    run.experience.id,
                    taskset=self.task.taskset,
                    task_index=self.task.index,
                    workflow=run.experience.workflow,
                    reason=why[:300],
                    info=info,
                ),
            )
            for run in self.runs
        )
        return Group(self.id, self.task, runs, accepted=False, reason=reason)

    def after(self, rows: Sequence[Experience], *, accepted: bool, reason: str) -> Group:
        """The same group with other rows for the same runs."""
        runs = tuple(replace(run, experience=row) for run, row in zip(self.runs, rows, strict=True))
        return Group(self.id, self.task, runs, accepted, reason)


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
) -> Group:
    """Plays `task.num_runs` runs at the same time, each inside a `slot()`; `seed(run)` gives its seeds.  Raises RftError only."""

    async def one(run: int) -> Played:
        async with slot():
            own = None if seed is None else seed(run)
            return await run_one(task, recipe, model, id, run, limits=limits, seed=own, request_prefix=request_prefix)

    jobs = [asyncio.ensure_future(one(run)) for run in range(task.num_runs)]
    try:
        runs = tuple(await asyncio.gather(*jobs))
    finally:
        for job in jobs:
            job.cancel()
    accepted, reason = judge([r.experience for r in runs], task.num_runs)
    return Group(id, task, runs, accepted, reason)


def judge(rows: list[Experience], num_runs: int) -> tuple[bool, str]:
    """Whether a group can be trained: two trainable members, or the only one of a group of one."""
    if sum(r.trainable for r in rows) >= min(2, num_runs):
        return True, ""
    if all(r.status == "failed" for r in rows):
        return False, "failed"
    return False, "unscored" if all(r.reward is None for r in rows if r.status != "failed") else "too_few"

"""Evaluation: held-out tasks played with their own sampling arguments, scored, reported, and never stored for training.

A run that fails has no score.  It is counted in eval/<taskset>/failed and left out of every mean, so a broken judge or workflow
does not look like a worse model; if all runs of a taskset fail, the program stops.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from statistics import fmean, pstdev
from typing import Any

from rft.errors import RunFailed
from rft.explorer.metrics import lengths
from rft.taskset.base import Taskset
from rft.types.ids import GroupId, Version
from rft.types.ports import ChatModel
from rft.workflow.base import NO_MODELS
from rft.workflow.build import Recipes
from rft.workflow.group import Group, Slot, run_group
from rft.workflow.run import Limits
from rft.workflow.seeds import seed_for

PASS = 1.0  # a run passes when its reward reaches this


async def play_taskset(
    taskset: Taskset,
    order: Sequence[int],
    recipes: Recipes,
    model: ChatModel,
    version: Version,
    *,
    limits: Limits,
    slot: Slot,
    explorer: int,
    seed: int | None,
    models: Mapping[str, ChatModel] = NO_MODELS,
) -> list[Group]:
    """The tasks of an evaluation taskset in this order, each `num_runs` times.  With `seed`, each time with the same random numbers."""
    name = taskset.settings.name

    async def one(index: int) -> Group:
        task = taskset.task(index)
        return await run_group(
            task,
            await recipes.get(task),
            model,
            GroupId(version.lineage, explorer, version.step, index),
            limits=limits,
            slot=slot,
            seed=None if seed is None else lambda run: seed_for(seed, "eval", name, index, run),
            request_prefix=f"eval-{name}-",
            models=models,
        )

    jobs = [asyncio.ensure_future(one(i)) for i in order]
    try:
        return list(await asyncio.gather(*jobs))
    finally:
        for job in jobs:
            job.cancel()


def eval_metrics(name: str, groups: Sequence[Group], num_runs: int, wall_s: float) -> dict[str, float]:
    """Means over tasks, n runs each: std@n is the population standard deviation inside a task; pass@n = some run scored >= 1.

    Raises RunFailed if no run was scored.
    """
    prefix, n = f"eval/{name}", num_runs
    rows = [r for g in groups for r in g.rows]
    runs = [r for g in groups for r in g.runs]
    scored = [g.rewards for g in groups if g.rewards]
    if not scored:
        bad = next((r for r in rows if r.status == "failed"), None)
        why = (
            f"the first one: {bad.reason}\n{bad.info.get('traceback', '')}"
            if bad is not None
            else "none was scored; name a reward"
        )
        raise RunFailed(f"evaluation on {name!r}: all {len(runs)} runs ended without a score; {why}")
    out = {
        f"{prefix}/mean@{n}": fmean(fmean(r) for r in scored),
        f"{prefix}/std@{n}": fmean(pstdev(r) for r in scored),
        f"{prefix}/best@{n}": fmean(max(r) for r in scored),
        f"{prefix}/pass@{n}": fmean(max(r) >= PASS for r in scored),
        f"{prefix}/tasks": float(len(groups)),
        f"{prefix}/runs": float(len(runs)),
        f"{prefix}/failed": float(sum(r.failed for r in runs)),
        f"{prefix}/time": wall_s,
    }
    if all(g.task.sampling.temperature == 0 for g in groups):
        out[f"{prefix}/greedy"] = out[f"{prefix}/mean@{n}"]
    return out | lengths(prefix, [r for r in rows if r.status != "failed"])


def sample_rows(groups: Sequence[Group], limit: int | None = 64) -> list[dict[str, Any]]:
    """A table for people of at most `limit` rows, first runs first: {task, run, prompt, answer, truth, reward, status}."""
    pairs = sorted(((r.experiences[-1].id.run, g.task.index, r, g) for g in groups for r in g.runs), key=lambda p: p[:2])
    return [
        {
            "task": index,
            "run": number,
            "prompt": run.experiences[0].prompt_text or g.task.prompt or "",
            "answer": run.experiences[-1].response_text,
            "truth": g.task.truth,
            "reward": run.value,
            "status": f"failed: {run.experiences[0].reason}" if run.failed else run.experiences[-1].status,
        }
        for number, index, run, g in pairs[:limit]
    ]

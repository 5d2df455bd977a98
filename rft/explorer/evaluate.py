"""Evaluation: run held-out tasks with their own sampling arguments, score and report them, and
never store them for training.

A failed run has no score.  It is counted in eval/<taskset>/failed and left out of every mean, so a
broken judge or workflow does not look like a worse model; if all runs of a taskset fail, the
program stops.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from statistics import fmean, pstdev, stdev
from typing import Any

from rft.engine.settings import ExternalPolicyConfig
from rft.errors import RunFailed
from rft.explorer.rollout_metrics import lengths, response_tokens
from rft.explorer.settings import ExplorerSettings
from rft.explorer.state import Slots
from rft.plugins import load_all
from rft.reward import judge_metrics
from rft.sync.waits import all_of
from rft.taskset.base import Taskset
from rft.taskset.open_source import open_taskset
from rft.taskset.task_order import evaluation_order
from rft.types.experience import Experience
from rft.types.ids import GroupId, Version
from rft.types.metrics import MetricRecord, reduce
from rft.types.ports import ChatModel, Measured, MetricSink
from rft.worker import job_pool
from rft.worker.waiting import works
from rft.workflow.base import NO_MODELS, seed_for
from rft.workflow.group import PlayedGroup, run_group
from rft.workflow.play_run import RunLimits
from rft.workflow.recipes import Recipes

log = logging.getLogger(__name__)
PASS = 1.0  # minimum reward of a passing run


class Evaluator:
    """Plays the evaluation tasksets with the weights that the model currently serves, and reports
    metrics.

    Before reporting, `verified` is awaited for every version that generated a token; if it returns
    False, the taskset is played again.
    """

    def __init__(
        self,
        settings: ExplorerSettings,
        recipes: Recipes,
        model: ChatModel,
        sink: MetricSink,
        slots: Slots,
        *,
        prefix: str = "eval",
        verified: Callable[[Version], Awaitable[bool]] | None = None,
        models: Mapping[str, ChatModel] = NO_MODELS,
    ) -> None:
        self.settings = settings
        self._recipes = recipes
        self._model = model
        self._sink = sink
        self._slots = slots
        self._prefix = prefix
        self._verified = verified
        self._models = models
        self._limits = RunLimits(settings.max_timeout_s, settings.max_retry_times)
        self.tasksets = {t: evaluation_order(t) for t in map(open_taskset, settings.eval_tasksets)}

    async def announce(self, version: Version) -> None:
        """Announce the evaluation of `version`, so that its checkpoint is kept until the evaluation
        ends.
        """
        values = {f"{self._prefix}/{t.settings.name}/due": 1.0 for t in self.tasksets}
        await self._sink.log(MetricRecord(role="eval", step=version.step, values=values))

    async def run(self, version: Version) -> dict[str, float]:
        """Play every taskset once, report at the train step of `version`, and return the metrics."""
        metrics: dict[str, float] = {}
        for taskset, order in self.tasksets.items():
            name = taskset.settings.name
            began = time.monotonic()
            groups = await self._play(taskset, order, version)
            while not await self._all_verified(groups):
                log.warning("evaluation on %s is repeated: the canary of its weights failed", name)
                groups = await self._play(taskset, order, version)
            played_s = time.monotonic() - began
            values = eval_metrics(
                f"{self._prefix}/{name}", groups, taskset.settings.num_runs, played_s
            )
            if self._verified is None:  # fixed weights have no version
                values = {k: v for k, v in values.items() if "/model_version/" not in k}
            await self._sink.log(MetricRecord(role="eval", step=version.step, values=values))
            if self.settings.eval_samples != 0:
                rows = sample_rows(groups, self.settings.eval_samples)
                await self._sink.samples(f"{self._prefix}/{name}", version.step, rows)
            metrics |= values
        return metrics

    async def _all_verified(self, groups: Sequence[PlayedGroup]) -> bool:
        if self._verified is None:
            return True
        return all(
            [await self._verified(used) for used in sorted({v for g in groups for v in g.versions})]
        )

    async def _play(
        self, taskset: Taskset, order: Sequence[int], version: Version
    ) -> list[PlayedGroup]:
        """Play the tasks in this order, each `num_runs` times, with the same random numbers in every
        evaluation: two of them differ by their weights, not by chance.
        """
        s = self.settings
        name = taskset.settings.name
        done = 0

        async def play_task(index: int) -> PlayedGroup:
            nonlocal done
            task = taskset.task(index)
            group = await run_group(
                task,
                await self._recipes.get(task),
                self._model,
                GroupId(version.lineage, s.index, version.step, index),
                limits=self._limits,
                slot=lambda count: self._slots.take(count, behind=s.eval_in_background),
                seed=lambda run: seed_for(s.seed, "eval", name, index, run),
                request_prefix=f"{self._prefix}-{name}-",
                models=self._models,
            )
            done += 1
            return group

        with works(lambda: f"evaluating {name}: {done} of {len(order)} tasks"):
            return await all_of(*map(play_task, order))


async def bench(
    settings: ExplorerSettings,
    model: ChatModel,
    sink: MetricSink,
    version: Version,
    *,
    models: Mapping[str, ChatModel] = NO_MODELS,
) -> dict[str, float]:
    """Play every evaluation taskset once, report as bench/<taskset>/... at the train step of
    `version`, and return the metrics.

    Raises ConfigError and PluginError for names in tasksets, RunFailed if all runs of a taskset
    ended without a score.
    """
    load_all(settings.plugin_dirs)
    recipes = Recipes()
    evaluator = Evaluator(
        settings,
        recipes,
        model,
        sink,
        Slots(settings.max_concurrent_runs),
        prefix="bench",
        models=models,
    )
    for taskset in evaluator.tasksets:
        recipes.find(taskset.task(0))
    try:
        with works("preparing rewards"):
            await recipes.prepare(models)
        metrics = await evaluator.run(version)
        if judges := judge_metrics.counts():
            await sink.log(MetricRecord(role="eval", step=version.step, values=judges))
        return metrics
    finally:
        await recipes.close()
        await asyncio.to_thread(job_pool.close_all)


async def spent(
    server: ExternalPolicyConfig, model: Measured, sink: MetricSink
) -> dict[str, float]:
    """Report the tokens and cost of a server's answers, by the server's own token counts, as
    bench/..., and return them.
    """
    counted = reduce(await model.metrics())
    prompt_tokens = counted["engine/prompt_tokens"]
    written = counted["engine/generated_tokens"]
    cost = (
        prompt_tokens * server.price_per_1k_prompt_tokens
        + written * server.price_per_1k_completion_tokens
    ) / 1000
    values = {"bench/prompt_tokens": prompt_tokens, "bench/completion_tokens": written}
    if server.price_per_1k_prompt_tokens or server.price_per_1k_completion_tokens:
        values["bench/cost_usd"] = cost
    await sink.log(MetricRecord(role="eval", step=0, values=values))
    return values


def eval_metrics(
    prefix: str, groups: Sequence[PlayedGroup], num_runs: int, wall_s: float
) -> dict[str, float]:
    """Return means over tasks with n runs each: std@n is the population standard deviation within a
    task, sem@n the standard error of mean@n over tasks as a sample.

    best@k, worst@k and pass@k (a run scored >= 1) are exact averages over k runs drawn from a
    task's n; k = 1, 2, 4, ... and n.  Tasks with fewer than k scored runs are left out of these.
    Raises RunFailed if no run was scored.
    """
    n = num_runs
    rows = [r for g in groups for r in g.rows]
    runs = [r for g in groups for r in g.runs]
    scored = [g.rewards for g in groups if g.rewards]
    if not scored:
        bad = next((r for r in rows if r.status == "failed"), None)
        text = (
            f"the first one: {bad.reason}\n{bad.info.get('traceback', '')}"
            if bad is not None
            else "none was scored; name a reward"
        )
        raise RunFailed(
            f"evaluation on {prefix.partition('/')[2]!r}: all {len(runs)} runs ended without a "
            f"score; {text}"
        )
    versions = [v.step for g in groups for v in g.versions]
    out = {
        f"{prefix}/mean@{n}": fmean(fmean(r) for r in scored),
        f"{prefix}/std@{n}": fmean(pstdev(r) for r in scored),
        **(
            {f"{prefix}/sem@{n}": stdev(map(fmean, scored)) / math.sqrt(len(scored))}
            if len(scored) > 1
            else {}
        ),
        **at_k(prefix, scored, n),
        **_part_means(prefix, rows),
        f"{prefix}/tasks": float(len(groups)),
        f"{prefix}/runs": float(len(runs)),
        f"{prefix}/failed": float(sum(r.value is None for r in runs)),
        f"{prefix}/time": wall_s,
    }
    if versions:  # a server reports no versions
        out |= {
            f"{prefix}/model_version/min": float(min(versions)),
            f"{prefix}/model_version/max": float(max(versions)),
        }
    if all(g.task.sampling.temperature == 0 for g in groups):
        out[f"{prefix}/greedy"] = out[f"{prefix}/mean@{n}"]
    sampled = [r.experiences for r in runs if not r.failed and r.experiences[0].has_logprobs]
    return out | lengths(prefix, sampled, list(map(response_tokens, sampled)))


def _part_means(prefix: str, rows: Sequence[Experience]) -> dict[str, float]:
    """Return the mean of each reward part over the rows that have it."""
    parts: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.reward_parts.items():
            parts.setdefault(name, []).append(value)
    return {f"{prefix}/parts/{name}": fmean(values) for name, values in parts.items()}


def at_k(prefix: str, scored: Sequence[Sequence[float]], n: int) -> dict[str, float]:
    """Return best@k, worst@k and pass@k of tasks from the rewards of their runs, for k = 1, 2, 4,
    ... and n.
    """
    out: dict[str, float] = {}
    for k in sorted({n, *(1 << i for i in range(n.bit_length()))}):
        tasks = [r for r in scored if len(r) >= k]
        if not tasks:
            continue
        out[f"{prefix}/pass@{k}"] = fmean(_pass_at(r, k) for r in tasks)
        if k > 1 or n == 1:
            out[f"{prefix}/best@{k}"] = fmean(_best_at(r, k) for r in tasks)
            out[f"{prefix}/worst@{k}"] = 0.0 - fmean(_best_at([-x for x in r], k) for r in tasks)
    return out


def _best_at(rewards: Sequence[float], k: int) -> float:
    """Return the mean maximum over all ways to draw k of the rewards; the i-th smallest is the
    maximum of C(i - 1, k - 1) draws.
    """
    ways = math.comb(len(rewards), k)
    return sum(math.comb(i, k - 1) / ways * r for i, r in enumerate(sorted(rewards)))


def _pass_at(rewards: Sequence[float], k: int) -> float:
    """Return 1 - C(n - c, k) / C(n, k) with c of n runs passing (arXiv:2107.03374)."""
    n = len(rewards)
    passed = sum(r >= PASS for r in rewards)
    return 1.0 - math.comb(n - passed, k) / math.comb(n, k)


def sample_rows(groups: Sequence[PlayedGroup], limit: int | None = 64) -> list[dict[str, Any]]:
    """Return a readable table of at most `limit` rows, first runs first: {task, run, prompt,
    answer, truth, reward, status}.
    """
    pairs = sorted(
        ((r.experiences[-1].id.run, g.task.index, r, g) for g in groups for r in g.runs),
        key=lambda p: p[:2],
    )
    return [
        {
            "task": index,
            "run": number,
            "prompt": run.experiences[0].prompt_text or g.task.prompt or "",
            "answer": run.experiences[-1].response_text,
            "truth": g.task.truth,
            "reward": run.value,
            "status": f"failed: {run.experiences[0].reason}"
            if run.failed
            else run.experiences[-1].status,
        }
        for number, index, run, g in pairs[:limit]
    ]

"""Metrics of one explore batch.  Depends on no sink."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, pstdev

import numpy as np

from rft.explorer.collapse_metrics import collapse_metrics
from rft.types.credit import shared_parts
from rft.types.experience import Experience
from rft.types.metrics import Metric, reduce
from rft.types.ports import ChatModel, Measured
from rft.workflow.group import PlayedGroup
from rft.workflow.play_run import PlayedRun

PERCENTILES = (10, 50, 90)
_ENDED = ("group_timeout", "hopeless", "over_rollout")
_COUNTED = (
    "requests",
    "prompt_tokens",
    "prefilled_tokens",
    "recomputed_tokens",
    "generated_tokens",
    "tokenization_differs",
    "steps",
    "preemptions",
    "lost",
    "stalled",
    "asked_again",
)
_OVER_STEPS = {
    "running": "running_steps",
    "waiting": "waiting_steps",
    "kv_cache_usage": "kv_cache_steps",
}


class EngineMetrics:
    """Changes of a model's engine counters since the last call, including all callers (rollouts,
    evaluations, the canary).
    """

    def __init__(
        self,
        model: ChatModel,
        clock: Callable[[], float] = time.monotonic,
        *,
        prefix: str = "engine",
    ) -> None:
        self._model = model
        self._clock = clock
        self._prefix = prefix
        self._last_time = clock()
        self._before = dict[str, float]()

    async def since(self) -> dict[str, float]:
        """Return metrics named as in docs/reference/metrics.md, as far as the engine reports them;
        empty for a model without counters.
        """
        if not isinstance(self._model, Measured):
            return {}
        now, time = reduce(await self._model.metrics()), self._clock()
        more = {
            n.removeprefix("engine/"): v - self._before.get(n, 0.0)
            for n, v in now.items()
            if n.startswith("engine/")
        }
        passed = time - self._last_time
        self._last_time = time
        self._before = now
        out = {name: more[name] for name in _COUNTED if name in more}
        if "generated_tokens" in more:
            out["tokens_per_s"] = more["generated_tokens"] / max(passed, 1e-9)
        if steps := more.get("steps"):
            out |= {f"{name}/mean": more[total] / steps for name, total in _OVER_STEPS.items()}
        if asked_tokens := more.get("prefix_cache_queries"):
            out["prefix_cache_hit_rate"] = more["prefix_cache_hits"] / asked_tokens
        return {f"{self._prefix}/{name}": value for name, value in out.items()}


def engine_metrics(policy: ChatModel, auxiliary: Mapping[str, ChatModel]) -> list[EngineMetrics]:
    """Return the counters of the policy, and of each auxiliary model under its first name."""
    sources = [EngineMetrics(policy)]
    ids = {id(policy)}
    for name, model in auxiliary.items():
        if id(model) not in ids:
            ids.add(id(model))
            sources.append(EngineMetrics(model, prefix=f"auxiliary/{name}"))
    return sources


def _run_counts(groups: Sequence[PlayedGroup], runs: Sequence[PlayedRun]) -> dict[str, float]:
    counts = {
        "groups/accepted": sum(g.accepted for g in groups),
        "groups/rejected": sum(not g.accepted for g in groups),
        "groups/partial": sum(g.accepted and any(run.failed for run in g.runs) for g in groups),
        "runs": len(runs),
        "failed": sum(run.failed for run in runs),
        "retries": sum(run.attempts - 1 for run in runs),
        "timeouts": sum(run.ended == "timeout" for run in runs),
        **{f"ended/{reason}": sum(run.ended == reason for run in runs) for reason in _ENDED},
    }
    return {f"rollout/{name}": float(count) for name, count in counts.items()}


def rollout_metrics(
    groups: Sequence[PlayedGroup], wall_s: float, percentiles: bool = False
) -> dict[str, float]:
    """Return metrics of groups as played, named as in docs/reference/metrics.md.

    Rewards cover all scored runs, lengths (tokens) all runs with a sequence.  `percentiles` adds
    NAME/p10, /p50 and /p90.
    """
    runs = [run for g in groups for run in g.runs]
    played = [run.experiences for run in runs if not run.failed]
    rows = [x for experiences in played for x in experiences]
    responses = list(map(response_tokens, played))
    out = _run_counts(groups, runs)
    out["rollout/untrainable"] = float(responses.count(0))
    out["rollout/time/batch"] = wall_s
    begun = [run for run in runs if run.run_s]  # other runs ended before they got a slot
    if begun:
        out["rollout/time/run"] = fmean(run.run_s for run in begun)
        out["rollout/time/reward"] = fmean(run.reward_s for run in begun)
    rewards = [reward for g in groups for reward in g.rewards]
    if rewards:
        out["rollout/reward/mean"] = fmean(rewards)
        out["rollout/reward/std"] = pstdev(rewards)
        out["rollout/reward/max"] = max(rewards)
        out["rollout/reward/min"] = min(rewards)
    by_taskset: defaultdict[str, list[float]] = defaultdict(list)
    for g in groups:
        by_taskset[g.task.taskset] += g.rewards
    out |= {
        f"rollout/{name}/reward/mean": fmean(rewards)
        for name, rewards in by_taskset.items()
        if rewards
    }
    parts = {name for r in rows for name in r.reward_parts}
    named = _equal_parts(groups)
    for name, values in _named(runs).items():
        named[f"rollout/{name}/mean"] = fmean(values)
        if name in parts:
            named[f"rollout/{name}/std"] = pstdev(values)
    if rows:
        out |= (
            lengths("rollout", played, responses)
            | {"rollout/rows": float(len(rows))}
            | collapse_metrics(groups)
        )
        out["rollout/tokens_per_s"] = sum(responses) / max(wall_s, 1e-9)
        if steps := [r.oldest_version.step for r in rows if r.oldest_version is not None]:
            out["rollout/model_version"] = fmean(steps)
        out["rollout/clipped_logprobs"] = float(sum(r.clipped_logprobs for r in rows))
    if percentiles:
        out |= _percentiles("rollout/reward", rewards)
        out |= _percentiles("rollout/response_length", responses)
        out |= _percentiles(
            "rollout/prompt_length", [r.num_tokens - r.num_response_tokens for r in rows]
        )
        out |= _percentiles("rollout/time/run", [run.run_s for run in begun])
    if several := [g.rewards for g in groups if len(g.rewards) > 1]:
        out["frac_reward_zero_std"] = fmean(len(set(rewards)) == 1 for rewards in several)
    return named | out  # a part named "reward" does not hide the reward


def pipeline_metrics(metrics: Sequence[Metric]) -> dict[str, float]:
    """Return the operators' metrics of a batch, each with its own reduction."""
    return {f"experience_pipeline/{name}": value for name, value in reduce(metrics).items()}


def lengths(
    prefix: str, runs: Sequence[Sequence[Experience]], responses: Sequence[int]
) -> dict[str, float]:
    """Return length and truncation metrics of runs with a sequence, each given as its rows, with
    their `response_tokens`; prompts are counted per row.
    """
    if not runs:
        return {}
    rows = [r for run_rows in runs for r in run_rows]
    return {
        f"{prefix}/response_length/mean": fmean(responses),
        f"{prefix}/response_length/max": float(max(responses)),
        f"{prefix}/prompt_length/mean": (sum([r.num_tokens for r in rows]) - sum(responses))
        / len(rows),
        f"{prefix}/truncated_ratio": fmean(
            ["truncated" in [r.status for r in run_rows] for run_rows in runs]
        ),
    }


def response_tokens(rows: Sequence[Experience]) -> int:
    """Return the trained tokens of a run."""
    return sum([r.num_response_tokens for r in rows])


def _percentiles(prefix: str, values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    return {
        f"{prefix}/p{p}": float(v)
        for p, v in zip(PERCENTILES, np.percentile(values, PERCENTILES), strict=True)
    }


def _equal_parts(groups: Sequence[PlayedGroup]) -> dict[str, float]:
    """Return for each reward part the share of groups whose runs all have equal values of the part.

    Groups with fewer than two runs that have the part do not count.
    """
    is_equal: defaultdict[str, list[bool]] = defaultdict(list)
    for group in groups:
        runs = [shared_parts([row.reward_parts for row in run.experiences]) for run in group.runs]
        for name in {name for parts in runs for name in parts}:
            values = [parts[name] for parts in runs if name in parts]
            if len(values) > 1:
                is_equal[name].append(len(set(values)) == 1)
    return {f"rollout/{name}/frac_zero_std": fmean(equal) for name, equal in is_equal.items()}


def _named(runs: Sequence[PlayedRun]) -> dict[str, list[float]]:
    """Return reward parts and workflow metrics by name: for each run the mean over its rows."""
    by_source: defaultdict[str, list[float]] = defaultdict(list)
    for rows in ([r.reward_parts | r.metrics for r in run.experiences] for run in runs):
        for name in {name for row in rows for name in row}:
            by_source[name].append(fmean(row[name] for row in rows if name in row))
    return by_source

"""Numbers of one explore batch, for people.  Knows no sink."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, pstdev

import numpy as np

from rft.explorer.collapse_metrics import collapse_metrics
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
    """What a model's engines did from one question to the next, whoever asked them (rollouts,
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
        self._asked = clock()
        self._before = dict[str, float]()

    async def since(self) -> dict[str, float]:
        """Names as in docs/reference/metrics.md; those that the engine knows, none for a model that
        does not count.
        """
        if not isinstance(self._model, Measured):
            return {}
        now, asked = reduce(await self._model.metrics()), self._clock()
        more = {
            n.removeprefix("engine/"): v - self._before.get(n, 0.0)
            for n, v in now.items()
            if n.startswith("engine/")
        }
        passed = asked - self._asked
        self._asked = asked
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
    """Of the policy, and of each auxiliary model under the first of its names."""
    found = [EngineMetrics(policy)]
    known = {id(policy)}
    for name, model in auxiliary.items():
        if id(model) not in known:
            known.add(id(model))
            found.append(EngineMetrics(model, prefix=f"auxiliary/{name}"))
    return found


def rollout_metrics(
    groups: Sequence[PlayedGroup], wall_s: float, percentiles: bool = False
) -> dict[str, float]:
    """Names as in docs/reference/metrics.md, of groups as they were played.

    Rewards are over all scored runs, lengths (tokens) over all runs that have a sequence.
    `percentiles`: NAME/p10, /p50 and /p90 too.
    """
    runs = [run for g in groups for run in g.runs]
    played = [run.experiences for run in runs if not run.failed]
    whole = [x for rows in played for x in rows]
    responses = list(map(response_tokens, played))
    out: dict[str, float] = {
        "rollout/groups/accepted": float(sum(g.accepted for g in groups)),
        "rollout/groups/rejected": float(sum(not g.accepted for g in groups)),
        "rollout/runs": float(len(runs)),
        "rollout/failed": float(sum(run.failed for run in runs)),
        "rollout/untrainable": float(responses.count(0)),
        "rollout/retries": float(sum(run.attempts - 1 for run in runs)),
        "rollout/timeouts": float(sum(run.ended == "timeout" for run in runs)),
        **{f"rollout/ended/{why}": float(sum(run.ended == why for run in runs)) for why in _ENDED},
        "rollout/groups/partial": float(
            sum(g.accepted and any(run.failed for run in g.runs) for g in groups)
        ),
        "rollout/time/batch": wall_s,
    }
    # others were ended before there was room for them
    if begun := [run for run in runs if run.run_s]:
        out["rollout/time/run"] = fmean(run.run_s for run in begun)
        out["rollout/time/reward"] = fmean(run.reward_s for run in begun)
    if rewards := [reward for g in groups for reward in g.rewards]:
        spread = {
            "mean": fmean(rewards),
            "std": pstdev(rewards),
            "max": max(rewards),
            "min": min(rewards),
        }
        out |= {f"rollout/reward/{name}": value for name, value in spread.items()}
    by_taskset: defaultdict[str, list[float]] = defaultdict(list)
    for g in groups:
        by_taskset[g.task.taskset] += g.rewards
    out |= {
        f"rollout/{name}/reward/mean": fmean(rewards)
        for name, rewards in by_taskset.items()
        if rewards
    }
    parts = {name for r in whole for name in r.reward_parts}
    named: dict[str, float] = {}
    for name, values in _named(runs).items():
        named[f"rollout/{name}/mean"] = fmean(values)
        if name in parts:
            named[f"rollout/{name}/std"] = pstdev(values)
    if whole:
        out |= (
            lengths("rollout", played, responses)
            | {"rollout/rows": float(len(whole))}
            | collapse_metrics(groups)
        )
        out["rollout/tokens_per_s"] = sum(responses) / max(wall_s, 1e-9)
        if steps := [r.oldest_version.step for r in whole if r.oldest_version is not None]:
            out["rollout/model_version"] = fmean(steps)
        out["rollout/clipped_logprobs"] = float(sum(r.clipped_logprobs for r in whole))
    if percentiles:
        out |= _percentiles("rollout/reward", rewards)
        out |= _percentiles("rollout/response_length", responses)
        out |= _percentiles(
            "rollout/prompt_length", [r.num_tokens - r.num_response_tokens for r in whole]
        )
        out |= _percentiles("rollout/time/run", [run.run_s for run in begun])
    if several := [g.rewards for g in groups if len(g.rewards) > 1]:
        out["frac_reward_zero_std"] = fmean(len(set(rewards)) == 1 for rewards in several)
    return named | out  # a part that is called "reward" does not hide the reward


def pipeline_metrics(metrics: Sequence[Metric]) -> dict[str, float]:
    """What operators did to the groups of a batch: each number by its own reduction."""
    return {f"experience_pipeline/{name}": value for name, value in reduce(metrics).items()}


def lengths(
    prefix: str, runs: Sequence[Sequence[Experience]], responses: Sequence[int]
) -> dict[str, float]:
    """Length and truncation of runs that have a sequence, each as its rows, with their
    `response_tokens`; each row has a prompt.
    """
    if not runs:
        return {}
    rows = [r for mine in runs for r in mine]
    return {
        f"{prefix}/response_length/mean": fmean(responses),
        f"{prefix}/response_length/max": float(max(responses)),
        f"{prefix}/prompt_length/mean": (sum([r.num_tokens for r in rows]) - sum(responses))
        / len(rows),
        f"{prefix}/truncated_ratio": fmean(
            ["truncated" in [r.status for r in mine] for mine in runs]
        ),
    }


def response_tokens(rows: Sequence[Experience]) -> int:
    """Trained tokens of a run."""
    return sum([r.num_response_tokens for r in rows])


def _percentiles(prefix: str, values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    return {
        f"{prefix}/p{p}": float(v)
        for p, v in zip(PERCENTILES, np.percentile(values, PERCENTILES), strict=True)
    }


def _named(runs: Sequence[PlayedRun]) -> dict[str, list[float]]:
    """Reward parts and the workflows' own metrics by name: of each run that has it the mean over
    its rows.
    """
    found: defaultdict[str, list[float]] = defaultdict(list)
    for rows in ([r.reward_parts | r.metrics for r in run.experiences] for run in runs):
        for name in {name for row in rows for name in row}:
            found[name].append(fmean(row[name] for row in rows if name in row))
    return found

"""Algorithms whose advantages read more than rewards, each for one step on the tiny model, from its
own defaults.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rft.algorithm.catalog import algorithm_defaults
from rft.algorithm.settings import AlgorithmSettings
from rft.trainer.loop.learner import Learner
from rft.trainer.loop.ranks import Ranks
from rft.trainer.rows import batch_builder
from rft.trainer.settings import LearnerSettings
from rft.types.block import encode
from rft.types.completion import VersionSpan
from rft.types.experience import Experience, SamplingRecord
from rft.types.ids import ExperienceId, Version
from rft.types.ports import GroupStats, Lease
from rft.types.task import SamplingArgs

# task: runs: steps
REWARDS = {0: [[0.0, 1.0], [0.5, 0.0], [0.0]], 1: [[1.0], [0.0, 0.0], [0.0, 2.0]]}


def experience(
    task: int, run: int, step: int, reward: float, rng: np.random.Generator
) -> Experience:
    """Two prompt tokens, an answer with a gap of a tool's tokens in it."""
    count = int(rng.integers(6, 11))
    mask = np.ones(count, np.bool_)
    mask[[0, 1, 4]] = False
    return Experience(
        id=ExperienceId(1, 0, 0, task, run, step=step),
        taskset="t",
        task_index=task,
        workflow="w",
        status="complete",
        tokens=rng.integers(3, 250, count).astype(np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -5.5, 0).astype(np.float32),
        version_spans=(VersionSpan(Version(1, 0), 2, count),),
        sampling=(SamplingRecord(start=2, end=count, sampling=SamplingArgs(temperature=1.0)),),
        reward=reward,
        teacher_logprobs=np.where(mask, -rng.exponential(4, count), 0).astype(np.float32),
        info={"baseline_reward": 0.25, "env_state_hash": step},
    )


def lease() -> Lease:
    rng = np.random.default_rng(3)
    rows = [
        experience(task, run, s, r, rng)
        for task, runs in REWARDS.items()
        for run, rewards in enumerate(runs)
        for s, r in enumerate(rewards)
    ]
    groups = []
    for name in dict.fromkeys(str(r.group) for r in rows):
        mine = [r for r in rows if str(r.group) == name]
        rewards = [float(r.reward or 0) for r in mine]
        groups.append(
            GroupStats(
                group=name,
                rewards=tuple(rewards),
                mean=float(np.mean(rewards)),
                std=float(np.std(rewards, ddof=1)),
                runs=tuple(r.id.run for r in mine),
                steps=tuple(r.id.step for r in mine),
                lengths=tuple(r.num_response_tokens for r in mine),
            )
        )
    return Lease(step=1, frame=encode(rows), groups=tuple(groups))


CASES: list[dict[str, Any]] = [
    {"advantage_fn": "optimal_token_baseline"},
    {"advantage_fn": "clipb", "advantage_fn_args": {"mu": 0.1}},
    {"advantage_fn": "clipv", "advantage_fn_args": {"mu": 0.1, "max_frac": 0.2}},
    {"advantage_fn": "grpo", "sample_strategy": "pf_ppo"},
    {"advantage_fn": "rec", "advantage_fn_args": {"drop": "balance"}},
]
NAMES = (
    "reinforceplusplus",
    "reinforceplusplus_baseline",
    "rloo",
    "remax",
    "multi_step_grpo",
    "gigpo",
    "on_policy_distill",
    "jsd",
)
MORE = ("opo", "grpo_passk", "opmd", "asymre")


def of(name: str) -> dict[str, Any]:
    d = algorithm_defaults(name)
    parts = (
        "advantage_fn",
        "advantage_fn_args",
        "policy_loss_fn",
        "policy_loss_fn_args",
        "loss_agg_mode",
    )
    return {part: getattr(d, part) for part in parts}


@pytest.mark.parametrize(
    "parts", [*CASES, *map(of, (*NAMES, *MORE))], ids=lambda p: "-".join(map(str, p.values()))[:50]
)
async def test_one_step(parts: dict[str, Any], settings: Callable[..., LearnerSettings]) -> None:
    learner = Learner(settings(algorithm=AlgorithmSettings(**parts)))
    ranks = Ranks(learner)
    given = batch_builder.decode_lease(lease())
    before = {n: p.detach().clone() for n, p in learner.policy.names().items()}
    needed = sorted(ranks.algorithm.needs.before)
    computed = await ranks.compute(given.rows, needed) if needed else ()
    assert not needed or set(computed[0]) == set(needed)
    made = batch_builder.build_step(
        given, ranks.algorithm, ranks.budget, world_size=1, computed=computed, seed=1
    )
    report = await ranks.step(made.shares)
    assert report.finite and np.isfinite(report.sums["loss"]) and report.grad_norm > 0
    assert all(np.isfinite(v) for v in made.metrics.values())
    assert any(bool((p != before[n]).any()) for n, p in learner.policy.names().items())

"""Which rows of a step are chosen by rewards."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rft.algorithm.base import StepInputs, StepRow
from rft.algorithm.group_best import GroupBestArgs, group_best
from rft.algorithm.reward_variance import RewardVarianceArgs, reward_variance
from rft.types.ports import GroupStats


def inputs(
    groups: dict[str, list[float]], *, leased: dict[str, list[int]] | None = None, steps: int = 1
) -> StepInputs:
    """`leased`: runs that are in the step; None = all.  Each run has `steps` rows."""
    rows = [
        StepRow(group=g, run=run, step=step, reward=reward, logprobs=np.zeros(2, np.float32))
        for g, rewards in groups.items()
        for run, reward in enumerate(rewards)
        for step in range(steps)
        if leased is None or run in leased[g]
    ]
    stats = {
        g: GroupStats(
            group=g,
            rewards=tuple(r for r in rewards for _ in range(steps)),
            mean=float(np.mean(rewards)),
            std=float(np.std(rewards, ddof=1)) if len(rewards) > 1 else 0.0,
            runs=tuple(run for run in range(len(rewards)) for _ in range(steps)),
        )
        for g, rewards in groups.items()
    }
    return StepInputs(rows=rows, groups=stats)


@pytest.mark.parametrize(
    ("groups", "args", "drawn"),
    [
        ({"a": [0.0, 1.0, 0.5], "b": [2.0, -1.0]}, {}, [1, 3]),
        ({"a": [1.0, 0.0, 1.0]}, {}, [0]),  # the earlier of equals
        ({"a": [0.0, 1.0, 0.5], "b": [2.0, -1.0]}, {"num_best": 2}, [1, 2, 3, 4]),
        ({"a": [0.0, 0.0], "b": [0.0, 1.0]}, {"min_reward": 0.5}, [3]),
        ({"a": [0.0, 0.0]}, {"min_reward": 0.5}, []),
    ],
)
def test_the_best_run_of_each_group(
    groups: dict[str, list[float]], args: dict[str, Any], drawn: list[int]
) -> None:
    assert group_best(inputs(groups), GroupBestArgs.model_validate(args)) == drawn


def test_runs_that_are_not_in_the_step_count() -> None:
    groups = {"a": [0.0, 1.0, 0.5], "b": [0.1, 0.2]}
    assert group_best(inputs(groups, leased={"a": [0, 2], "b": [1]}), GroupBestArgs()) == [2]


def test_every_step_of_the_best_run() -> None:
    assert group_best(inputs({"a": [0.0, 1.0]}, steps=3), GroupBestArgs()) == [3, 4, 5]


# variances 0.5, 2, 0, 0.125
GROUPS = {"a": [0.0, 1.0], "b": [0.0, 2.0], "c": [1.0, 1.0], "d": [0.0, 0.5]}


@pytest.mark.parametrize(
    ("args", "drawn"),
    [
        ({}, [2, 3]),  # one of four groups
        ({"share": 0.3}, [0, 1, 2, 3]),  # two
        ({"share": 1.0}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"share": 0.7, "share_of": "variance"}, [2, 3]),  # 2 of 2.625 is 0.76
        ({"share": 0.8, "share_of": "variance"}, [0, 1, 2, 3]),  # 2.5 is 0.95
        ({"share": 1.0, "share_of": "variance"}, [0, 1, 2, 3, 6, 7]),  # equal rewards have none
    ],
)
def test_groups_whose_rewards_differ_most(args: dict[str, Any], drawn: list[int]) -> None:
    assert reward_variance(inputs(GROUPS), RewardVarianceArgs.model_validate(args)) == drawn


def test_no_group_where_all_rewards_are_equal() -> None:
    equal = inputs({"a": [1.0, 1.0], "b": [0.0, 0.0]})
    assert reward_variance(equal, RewardVarianceArgs(share_of="variance")) == []
    assert reward_variance(equal, RewardVarianceArgs()) == [0, 1], "the earlier of equals"

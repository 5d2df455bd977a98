"""Which rows of a step raft imitates."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rft.algorithm.base import StepInputs, StepRow
from rft.algorithm.group_best import GroupBestArgs, group_best
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
            std=0.0,
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

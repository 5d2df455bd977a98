"""MaxRL (arXiv:2602.02710): group advantages divided by the group's mean, so that a task solved once
in n runs counts as in maximum likelihood.

Depends on rewards, not on losses.
"""

from __future__ import annotations

import numpy as np

from rft.algorithm.args import NoArgs
from rft.algorithm.base import Advantages, StepInputs, define_algorithm
from rft.algorithm.group_stats import equal, scores
from rft.algorithm.runs import advantage
from rft.types.ports import GroupStats


@advantage("maxrl", args=NoArgs)
def maxrl(x: StepInputs, args: NoArgs) -> Advantages:
    """A = (R - mean) / mean over the rewards of the group, 0 where the mean is not above 0.

    For rewards from 0 on, as the paper's 0 and 1.  A group that nobody solved, whose mean a KL in
    the reward may take below 0, has no success rate: metric maxrl/unsolved is the share of runs in
    such groups.  prime-rl's `max_rl` is the same.  Returns float32 [L_i] per row.

    Example: rewards 1, 0, 0, 0 of one group give 3, -1, -1, -1.
    """

    def score(reward: float, group: GroupStats) -> float:
        signal = group.mean > 0 and not equal(group.rewards)
        return (reward - group.mean) / group.mean if signal else 0.0

    values = scores(x, score)
    unsolved = [x.stats(row).mean <= 0 for row in x.rows]
    return Advantages(
        values=[np.full(r.length, v, np.float32) for r, v in zip(x.rows, values, strict=True)],
        metrics={"maxrl/unsolved": float(np.mean(unsolved)) if unsolved else 0.0},
    )


define_algorithm(
    "maxrl",
    "Maximum likelihood: advantages are divided by the group's mean (arXiv:2602.02710).",
    advantage_fn="maxrl",
)

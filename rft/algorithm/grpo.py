"""Group-relative advantages (GRPO, arXiv:2402.03300; without the standard deviation Dr. GRPO, arXiv:2503.20783).

Knows no tokens: one number per row, which the trainer spreads over the row's trained tokens.
Invariant: statistics come with the lease, so an advantage does not depend on which siblings share the batch.
"""

from __future__ import annotations

import math

import numpy as np

from rft.algorithm.args import GrpoArgs
from rft.algorithm.base import StepInputs, advantage
from rft.types.ports import GroupStats


@advantage("grpo", args=GrpoArgs)
def grpo(x: StepInputs, args: GrpoArgs) -> np.ndarray:
    """A = (R - mean) / (std + epsilon) with the unbiased standard deviation; without `norm_by_std` A = R - mean.

    Returns float32 [S], one number per row.  A group whose rewards are all equal, groups of one included, gives exactly 0: nothing
    sets its members apart.  Raises ValueError for rewards that are not finite.

    Example: rewards 1, 0, 0, 1 of one group give 0.866024, -0.866024, -0.866024, 0.866024.
    """
    return np.array([_one(row.reward, x.stats(row), args) for row in x.rows], np.float32)


def _one(reward: float, group: GroupStats, args: GrpoArgs) -> float:
    if not math.isfinite(reward):
        raise ValueError(f"group {group.group}: reward {reward} is not finite")
    if min(group.rewards) == max(group.rewards):
        return 0.0
    return (reward - group.mean) / (group.std + args.epsilon if args.norm_by_std else 1.0)

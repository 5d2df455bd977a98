"""What advantages of one number per row share: rewards that are numbers, and what a group of equal
ones means.

Depends on no tokens.  Invariant: a reward that is not finite stops the step here; it never becomes
an advantage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from rft.algorithm.base import StepInputs, StepRow
from rft.types.ports import GroupStats


def members(x: StepInputs) -> Iterator[tuple[StepRow, GroupStats]]:
    """Every row with the statistics of its group.  Raises ValueError for a reward that is not
    finite.
    """
    for row in x.rows:
        if not math.isfinite(row.reward):
            raise ValueError(f"group {row.group}: reward {row.reward} is not finite")
        yield row, x.stats(row)


def scores(x: StepInputs, score: Callable[[float, GroupStats], float]) -> np.ndarray:
    """float32 [S]: `one` of every row's reward and its group."""
    return np.array([score(row.reward, group) for row, group in members(x)], np.float32)


def equal(rewards: Sequence[float]) -> bool:
    """Whether nothing sets the members apart; asked of the rewards, because their mean may be off
    by a rounding error.
    """
    return min(rewards) == max(rewards)


def unbiased_std(rewards: Sequence[float] | np.ndarray) -> float:
    """With n - 1; 0 for fewer than two."""
    return float(np.std(np.asarray(rewards, np.float64), ddof=1)) if len(rewards) > 1 else 0.0


def described(group: GroupStats) -> GroupStats:
    """`group`, once it is sure that it says who its members are."""
    count = len(group.rewards)
    if not count == len(group.runs) == len(group.steps) == len(group.lengths):
        raise ValueError(
            f"group {group.group}: {count} rewards, but {len(group.runs)} runs, {len(group.steps)} "
            f"steps and {len(group.lengths)} "
            "lengths; this advantage needs the runs, steps and lengths of all scored members"
        )
    return group

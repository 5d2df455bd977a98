"""Optimal token baseline: at every position of the answer the baseline that leaves the policy
gradient the least variance.

Depends on runs of trained tokens.  Invariant: a position is the number of a trained token in its
run; only runs of one group that are in the step are compared there, because their siblings' tokens
are not at hand: so whole groups have to be leased.
"""

from __future__ import annotations

from collections import defaultdict
from typing import ClassVar

import numpy as np
from pydantic import Field

from rft.algorithm.args import Args, Computed
from rft.algorithm.base import StepInputs, StepRow
from rft.algorithm.group_stats import members
from rft.algorithm.returns import to_go
from rft.algorithm.runs import advantage


class TokenBaselineArgs(Args):
    """Baseline of least variance at every token (optimal token baseline)."""

    before: ClassVar[frozenset[Computed]] = frozenset({"old", "sum_squares"})

    handle_zero_tail: bool = Field(
        True,
        description="where one run of the group alone is long enough the baseline is 0; False: its "
        "own return",
    )
    rollout_weights: bool = Field(
        True, description="w is scaled by the squared weights of algorithm.rollout_correction"
    )

    @property
    def whole_groups(self) -> bool:
        return True


@advantage("optimal_token_baseline", args=TokenBaselineArgs)
def optimal_token_baseline(x: StepInputs, args: TokenBaselineArgs) -> list[np.ndarray]:
    """A_t = G_t - b_t,  b_t = sum G_t W_t / (sum W_t + 1e-8) over the runs of the group that are
    that long, 0 for a group of one.

    G_t = sum of r_u for u >= t;  W_t = sum of w_u for u <= t;  w = 1 - 2 p + sum of p_v^2 over the
    vocabulary, p = exp(row.old), the squared norm of the gradient of log p by the logits, times the
    squared weight of an off-policy correction (`rollout_weights`). Where one run alone is left b_t
    = 0 (`handle_zero_tail`).  float32 [L_i] per row.  Raises ValueError for a row without old
    log-probs or sums of squares.
    """
    groups: dict[str, list[int]] = defaultdict(list)
    returns = []
    energy = []
    for i, (row, group) in enumerate(members(x)):
        returns.append(to_go(row.rewards, 1.0))
        energy.append(_energy(row, args))
        if len(group.rewards) > 1:
            groups[row.group].append(i)
    advantages = [g.copy() for g in returns]
    for run_rows in groups.values():
        longest = max(len(returns[i]) for i in run_rows)
        above = np.zeros(longest)
        below = np.full(longest, 1e-8)
        rows = np.zeros(longest)
        for i in run_rows:
            length = len(returns[i])
            above[:length] += returns[i] * energy[i]
            below[:length] += energy[i]
            rows[:length] += 1
        if args.handle_zero_tail:
            above[rows == 1] = 0
        for i in run_rows:
            advantages[i] -= (above / below)[: len(returns[i])]
    return [a.astype(np.float32) for a in advantages]


def _energy(row: StepRow, args: TokenBaselineArgs) -> np.ndarray:
    """float64 [L]: W."""
    if row.old is None or row.sum_squares is None:
        raise ValueError(
            f"group {row.group}, run {row.run}: the optimal token baseline needs the trainer's "
            f"log-probs and sums of squared probabilities"
        )
    w = 1 - 2 * np.exp(row.old.astype(np.float64)) + row.sum_squares.astype(np.float64)
    if args.rollout_weights and row.weights is not None:
        w = w * np.square(row.weights.astype(np.float64))
    energy: np.ndarray = np.cumsum(w)
    return energy

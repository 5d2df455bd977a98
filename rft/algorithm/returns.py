"""Advantages per token from rewards still to come: GAE, REINFORCE++ and ReMax.

A run's arrays hold its trained tokens alone, one after the other, those of all its rows.  Tokens of
a tool or a user between two of them are therefore skipped: they are neither discounted nor
whitened, and a return reaches the turns, and the rows, before them. Invariant: whitening is over
all trained tokens of the step that no correction rejects, however it is cut.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from pydantic import Field

from rft.algorithm.args import AloneArgs, Computed, NoArgs
from rft.algorithm.base import Advantages, StepInputs, StepRow, define_algorithm
from rft.algorithm.group_stats import members
from rft.algorithm.runs import advantage
from rft.types.experience import BASELINE_KEY


class GaeArgs(AloneArgs):
    """Generalised advantage estimation with a critic (arXiv:1506.02438)."""

    before: ClassVar[frozenset[Computed]] = frozenset({"values"})

    gamma: float = Field(1.0, ge=0, le=1, description="discount per token")
    lam: float = Field(
        1.0, ge=0, le=1, description="lambda: 1 = whole returns, 0 = one-step differences of values"
    )


class ReinforcePlusPlusArgs(AloneArgs):
    """Whitened return to go without a critic (arXiv:2501.03262)."""

    gamma: float = Field(1.0, ge=0, le=1, description="discount per token")


class RemaxArgs(AloneArgs):
    """Return less the reward of a greedy run (arXiv:2310.10505)."""

    baseline: ClassVar[bool] = True


@advantage("ppo", args=GaeArgs)
def gae(x: StepInputs, args: GaeArgs) -> Advantages:
    """Generalised advantage estimation (arXiv:1506.02438).  With V = row.values and V = A = 0 after
    the last token:

        delta_t = r_t + gamma V_{t+1} - V_t,   Araw_t = delta_t + gamma lam Araw_{t+1},   returns = Araw + V,   A = whitened Araw.

    Values and returns: float32 [L_i] per row.  Raises ValueError for a row without values.
    """
    raw = []
    returns = []
    for row, _ in members(x):
        if row.values is None:
            raise ValueError(
                f"group {row.group}, run {row.run}: GAE needs the critic's values of the row"
            )
        values = row.values.astype(np.float64)
        ahead = np.append(values[1:], 0.0)
        delta = row.rewards + args.gamma * ahead - values
        raw.append(to_go(delta, args.gamma * args.lam))
        returns.append((raw[-1] + values).astype(np.float32))
    return Advantages(values=whitened(raw, x), returns=returns)


@advantage("reinforceplusplus", args=ReinforcePlusPlusArgs)
def reinforce_plus_plus(x: StepInputs, args: ReinforcePlusPlusArgs) -> Advantages:
    """G_t = r_t + gamma G_{t+1};  A = whitened G.  arXiv:2501.03262.  Values and returns (G):
    float32 [L_i] per row.
    """
    returns = [to_go(row.rewards, args.gamma) for row, _ in members(x)]
    return Advantages(values=whitened(returns, x), returns=[g.astype(np.float32) for g in returns])


@advantage("reinforceplusplus_baseline", args=NoArgs)
def reinforce_plus_plus_baseline(x: StepInputs, args: NoArgs) -> Advantages:
    """c = R - mean of the group on all tokens of the run, a group of one keeps R;  A = whitened c.
    float32 [L_i] per run.

    Long runs weigh more in the whitening, having more tokens.
    """
    centred = [
        row.reward - (group.mean if len(group.rewards) > 1 else 0.0) for row, group in members(x)
    ]
    return Advantages(
        values=whitened([np.full(row.length, c) for row, c in zip(x.rows, centred, strict=True)], x)
    )


@advantage("remax", args=RemaxArgs)
def remax(x: StepInputs, args: RemaxArgs) -> list[np.ndarray]:
    """A_t = (sum of r_u for u >= t) - b, b the reward of a greedy run of the same task.  float32
    [L_i] per row.  arXiv:2310.10505

    b stands in the row's info under "baseline_reward", without KL penalty.  Raises ValueError for a
    row that has none.
    """
    return [(to_go(row.rewards, 1.0) - _baseline(row)).astype(np.float32) for row, _ in members(x)]


def _baseline(row: StepRow) -> float:
    value = row.info.get(BASELINE_KEY)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(
            f"group {row.group}, run {row.run}: remax needs the reward of a greedy run of the task "
            f'as info["{BASELINE_KEY}"], a finite '
            f"number, but found {value!r}.  The explorer plays it; rows that come from elsewhere "
            f"have to bring it, or use rloo, whose "
            "baseline comes from the other runs"
        )
    return float(value)


def to_go(values: np.ndarray, discount: float) -> np.ndarray:
    """float64 [L]: y_t = values_t + discount y_{t+1}."""
    advantages = np.empty(len(values))
    ahead = 0.0
    for t in range(len(values) - 1, -1, -1):
        ahead = advantages[t] = values[t] + discount * ahead
    return advantages


def whitened(arrays: Sequence[np.ndarray], x: StepInputs) -> list[np.ndarray]:
    """(y - mean) / sqrt(variance + 1e-8) over the numbers of all tokens of `x` that count, variance
    with n - 1; float32.

    Numbers that are all equal, a single one included, become 0.
    """
    every = np.concatenate([np.zeros(0), *arrays])[x.counted]
    if len(every) < 2 or np.ptp(every) == 0:
        return [np.zeros(len(a), np.float32) for a in arrays]
    mean = every.mean()
    std = np.sqrt(every.var(ddof=1) + 1e-8)
    return [((a - mean) / std).astype(np.float32) for a in arrays]


define_algorithm(
    "reinforceplusplus",
    "Whitened returns without a critic (arXiv:2501.03262).",
    advantage_fn="reinforceplusplus",
    repeat_times=2,
)
define_algorithm(
    "reinforceplusplus_baseline",
    "The same less the group's mean.",
    advantage_fn="reinforceplusplus_baseline",
    repeat_times=2,
)
define_algorithm(
    "remax",
    "Greedy answer as baseline (arXiv:2310.10505).",
    advantage_fn="remax",
    repeat_times=1,
)

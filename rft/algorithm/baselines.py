"""Advantages of one number per run: the reward less some baseline of the group.

Depends on no tokens.  Invariant: baselines come from the statistics frozen with the lease; gpg's
factor alone reads the batch.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from pydantic import Field

from rft.algorithm.args import AloneArgs, Args, NoArgs
from rft.algorithm.base import StepInputs, define_algorithm
from rft.algorithm.group_stats import described, equal, scores
from rft.algorithm.runs import advantage
from rft.types.ports import GroupStats


class OpmdArgs(Args):
    """Reward less a baseline of the group (arXiv:2501.12599)."""

    opmd_baseline: Literal["mean", "logavgexp"] = Field(
        "mean", description="mean, or tau (logsumexp(r / tau) - log n)"
    )
    tau: float = Field(1.0, gt=0, description="temperature of logavgexp")


class AsymReArgs(Args):
    """Reward less the group's mean and a shift (arXiv:2506.20520)."""

    baseline_shift: float = Field(
        -0.1, description="added to the group's mean; negative lets good runs weigh more"
    )


@advantage("none", args=AloneArgs)
def none(x: StepInputs, args: AloneArgs) -> np.ndarray:
    """A = 0, for losses that read no advantage (sft, cpt, dpo, raft).  Rewards are not looked at.
    Returns float32 [S].
    """
    return np.zeros(len(x.rows), np.float32)


@advantage("reinforce", args=AloneArgs)
def reinforce(x: StepInputs, args: AloneArgs) -> np.ndarray:
    """A = R.  Returns float32 [S].  Williams 1992."""
    return scores(x, lambda reward, group: reward)


@advantage("rloo", args=NoArgs)
def rloo(x: StepInputs, args: NoArgs) -> np.ndarray:
    """A = R - mean of the others = n / (n - 1) (R - mean); a group of one gives 0.  Returns float32
    [S].  arXiv:2402.14740

    Example: rewards 0, 0, 0, 1 give -0.333333 three times and 1.
    """

    def score(reward: float, group: GroupStats) -> float:
        n = len(group.rewards)
        return 0.0 if equal(group.rewards) else n / (n - 1) * (reward - group.mean)

    return scores(x, score)


@advantage("opmd", args=OpmdArgs)
def opmd(x: StepInputs, args: OpmdArgs) -> np.ndarray:
    """A = R - b with b the group's mean, or tau (logsumexp(R / tau) - log n); b = 0 for a group of
    one.  arXiv:2501.12599

    Returns float32 [S].
    """

    def score(reward: float, group: GroupStats) -> float:
        if len(group.rewards) == 1:
            return reward
        if equal(group.rewards):
            return 0.0
        return reward - (
            group.mean
            if args.opmd_baseline == "mean"
            else _log_average_exp(group.rewards, args.tau)
        )

    return scores(x, score)


@advantage("asymre", args=AsymReArgs)
def asymre(x: StepInputs, args: AsymReArgs) -> np.ndarray:
    """A = R - (mean + baseline_shift); in a group of one A = R.  Returns float32 [S].
    arXiv:2506.20520

    Runs of a group of equal rewards have advantage -baseline_shift: by default they are all pulled
    at a little.
    """

    def score(reward: float, group: GroupStats) -> float:
        return reward if len(group.rewards) == 1 else reward - (group.mean + args.baseline_shift)

    return scores(x, score)


@advantage("opo", args=NoArgs)
def opo(x: StepInputs, args: NoArgs) -> np.ndarray:
    """A = R - b, b = sum L R / sum L over the group, L = trained tokens of a run; b = 0 for a group
    of one.  arXiv:2505.23585

    Returns float32 [S].  Example: rewards 0, 0, 0, 1 with lengths 10, 20, 30, 40: b = 0.4.
    """

    def score(reward: float, group: GroupStats) -> float:
        if len(group.rewards) == 1:
            return reward
        if equal(group.rewards):
            return 0.0
        return reward - float(np.average(group.rewards, weights=described(group).lengths))

    return scores(x, score)


@advantage("gpg", args=NoArgs)
def gpg(x: StepInputs, args: NoArgs) -> np.ndarray:
    """A = alpha (R - mean), alpha = runs of the step / runs of it whose reward is not 0 (at least
    1).  arXiv:2504.02546

    alpha grows as fewer runs have a reward other than 0, so it is the one number here that depends
    on the batch.  Returns float32 [S].
    """
    counted = [row for row, c in zip(x.rows, x.counted_rows, strict=True) if c]
    alpha = len(counted) / max(sum(row.reward != 0 for row in counted), 1)
    return scores(
        x, lambda reward, group: 0.0 if equal(group.rewards) else alpha * (reward - group.mean)
    )


def _log_average_exp(rewards: tuple[float, ...], tau: float) -> float:
    top = max(rewards)
    return top + tau * math.log(
        math.fsum(math.exp((r - top) / tau) for r in rewards) / len(rewards)
    )


define_algorithm(
    "rloo",
    "Leave-one-out baseline (arXiv:2402.14740).",
    advantage_fn="rloo",
    repeat_times=2,
)
define_algorithm(
    "opmd",
    "Online policy mirror descent (arXiv:2501.12599).",
    advantage_fn="opmd",
    policy_loss_fn="opmd",
    repeat_times=2,
)
define_algorithm(
    "asymre",
    "Asymmetric REINFORCE (arXiv:2506.20520).",
    advantage_fn="asymre",
    policy_loss_fn="opmd",
    repeat_times=2,
    entropy_loss_fn="none",
)
define_algorithm(
    "opo", "Length-weighted baseline (arXiv:2505.23585).", advantage_fn="opo", policy_loss_fn="ppo"
)
define_algorithm(
    "gpg", "Group policy gradient (arXiv:2504.02546).", advantage_fn="gpg", policy_loss_fn="gpg"
)

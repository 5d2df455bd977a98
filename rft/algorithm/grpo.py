"""Group-relative advantages (GRPO, arXiv:2402.03300; without the standard deviation Dr. GRPO,
arXiv:2503.20783).

Depends on no tokens but for `rank_penalty`: one number per run, which the trainer spreads over the
run's trained tokens. Invariant: statistics come with the lease, so an advantage does not depend on
which siblings share the batch; the documented exceptions are `rank_penalty`, which reads the
siblings' log-probs, and the deviation with `std_cal_level: batch`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from rft.algorithm.args import EPSILON, Args
from rft.algorithm.base import StepInputs, StepRow, define_algorithm
from rft.algorithm.group_stats import described, equal, members, scores, unbiased_std
from rft.algorithm.penalty import statistics_of
from rft.algorithm.runs import advantage
from rft.types.ports import GroupStats


def drop_threshold() -> float | None:
    """The argument of advantages that may drop groups of equal rewards."""
    threshold: float | None = Field(
        None,
        ge=0,
        description="drop groups whose standard deviation is not above this, as the operator "
        "reward_std_filter does",
    )
    return threshold


class GrpoArgs(Args):
    """Group-relative advantage (arXiv:2402.03300); `norm_by_std: false` is Dr. GRPO
    (arXiv:2503.20783).
    """

    epsilon: float = Field(1e-6, gt=0, description=EPSILON)
    norm_by_std: bool = Field(True, description="divide by the unbiased standard deviation")
    std_threshold: float | None = drop_threshold()
    rank_penalty: float | None = Field(
        None,
        ge=0,
        description="shrink rewards of likely answers, also negative ones, by this times rank / n "
        "(arXiv:2506.02355)",
    )
    std_cal_level: Literal["group", "batch"] = Field(
        "group", description="which rewards the standard deviation is taken over (arXiv:2508.08221)"
    )

    @property
    def whole_groups(self) -> bool:
        return self.rank_penalty is not None


class StepWiseGrpoArgs(Args):
    """GRPO over the last experiences of each run, given to all of the run's steps."""

    compares_rows: ClassVar[bool] = True

    epsilon: float = Field(1e-6, gt=0, description=EPSILON)
    enable_step_norm: bool = Field(False, description="divide by the run's number of steps")
    std_threshold: float | None = drop_threshold()
    std_cal_level: Literal["group", "batch"] = Field(
        "group", description="which rewards the standard deviation is taken over"
    )


class NormArgs(Args):
    """Group statistics with a switch for the division."""

    epsilon: float = Field(1e-6, gt=0, description=EPSILON)
    norm_by_std: bool = Field(True, description="divide by the group's unbiased standard deviation")


@advantage("grpo", args=GrpoArgs)
def grpo(x: StepInputs, args: GrpoArgs) -> np.ndarray:
    """A = (R - mean) / (std + epsilon) with the unbiased standard deviation; without `norm_by_std`
    A = R - mean.

    With `std_cal_level: batch`, std is that of the rewards of all runs of the step of which a token
    counts (arXiv:2508.08221).  With `rank_penalty` p, first R <- R (1 - p rank / n), for scoring and
    statistics alike, where rank counts the n runs of the group in the step that are less likely, by
    their mean log-prob (arXiv:2506.02355); equally likely runs share the mean of their ranks.

    Returns float32 [S], one number per run.  A group whose rewards are all equal, groups of one
    included, gives exactly 0: nothing sets its members apart.  Raises ValueError for rewards that
    are not finite.

    Example: rewards 1, 0, 0, 1 of one group give 0.866024, -0.866024, -0.866024, 0.866024.
    """
    if args.rank_penalty is not None:
        x = _penalised(x, args.rank_penalty)
    rewards = x.rewards[x.counted_rows]
    batch = unbiased_std(rewards) if args.norm_by_std and args.std_cal_level == "batch" else None

    def score(reward: float, group: GroupStats) -> float:
        if equal(group.rewards):
            return 0.0
        std = group.std if batch is None else batch
        return (reward - group.mean) / (std + args.epsilon if args.norm_by_std else 1.0)

    return scores(x, score)


@advantage("grpo_passk", args=NormArgs)
def grpo_passk(x: StepInputs, args: NormArgs) -> np.ndarray:
    """The best run of a group: A = (best - second best) / (std + epsilon), or without `norm_by_std`
    the difference; others 0.

    Returns float32 [S].  Two best runs, like a group of one, give 0 (arXiv:2503.19595).
    """

    def score(reward: float, group: GroupStats) -> float:
        if equal(group.rewards) or reward != max(group.rewards):
            return 0.0
        best, second = sorted(group.rewards, reverse=True)[:2]
        return (best - second) / (group.std + args.epsilon if args.norm_by_std else 1.0)

    return scores(x, score)


@advantage("step_wise_grpo", args=StepWiseGrpoArgs)
def step_wise_grpo(x: StepInputs, args: StepWiseGrpoArgs) -> np.ndarray:
    """GRPO over the reward of each run's last step, given to all steps of the run; with
    `enable_step_norm` divided by their number.

    A = (R_last - mean) / (std + epsilon) over the runs of the task; with `std_cal_level: batch`,
    std is over the runs of all groups of the step.  The last step is the one with the highest
    number among the scored steps.  Returns float32 [S].
    """
    last = {row.group: _last_rewards(described(group)) for row, group in members(x)}
    batch = (
        unbiased_std([r for runs in last.values() for r in runs.values()])
        if args.std_cal_level == "batch"
        else None
    )

    def score(row: StepRow, group: GroupStats) -> float:
        runs = list(last[group.group].values())
        if equal(runs):
            return 0.0
        std = unbiased_std(runs) if batch is None else batch
        score = (last[group.group][row.run] - float(np.mean(runs))) / (std + args.epsilon)
        return score / group.runs.count(row.run) if args.enable_step_norm else score

    return np.array([score(row, group) for row, group in members(x)], np.float32)


def _last_rewards(group: GroupStats) -> dict[int, float]:
    """Reward of the last step of each run."""
    steps = sorted(zip(group.runs, group.steps, group.rewards, strict=True))
    return {run: reward for run, _, reward in steps}


def _penalised(x: StepInputs, penalty: float) -> StepInputs:
    """`x` with the rewards of likely runs lowered, and statistics of the lowered rewards."""
    indices_of: dict[str, list[int]] = defaultdict(list)
    for i, row in enumerate(x.rows):
        indices_of[row.group].append(i)
    rows = list(x.rows)
    for numbers in indices_of.values():
        ranks = _ranks([float(np.mean(rows[i].logprobs, dtype=np.float64)) for i in numbers])
        for i, rank in zip(numbers, ranks, strict=True):
            factor = 1 - penalty * float(rank) / len(numbers)
            rows[i] = replace(rows[i], reward=rows[i].reward * factor)
    return replace(x, rows=rows, groups=statistics_of(x, rows))


def _ranks(values: Sequence[float]) -> np.ndarray:
    """How many are smaller, from 0; equal ones share the mean of their ranks."""
    array = np.asarray(values, np.float64)
    smaller = (array[None, :] < array[:, None]).sum(1)
    same = (array[None, :] == array[:, None]).sum(1)
    ranks: np.ndarray = smaller + (same - 1) / 2
    return ranks


define_algorithm(
    "grpo",
    "Group-relative advantages with the clipped PPO loss (arXiv:2402.03300).  No KL loss unless "
    "kl_loss_fn is set: "
    "Trinity-RFT's preset adds k2 with kl_coef 0.001, which costs a reference model; write "
    "kl_loss_fn: k2 for the same.",
)
define_algorithm(
    "dr_grpo",
    "GRPO without its two biases (arXiv:2503.20783): advantages are not divided by the group's "
    "standard deviation, "
    "and a sequence's loss is divided by max_response_tokens instead of its own length.",
    advantage_fn_args={"norm_by_std": False},
    loss_agg_mode="seq-mean-token-sum-norm",
)
define_algorithm(
    "dapo",
    "GRPO with a wider upper clip bound (arXiv:2503.14476).  Its penalty for overlong answers is "
    "an argument of every reward; "
    "groups of equal rewards stay in the step with advantage 0; the operator dapo_dynamic_sampling "
    "plays others in their place.",
    policy_loss_fn_args={"clip_range_low": 0.2, "clip_range_high": 0.28},
    repeat_times=16,
)
define_algorithm(
    "grpo_passk",
    "Only the best answer of a group counts (arXiv:2503.19595).",
    advantage_fn="grpo_passk",
)
define_algorithm(
    "multi_step_grpo",
    "GRPO over runs of several steps.",
    advantage_fn="step_wise_grpo",
)

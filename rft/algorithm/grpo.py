"""Group-relative advantages (GRPO, arXiv:2402.03300; without the standard deviation Dr. GRPO, arXiv:2503.20783).

Knows no tokens but for `rank_penalty`: one number per row, which the trainer spreads over the row's trained tokens.
Invariant: statistics come with the lease, so an advantage does not depend on which siblings share the batch; the documented
exceptions are `rank_penalty`, which reads the siblings' log-probs, and the deviation with `std_cal_level: batch`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np

from rft.algorithm.advantage_args import GrpoArgs, NormArgs, StepWiseGrpoArgs
from rft.algorithm.base import StepInputs, StepRow, advantage
from rft.algorithm.groups import described, equal, members, scores, unbiased_std
from rft.types.ports import GroupStats


@advantage("grpo", args=GrpoArgs)
def grpo(x: StepInputs, args: GrpoArgs) -> np.ndarray:
    """A = (R - mean) / (std + epsilon) with the unbiased standard deviation; without `norm_by_std` A = R - mean.

    With `std_cal_level: batch`, std is that of the rewards of all rows of the step (arXiv:2508.08221).  With `rank_penalty` p, first
    R <- R (1 - p rank / n), for scoring and statistics alike, where rank counts the n rows of the group in the step that are less
    likely, by their mean log-prob (arXiv:2506.02355); equally likely rows share the mean of their ranks.

    Returns float32 [S], one number per row.  A group whose rewards are all equal, groups of one included, gives exactly 0: nothing
    sets its members apart.  Raises ValueError for rewards that are not finite.

    Example: rewards 1, 0, 0, 1 of one group give 0.866024, -0.866024, -0.866024, 0.866024.
    """
    if args.rank_penalty is not None:
        x = _penalised(x, args.rank_penalty)
    batch = unbiased_std(x.rewards) if args.norm_by_std and args.std_cal_level == "batch" else None

    def one(reward: float, group: GroupStats) -> float:
        if equal(group.rewards):
            return 0.0
        std = group.std if batch is None else batch
        return (reward - group.mean) / (std + args.epsilon if args.norm_by_std else 1.0)

    return scores(x, one)


@advantage("grpo_passk", args=NormArgs)
def grpo_passk(x: StepInputs, args: NormArgs) -> np.ndarray:
    """The best row of a group: A = (best - second best) / (std + epsilon), or without `norm_by_std` the difference; others 0.

    Returns float32 [S].  Two best rows, like a group of one, give 0 (arXiv:2503.19595).
    """

    def one(reward: float, group: GroupStats) -> float:
        if equal(group.rewards) or reward != max(group.rewards):
            return 0.0
        best, second = sorted(group.rewards, reverse=True)[:2]
        return (best - second) / (group.std + args.epsilon if args.norm_by_std else 1.0)

    return scores(x, one)


@advantage("step_wise_grpo", args=StepWiseGrpoArgs)
def step_wise_grpo(x: StepInputs, args: StepWiseGrpoArgs) -> np.ndarray:
    """GRPO over the reward of each run's last step, given to all steps of the run; with `enable_step_norm` divided by their number.

    A = (R_last - mean) / (std + epsilon) over the runs of the task; with `std_cal_level: batch`, std is over the runs of all groups
    of the step.  The last step is the one with the highest number among the scored steps.  Returns float32 [S].
    """
    last = {name: _last_rewards(group) for name, group in _groups(x).items()}
    batch = unbiased_std([r for runs in last.values() for r in runs.values()]) if args.std_cal_level == "batch" else None

    def one(row: StepRow, group: GroupStats) -> float:
        runs = list(last[group.group].values())
        if equal(runs):
            return 0.0
        std = unbiased_std(runs) if batch is None else batch
        score = (last[group.group][row.run] - float(np.mean(runs))) / (std + args.epsilon)
        return score / group.runs.count(row.run) if args.enable_step_norm else score

    return np.array([one(row, group) for row, group in members(x)], np.float32)


def _groups(x: StepInputs) -> dict[str, GroupStats]:
    """The groups of the rows at hand."""
    return {row.group: described(group) for row, group in members(x)}


def _last_rewards(group: GroupStats) -> dict[int, float]:
    """Reward of the last step of each run."""
    steps = sorted(zip(group.runs, group.steps, group.rewards, strict=True))
    return {run: reward for run, _, reward in steps}


def _penalised(x: StepInputs, penalty: float) -> StepInputs:
    """`x` with the rewards of likely rows lowered, and statistics of the lowered rewards."""
    of: dict[str, list[int]] = defaultdict(list)
    for i, row in enumerate(x.rows):
        of[row.group].append(i)
    rewards = x.rewards
    groups = dict(x.groups)
    for name, numbers in of.items():
        rank = _ranks([float(np.mean(x.rows[i].logprobs, dtype=np.float64)) for i in numbers])
        rewards[numbers] *= 1 - penalty * rank / len(numbers)
        mine = [float(r) for r in rewards[numbers]]
        groups[name] = msgspec.structs.replace(
            groups[name], rewards=tuple(mine), mean=float(np.mean(mine)), std=unbiased_std(mine), runs=(), steps=(), lengths=()
        )
    return replace(x, rows=[replace(row, reward=float(r)) for row, r in zip(x.rows, rewards, strict=True)], groups=groups)


def _ranks(values: Sequence[float]) -> np.ndarray:
    """How many are smaller, from 0; equal ones share the mean of their ranks."""
    given = np.asarray(values, np.float64)
    smaller = (given[None, :] < given[:, None]).sum(1)
    same = (given[None, :] == given[:, None]).sum(1)
    ranks: np.ndarray = smaller + (same - 1) / 2
    return ranks

"""The best runs of each group, chosen by reward, for losses that imitate them (RAFT,
arXiv:2304.06767).

Depends on rewards, not on losses.  Invariant: which rows are chosen depends on their group alone,
not on what else is in the step.
"""

from __future__ import annotations

from pydantic import Field

from rft.algorithm.args import Args
from rft.algorithm.base import StepInputs, define_algorithm, sample_strategy
from rft.types.credit import rewards_of_runs
from rft.types.ports import GroupStats


class GroupBestArgs(Args):
    """The best runs of each group (arXiv:2304.06767)."""

    num_best: int = Field(
        1,
        ge=1,
        description="runs of each group that are trained on, those with the highest rewards",
    )
    min_reward: float | None = Field(
        None,
        description="runs with a lower reward are left out even then; null: the best is always "
        "good",
    )


@sample_strategy("group_best", args=GroupBestArgs)
def group_best(x: StepInputs, args: GroupBestArgs) -> list[int]:
    """Of every group the rows of the `num_best` runs with the highest reward, the earlier run where
    two are equal; none below `min_reward`.

    A run that was not leased with the others counts in the comparison, so a step that has only a
    part of a group trains on the best or on nothing of it.  Returns the chosen rows' numbers, in
    ascending order.
    """
    best = {group: _best(stats, args) for group, stats in x.groups.items()}
    return [i for i, row in enumerate(x.rows) if row.run in best[row.group]]


def _best(stats: GroupStats, args: GroupBestArgs) -> set[int]:
    rewards = rewards_of_runs(stats)
    order = sorted(rewards, key=lambda run: (-rewards[run], run))
    return {
        run
        for run in order[: args.num_best]
        if args.min_reward is None or rewards[run] >= args.min_reward
    }


define_algorithm(
    "raft",
    "SFT on the best answers (arXiv:2304.06767).",
    advantage_fn="none",
    policy_loss_fn="sft",
    sample_strategy="group_best",
    entropy_loss_fn="none",
)

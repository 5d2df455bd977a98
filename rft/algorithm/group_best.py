"""The best runs of each group, chosen by reward, for losses that imitate them (RAFT, arXiv:2304.06767).

Knows rewards, not losses.  Invariant: which rows are chosen depends on their group alone, not on what else is in the step.
"""

from __future__ import annotations

from rft.algorithm.advantage_args import GroupBestArgs
from rft.algorithm.base import StepInputs, sample_strategy
from rft.types.ports import GroupStats


@sample_strategy("group_best", args=GroupBestArgs)
def group_best(x: StepInputs, args: GroupBestArgs) -> list[int]:
    """Of every group the rows of the `num_best` runs with the highest reward, the earlier run where two are equal; none below `min_reward`.

    A run that was not leased with the others counts in the comparison, so a step that has only a part of a group trains on the best
    or on nothing of it.  Returns the chosen rows' numbers, in ascending order.
    """
    best = {group: _best(stats, args) for group, stats in x.groups.items()}
    return [i for i, row in enumerate(x.rows) if row.run in best[row.group]]


def _best(stats: GroupStats, args: GroupBestArgs) -> set[int]:
    rewards = dict(zip(stats.runs, stats.rewards, strict=True))  # of a run with several steps: its last
    order = sorted(rewards, key=lambda run: (-rewards[run], run))
    return {run for run in order[: args.num_best] if args.min_reward is None or rewards[run] >= args.min_reward}

"""The groups of a step whose rewards differ most (RAGEN, arXiv:2504.20073; RAGEN-2,
arXiv:2604.06268).

Depends on rewards, not on losses.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from rft.algorithm.args import Args
from rft.algorithm.base import StepInputs, sample_strategy


class RewardVarianceArgs(Args):
    """Groups with the largest variance of rewards (arXiv:2504.20073)."""

    share: float = Field(0.25, gt=0, le=1, description="how much is trained on")
    share_of: Literal["groups", "variance"] = Field(
        "groups",
        description="a share of the groups, or the fewest that have this share of all variance",
    )


@sample_strategy("reward_variance", args=RewardVarianceArgs)
def reward_variance(x: StepInputs, args: RewardVarianceArgs) -> list[int]:
    """The rows of the groups with the largest variance of rewards, the earlier group where two are
    equal.

    `groups`: ceil(share n) of the n groups in the step (RAGEN keeps a quarter or a half).
    `variance`: the shortest beginning whose variances sum to at least share times the sum of all
    (RAGEN-2); none where no group's rewards differ.  Returns the rows' numbers, ascending.
    """
    names = list(dict.fromkeys(row.group for row in x.rows))
    variances = np.square([x.groups[name].std for name in names])
    order = np.argsort(-variances, kind="stable")
    count = int(np.ceil(args.share * len(names)))
    if args.share_of == "variance":
        wanted_sum = args.share * variances.sum()
        mass = np.cumsum(variances[order])
        count = int(np.searchsorted(mass, wanted_sum * (1 - 1e-12))) + 1 if wanted_sum else 0
    best = {names[i] for i in order[:count]}
    return [i for i, row in enumerate(x.rows) if row.group in best]

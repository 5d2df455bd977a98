"""Group advantages of each part of the reward by itself, added up and normalised over the step
(GDPO, arXiv:2601.05242).

Depends on no tokens and not the reward itself.  Invariant: a run whose group has a part that the
run has not leaves the step, and is counted; no part is taken as 0.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import numpy as np
from pydantic import Field, field_validator

from rft.algorithm.args import EPSILON, Args
from rft.algorithm.base import Advantages, StepInputs, StepRow, define_algorithm
from rft.algorithm.group_stats import equal, unbiased_std
from rft.algorithm.runs import advantage
from rft.types.ports import GroupStats

log = logging.getLogger(__name__)
INCOMPLETE = "experience/incomplete_rewards"


class GdpoArgs(Args):
    """Every part of the reward normalised in its group, then added (arXiv:2601.05242)."""

    weights: dict[str, float] | None = Field(
        None,
        description="weight by name of the part, others do not count; null: 1 for every part that "
        "is no part of another (PART, not PART/PART)",
    )
    norm_by_std: bool = Field(
        True, description="divide each part by the group's unbiased standard deviation"
    )
    norm_by_batch: bool = Field(
        True, description="normalise the sums over the runs of the step, as the paper does"
    )
    epsilon: float = Field(1e-6, gt=0, description=EPSILON)

    @field_validator("weights")
    @classmethod
    def _some_weight(cls, weights: dict[str, float] | None) -> dict[str, float] | None:
        if weights is not None and not any(weights.values()):
            raise ValueError("name a part with a weight other than 0, or leave weights out")
        return weights

    @property
    def reward_parts(self) -> tuple[str, ...]:
        return tuple(self.weights or ())


# by part of the reward its mean in the group and what the difference to it is multiplied by, 0 where
# all runs are equal
GroupParts = dict[str, tuple[float, float]]


@advantage("gdpo", args=GdpoArgs)
def gdpo(x: StepInputs, args: GdpoArgs) -> Advantages:
    """A = (s - mean s) / (std s + epsilon) over the runs of the step, with s = sum_k w_k (r_k -
    mean_k) / (std_k + epsilon) over the parts k of the reward, mean_k and std_k (unbiased) those of
    the run's group.

    Without `norm_by_std` parts are centred only, without `norm_by_batch` A = s.  A part that is
    equal in all runs of a group adds exactly 0, and where all are, A is exactly 0.  A run that lacks
    a part of its group, or one of `weights`, is in no statistic and leaves the step; the metric
    experience/incomplete_rewards counts such runs.  veRL normalises the sums over tokens instead of
    runs, and TRL adds nothing for a missing part.

    Values: float32 [L_i] per run.  Raises ValueError where no run of the step has its parts.

    Example: runs of one group with parts (1, 0), (0, 0), (1, 1), (0, 0): s = 0.366, -1.366, 2.366,
    -1.366 and A = 0.206, -0.769, 1.332, -0.769.
    """
    parts = {name: _parts(group, args) for name, group in x.groups.items()}
    complete = np.array(
        [bool(p := parts[row.group]) and p.keys() <= row.reward_parts.keys() for row in x.rows],
        np.bool_,
    )
    lacking = [row for row, c in zip(x.rows, complete, strict=True) if not c]
    if lacking:
        _report(x, lacking, parts[lacking[0].group])
    scores = np.array([_score(row, parts[row.group]) for row in x.rows])
    of_step = scores[complete & x.counted_rows]
    if args.norm_by_batch and len(of_step):
        scores = (scores - of_step.mean()) / (unbiased_std(of_step) + args.epsilon)
    spread = [any(scale for _, scale in parts[row.group].values()) for row in x.rows]
    scores = np.where(complete & spread, scores, 0.0)
    return Advantages(
        values=[np.full(row.length, s, np.float32) for row, s in zip(x.rows, scores, strict=True)],
        keep=[np.full(row.length, c) for row, c in zip(x.rows, complete, strict=True)],
        metrics={INCOMPLETE: float(len(lacking))},
    )


def _parts(group: GroupStats, args: GdpoArgs) -> GroupParts:
    """Return the parts that count in a group, with statistics over the runs that have all of them."""
    names = {name for parts in group.parts for name in parts if "/" not in name}
    weights = dict.fromkeys(names, 1.0) if args.weights is None else args.weights
    runs = [parts for parts in group.parts if weights.keys() <= parts.keys()]
    return {name: _part([run[name] for run in runs], w, args) for name, w in weights.items()}


def _part(values: Sequence[float], weight: float, args: GdpoArgs) -> tuple[float, float]:
    if not values or equal(values):
        return 0.0, 0.0
    scale = weight / (unbiased_std(values) + args.epsilon) if args.norm_by_std else weight
    return float(np.mean(values)), scale


def _score(row: StepRow, parts: GroupParts) -> float:
    return math.fsum(
        scale * (row.reward_parts.get(name, 0.0) - mean) for name, (mean, scale) in parts.items()
    )


def _report(x: StepInputs, lacking: Sequence[StepRow], parts: GroupParts) -> None:
    """Name the first run that lacks a part; raise ValueError if every run does."""
    row = lacking[0]
    names = ", ".join(sorted(parts.keys() - row.reward_parts.keys())) or "at all"
    text = f"the reward of run {row.run} of group {row.group} has no part {names}"
    if len(lacking) == len(x.rows):
        raise ValueError(
            f"{text} (it has {', '.join(row.reward_parts) or 'none'}), nor has another run of the "
            f"step all of its parts.  Return a dict from the reward, or take weighted_reward"
        )
    log.warning("step %d: %s, so it is not trained (%d such runs)", x.step, text, len(lacking))


define_algorithm(
    "gdpo",
    "GRPO with every part of the reward normalised by itself (arXiv:2601.05242).",
    advantage_fn="gdpo",
)

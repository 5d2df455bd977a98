"""Runs of a step drawn anew by their reward (policy filtration, arXiv:2409.06957).

Depends on rewards, not on losses.  The ledger's rows are not copied: those of a run drawn k times
stand k times in this step's micro-batches, so that every loss, metric and denominator is that of
the drawn runs, whatever the aggregation; a run drawn 0 times is not computed. Invariant: the draw
depends on seed, step and runs.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from rft.algorithm.args import Args
from rft.algorithm.base import StepInputs, sample_strategy

_LARGEST = 1e290  # a sum of weights stays finite


class PfPpoArgs(Args):
    """Runs drawn anew by their reward (arXiv:2409.06957)."""

    reweight_method: Literal["pow", "max_min", "max_random"] = Field(
        "pow", description="how a reward becomes a weight"
    )
    weight_pow: float = Field(2.0, gt=0, description="exponent of pow")


@sample_strategy("pf_ppo", args=PfPpoArgs)
def pf_ppo(x: StepInputs, args: PfPpoArgs) -> list[int]:
    """As many runs as there are, drawn with replacement with probability in proportion to their
    weight.

    pow: |R|^weight_pow (also of bad runs); max_min: 1 for the highest and the lowest reward of the
    step, else 0; max_random: 0.4 for the highest, else 0.1; always + 1e-8.  R is the reward before
    any KL penalty.  Drawn after the advantages, so whitening and group statistics are those of all
    runs.  Returns the drawn runs' numbers, in ascending order.
    """
    w = weights(x.rewards, args)
    choices = np.random.default_rng((x.seed, x.step)).choice(len(w), size=len(w), p=w / w.sum())
    return sorted(choices.tolist())


def weights(rewards: np.ndarray, args: PfPpoArgs) -> np.ndarray:
    """float64 [S], of rewards float64 [S].  Raises ValueError for rewards that are not finite."""
    if not np.isfinite(rewards).all():
        raise ValueError(f"reward {rewards[~np.isfinite(rewards)][0]} is not finite")
    top = rewards == rewards.max(initial=-np.inf)
    match args.reweight_method:
        case "pow":
            with np.errstate(over="ignore"):
                w = np.minimum(np.abs(rewards) ** args.weight_pow, _LARGEST)
        case "max_min":
            w = (top | (rewards == rewards.min(initial=np.inf))).astype(np.float64)
        case "max_random":
            w = np.where(top, 0.4, 0.1)
    probabilities: np.ndarray = w + 1e-8
    return probabilities

"""Group-relative REINFORCE and its variations (REC, arXiv:2509.24203): which runs and tokens count,
how much, and what is added.

Invariant: which runs of a group are dropped depends on the group's frozen rewards and on the seed,
never on which of them share the batch.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import Field

from rft.algorithm import ratio as ratios
from rft.algorithm.aggregate import row_means, valid, weighted
from rft.algorithm.args import EPSILON, Args
from rft.algorithm.base import (
    Advantages,
    LossInputs,
    LossOutput,
    StepInputs,
    define_algorithm,
    policy_loss,
)
from rft.algorithm.group_stats import described, equal, members
from rft.algorithm.runs import advantage
from rft.types.ports import GroupStats

if TYPE_CHECKING:
    import torch


class RecArgs(Args):
    """Group-relative REINFORCE with a choice of runs (arXiv:2509.24203)."""

    epsilon: float = Field(1e-6, gt=0, description=EPSILON)
    std_normalize: bool = Field(
        False, description="divide by the group's biased standard deviation"
    )
    drop: Literal["balance"] | None = Field(
        None, description="balance: drop runs below the mean until both sides are equally many"
    )


@advantage("rec", args=RecArgs)
def rec_advantage(x: StepInputs, args: RecArgs) -> Advantages:
    """A = R - mean, with `std_normalize` divided by (std + epsilon), std biased (n).

    With `drop: balance`, a group with more runs below its mean than not loses surplus ones of them,
    drawn at random, and mean and std are those of the rest.  Dropped runs have advantage 0 and
    leave the loss and its denominators.  Equal rewards give 0. Values float32, keep bool: [L_i] per
    row.
    """
    chosen = {row.group: _kept_runs(group, args.drop, x.seed) for row, group in members(x)}
    values = []
    keep = []
    for row, group in members(x):
        stays = True
        rewards = np.asarray(group.rewards, np.float64)
        if (mask := chosen[row.group]) is not None:
            runs = described(group)
            steps = runs.steps if row.credit == "step" else [row.step] * len(runs.runs)
            stays = bool(mask[list(zip(runs.runs, steps, strict=True)).index((row.run, row.step))])
            rewards = rewards[mask]
        value = 0.0
        if stays and not equal(group.rewards):
            value = (row.reward - rewards.mean()) / (
                rewards.std() + args.epsilon if args.std_normalize else 1.0
            )
        values.append(np.full(row.length, value, np.float32))
        keep.append(np.full(row.length, stays))
    dropped = 1 - float(np.mean([k.all() for k in keep])) if keep else 0.0
    return Advantages(
        values=values, keep=keep, metrics={"rec/dropped_rows_frac": dropped} if args.drop else {}
    )


def _kept_runs(group: GroupStats, drop: str | None, seed: int) -> np.ndarray | None:
    """bool [n], which members of the group stay; None: all."""
    if drop is None or equal(group.rewards):
        return None
    rewards = np.asarray(group.rewards, np.float64)
    low = np.flatnonzero(rewards < rewards.mean())
    surplus = 2 * len(low) - len(rewards)
    if surplus <= 0:
        return None
    mask = np.ones(len(rewards), np.bool_)
    mask[_generator(group.group, seed).permutation(low)[:surplus]] = False
    return mask


def _generator(group: str, seed: int) -> np.random.Generator:
    # without the lineage: a run that was resumed draws as one that was not
    name = group.partition(".")[2] or group
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return np.random.default_rng(int.from_bytes(digest, "big"))


class RecLossArgs(Args):
    """-A log-prob with a choice of range, weight and regulariser (arXiv:2509.24203)."""

    epsilon_low: float = Field(0.2, ge=0, le=1, description="lower bound of the range: 1 - this")
    epsilon_high: float = Field(0.2, ge=0, description="upper bound of the range: 1 + this")
    epsilon_low_prime: float = Field(
        0.6, ge=0, le=1, description="ring: good answers below 1 - this count again"
    )
    epsilon_high_prime: float = Field(
        2.0, ge=0, description="ring: bad answers above 1 + this count again"
    )
    clip_mode: Literal["none", "one-side", "two-side", "ring", "gspo-one-side"] = Field(
        "none", description="which tokens count"
    )
    weight: Literal["none", "importance_sampling", "gspo_importance_sampling", "advantage"] = Field(
        "none", description="factor of each token's loss"
    )
    regularizer: Literal["none", "k2", "forward-kl"] = Field(
        "none", description="added to each token's loss"
    )
    regularizer_coef: float = Field(0.0, ge=0, description="factor of the regulariser")
    temp: float = Field(1.0, gt=0, description="weight advantage: A exp(A / temp)")

    @property
    def zero_without_advantage(self) -> bool:
        return self.regularizer == "none" or self.regularizer_coef == 0


@policy_loss("rec", args=RecLossArgs)
def rec(x: LossInputs, args: RecLossArgs) -> LossOutput:
    """With ratio = sg(exp(clip(logprob - old, -20, 20))), q = exp(mean of logprob - old over the
    sequence), stopped:

        loss = -A w logprob [counts] + regulariser

        clip_mode        a token counts where
          none             always
          two-side         1 - low <= ratio <= 1 + high
          one-side         A >= 0 and ratio <= 1 + high, or A <= 0 and ratio >= 1 - low
          gspo-one-side    as one-side with q in place of ratio; aggregated by run-mean, whatever `loss_agg_mode`
          ring             as two-side, or A >= 0 and ratio <= 1 - low', or A <= 0 and ratio >= 1 + high'
        weight           w = 1, ratio (importance_sampling), q (gspo_importance_sampling), exp(A / temp) (advantage)
        regulariser      none; k2: c (logprob - old)^2; forward-kl: -c logprob; it has no factor 1/2, no weight and no range

    Metrics, as means over valid tokens: pg_clipfrac (does not count), those of `ratio_metrics`.
    """
    a = valid(x.advantages, x.mask)
    logprobs = valid(x.logprobs, x.mask)
    apart = ratios.difference(x)
    ratio = ratios.log_ratio(x).detach().exp()
    sequence = row_means(ratios.log_ratio(x).detach(), x).exp()[x.row]
    counts = _counts(a, ratio, sequence, args)
    values = weighted(valid(-a * _weight(a, ratio, sequence, args) * logprobs, counts), x)
    match args.regularizer:
        case "k2":
            values = values + args.regularizer_coef * apart.square()
        case "forward-kl":
            values = values - args.regularizer_coef * logprobs
        case "none":
            pass
    if args.clip_mode == "gspo-one-side":
        x = replace(x, loss_agg_mode="run-mean")
    return ratios.output(values, replace(x, weights=None), pg_clipfrac=~counts)


def _counts(
    a: torch.Tensor, ratio: torch.Tensor, sequence: torch.Tensor, args: RecLossArgs
) -> torch.Tensor:
    import torch

    low = 1 - args.epsilon_low
    high = 1 + args.epsilon_high
    match args.clip_mode:
        case "none":
            return torch.ones_like(a, dtype=torch.bool)
        case "two-side":
            return (ratio >= low) & (ratio <= high)
        case "one-side":
            return ((a >= 0) & (ratio <= high)) | ((a <= 0) & (ratio >= low))
        case "gspo-one-side":
            return ((a >= 0) & (sequence <= high)) | ((a <= 0) & (sequence >= low))
        case "ring":
            good = ratio <= 1 - args.epsilon_low_prime
            bad = ratio >= 1 + args.epsilon_high_prime
            return ((ratio >= low) & (ratio <= high)) | ((a >= 0) & good) | ((a <= 0) & bad)


def _weight(
    a: torch.Tensor, ratio: torch.Tensor, sequence: torch.Tensor, args: RecLossArgs
) -> torch.Tensor:
    import torch

    match args.weight:
        case "none":
            return torch.ones_like(a)
        case "importance_sampling":
            return ratio
        case "gspo_importance_sampling":
            return sequence
        case "advantage":
            return (a / args.temp).exp()


define_algorithm(
    "rec",
    "Group-relative REINFORCE (arXiv:2509.24203).",
    advantage_fn="rec",
    policy_loss_fn="rec",
    repeat_times=2,
)

"""GRPO without those tokens of negative advantage that would take most entropy away (Clip_B and
Clip_V, arXiv:2602.03392).

With p the probability of the sampled token and H the entropy of its distribution, raising the
token's logit by a small d changes the entropy by -d S, S = p (H + log p).  Depends on entropies
that were computed before the step. Invariant: tokens whose advantage is not negative always stay.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from pydantic import Field

from rft.algorithm.args import EPSILON, Args, Computed
from rft.algorithm.base import Advantages, StepInputs, StepRow
from rft.algorithm.grpo import GrpoArgs, grpo
from rft.algorithm.runs import advantage

_NO_SPREAD = 1e-12  # a standard deviation below this is a rounding error: nothing is dropped


class ClipBArgs(Args):
    """GRPO without those tokens of negative advantage that would lower the entropy most, judged from the
    batch (arXiv:2602.03392).
    """

    before: ClassVar[frozenset[Computed]] = frozenset({"old", "entropy"})

    epsilon: float = Field(1e-6, gt=0, description=EPSILON)
    mu: float = Field(
        2.5,
        gt=0,
        description="standard deviations of the entropy score beyond which a token is dropped",
    )


class ClipVArgs(Args):
    """As clipb, judged from the vocabulary (arXiv:2602.03392)."""

    before: ClassVar[frozenset[Computed]] = frozenset({"old", "entropy", "discriminator_mean"})

    epsilon: float = Field(1e-6, gt=0, description=EPSILON)
    mu: float = Field(8.5, gt=0, description="standard deviations beyond which a token is dropped")
    max_frac: float = Field(
        1e-4, gt=0, le=1, description="most tokens that may be dropped, as a share"
    )


@advantage("clipb", args=ClipBArgs)
def clipb(x: StepInputs, args: ClipBArgs) -> Advantages:
    """GRPO; a token with A < 0 and S - mean(S) < -mu std(S) is left out of the loss, mean and
    biased std over the step's tokens.

    S = p (H + log p), p of the sampled token and H of its distribution under the policy before the
    step.

    Values float32 (0 for dropped tokens), keep bool: [L_i] per row.  Raises ValueError for a row
    without log-probs or entropies.
    """
    s = np.concatenate([np.zeros(0), *map(_discriminator, x.rows)])
    counted = s[x.counted]
    far = np.zeros(len(s), np.bool_)
    if len(counted) and counted.std() >= _NO_SPREAD:
        far = x.counted & (s - counted.mean() < -args.mu * counted.std())
    a = _advantages(x, args.epsilon)
    return _without(x, a, far & (a < 0), "clipb")


@advantage("clipv", args=ClipVArgs)
def clipv(x: StepInputs, args: ClipVArgs) -> Advantages:
    """As clipb, with D = E[S] - S > mu std(D), E over the vocabulary by the policy's probabilities:
    sum p_v^2 (H + log p_v).

    Where more than max_frac of all tokens qualify, those of largest D, max(1, floor(max_frac N)) of
    them.  std is biased.
    """
    d = np.concatenate([np.zeros(0), *(_mean(row) - _discriminator(row) for row in x.rows)])
    a = _advantages(x, args.epsilon)
    counted = d[x.counted]
    std = counted.std() if len(counted) else 0.0
    far = np.zeros(0, np.int64)
    if std >= _NO_SPREAD:
        far = np.flatnonzero(x.counted & (a < 0) & (d > args.mu * std))
    most = max(1, int(args.max_frac * len(counted)))
    if len(far) > most:
        far = far[np.argsort(-d[far], kind="stable")[:most]]
    drop = np.zeros(len(d), np.bool_)
    drop[far] = True
    return _without(x, a, drop, "clipv")


def _advantages(x: StepInputs, epsilon: float) -> np.ndarray:
    """float32 [N], over all tokens of the step."""
    return np.repeat(
        grpo(x, GrpoArgs.model_validate({"epsilon": epsilon})), [row.length for row in x.rows]
    )


def _without(x: StepInputs, a: np.ndarray, drop: np.ndarray, name: str) -> Advantages:
    bad = int((a[x.counted] < 0).sum())
    metrics = {
        f"{name}/frac_clipped": float(drop[x.counted].mean()) if x.counted.any() else 0.0,
        f"{name}/frac_clipped_neg": float(drop.sum()) / max(bad, 1),
    }
    return Advantages(
        values=x.split(np.where(drop, np.float32(0), a)), keep=x.split(~drop), metrics=metrics
    )


def _discriminator(row: StepRow) -> np.ndarray:
    """float64 [L]: S."""
    if row.old is None or row.entropy is None:
        raise ValueError(
            f"group {row.group}, run {row.run}: the trainer's log-probs and entropies of the row "
            f"are needed"
        )
    logprobs = row.old.astype(np.float64)
    s: np.ndarray = np.exp(logprobs) * (row.entropy.astype(np.float64) + logprobs)
    return s


def _mean(row: StepRow) -> np.ndarray:
    if row.discriminator_mean is None:
        raise ValueError(
            f"group {row.group}, run {row.run}: the mean of the entropy discriminator of the row "
            f"is needed"
        )
    return row.discriminator_mean.astype(np.float64)

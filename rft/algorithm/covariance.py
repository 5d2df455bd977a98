"""Losses that hold back the few tokens which lower the entropy most (arXiv:2505.22617): Clip-Cov
and KL-Cov.

Such tokens are those whose advantage and log-prob are far from their means on the same side: c = (A
- mean A)(logprob - mean logprob). Invariant: means and the choice of tokens are taken over the
  whole step, under the weights before it; the draw depends on seed and step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Self

import numpy as np
from pydantic import Field, model_validator

from rft.algorithm import ratio as ratios
from rft.algorithm.aggregate import valid
from rft.algorithm.args import Args, ClippedArgs, Computed, GradientArgs
from rft.algorithm.base import (
    LossInputs,
    LossOutput,
    StepInputs,
    define_algorithm,
    policy_extra,
    policy_loss,
)

CHOSEN = "cov_chosen"


class ClipCovArgs(ClippedArgs, GradientArgs):
    """PPO without some tokens whose advantage and log-prob vary together (arXiv:2505.22617)."""

    before: ClassVar[frozenset[Computed]] = frozenset({"old"})

    clip_cov_ratio: float = Field(
        2e-4, gt=0, le=1, description="share of the tokens that lose their gradient"
    )
    clip_cov_lb: float = Field(1.0, description="such a token's covariance is above this")
    clip_cov_ub: float = Field(5.0, description="and below this")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.clip_cov_lb >= self.clip_cov_ub:
            raise ValueError(
                f"clip_cov_lb {self.clip_cov_lb} must be below clip_cov_ub {self.clip_cov_ub}"
            )
        return self


class KlCovArgs(Args):
    """Ratio loss with a KL penalty on the tokens of largest covariance (arXiv:2505.22617)."""

    before: ClassVar[frozenset[Computed]] = frozenset({"old"})

    kl_cov_ratio: float = Field(
        2e-4, gt=0, le=1, description="share of the tokens that get the penalty"
    )
    ppo_kl_coef: float = Field(1.0, ge=0, description="factor of the penalty")


@policy_loss("clip_cov", args=ClipCovArgs)
def clip_cov(x: LossInputs, args: ClipCovArgs) -> LossOutput:
    """loss = max(-A ratio, -A clip(ratio, 1 - low, 1 + high)), and 0 on the chosen tokens, which
    stay in the denominators.

    There is no dual clip.  Metrics, as means over valid tokens: pg_clipfrac (the token is chosen),
    those of `ratio_metrics`.
    """
    import torch

    a = valid(x.advantages, x.mask)
    ratio = ratios.log_ratio(x).exp()
    chosen = valid(x.extra[CHOSEN], x.mask) > 0
    values = valid(
        torch.maximum(-a * ratio, -a * ratio.clamp(1 - args.low, 1 + args.high)), ~chosen
    )
    return ratios.output(values, x, pg_clipfrac=chosen)


@policy_extra("clip_cov", args=ClipCovArgs)
def clip_cov_tokens(
    x: StepInputs, advantages: Sequence[np.ndarray], args: ClipCovArgs
) -> Mapping[str, Sequence[np.ndarray]]:
    """1 for max(floor(clip_cov_ratio N), 1) tokens drawn among those with lb < c < ub whose clipped
    term is not the larger, else 0.

    c = (A - mean A)(logprob - mean logprob), means over the step's tokens.
    """
    a = np.concatenate(advantages).astype(np.float64)
    ratio = np.exp(
        np.clip(
            np.concatenate([x.log_ratio(row) for row in x.rows]),
            -ratios.LOG_RATIO_LIMIT,
            ratios.LOG_RATIO_LIMIT,
        )
    )
    clipped = -a * np.clip(ratio, 1 - args.low, 1 + args.high) > -a * ratio
    c = _covariances(x, a)
    among = np.flatnonzero(x.counted & ~clipped & (c > args.clip_cov_lb) & (c < args.clip_cov_ub))
    count = min(_count(x, args.clip_cov_ratio), len(among))
    return _marked(x, np.random.default_rng((x.seed, x.step)).choice(among, count, replace=False))


@policy_loss("kl_cov", args=KlCovArgs)
def kl_cov(x: LossInputs, args: KlCovArgs) -> LossOutput:
    """loss = -A ratio, and on the chosen tokens -A ratio + ppo_kl_coef |logprob - old|; nothing is
    clipped.

    Metrics, as means over valid tokens: kl_cov_frac (the token is chosen), those of
    `ratio_metrics`.
    """
    log_ratio = ratios.log_ratio(x)
    chosen = valid(x.extra[CHOSEN], x.mask) > 0
    penalty = valid(log_ratio.abs(), chosen)
    values = -valid(x.advantages, x.mask) * log_ratio.exp() + args.ppo_kl_coef * penalty
    return ratios.output(values, x, kl_cov_frac=chosen)


@policy_extra("kl_cov", args=KlCovArgs)
def kl_cov_tokens(
    x: StepInputs, advantages: Sequence[np.ndarray], args: KlCovArgs
) -> Mapping[str, Sequence[np.ndarray]]:
    """1 for the max(floor(kl_cov_ratio N), 1) tokens of the largest c, else 0.

    c = (A - mean A)(logprob - mean logprob), means over the step's tokens.
    """
    c = np.where(x.counted, _covariances(x, np.concatenate(advantages).astype(np.float64)), -np.inf)
    count = min(_count(x, args.kl_cov_ratio), int(x.counted.sum()))
    return _marked(x, np.argsort(-c, kind="stable")[:count])


def _covariances(x: StepInputs, a: np.ndarray) -> np.ndarray:
    """c of every token, float64 [N]."""
    logprobs = np.concatenate([x.current(row) for row in x.rows])
    c: np.ndarray = (a - a[x.counted].mean()) * (logprobs - logprobs[x.counted].mean())
    return c


def _count(x: StepInputs, share: float) -> int:
    return max(int(share * x.counted.sum()), 1)


def _marked(x: StepInputs, chosen: np.ndarray) -> Mapping[str, Sequence[np.ndarray]]:
    marks = np.zeros(len(x.counted), np.float32)
    marks[chosen] = 1
    return {CHOSEN: x.split(marks)}


define_algorithm(
    "clip_cov",
    "GRPO; tokens that lower the entropy most cost nothing (arXiv:2505.22617).",
    policy_loss_fn="clip_cov",
)
define_algorithm(
    "kl_cov",
    "GRPO; the tokens that lower the entropy most are held near the old policy (arXiv:2505.22617).",
    policy_loss_fn="kl_cov",
)

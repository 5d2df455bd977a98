"""Losses with one ratio per sequence: GSPO (arXiv:2507.18071) and GMPO (arXiv:2507.20673).

A sequence is a row: each chain of a run has a ratio of its own.
Invariant: a sequence is wholly in one micro-batch, so its ratio is exact.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from pydantic import Field

from rft.algorithm import ratio as ratios
from rft.algorithm.aggregate import row_means, valid
from rft.algorithm.args import AggMode, ClippedArgs, GradientArgs
from rft.algorithm.base import LossInputs, LossOutput, define_algorithm, policy_loss

MAX_LOG_RATIO = 10.0


class GspoArgs(GradientArgs):
    """Clipped ratio of whole sequences (arXiv:2507.18071)."""

    agg_mode: ClassVar[AggMode | None] = "run-mean"

    clip_range: float | None = Field(
        None, ge=0, le=1, description="both bounds, where the two below are not given"
    )
    clip_range_low: float = Field(
        3e-4, ge=0, le=1, description="the sequence ratio is clipped at 1 - this"
    )
    clip_range_high: float = Field(
        4e-4, ge=0, description="the sequence ratio is clipped at 1 + this"
    )

    @property
    def low(self) -> float:
        return self._bound("clip_range_low", self.clip_range_low)

    @property
    def high(self) -> float:
        return self._bound("clip_range_high", self.clip_range_high)

    def _bound(self, name: str, value: float) -> float:
        return (
            value if self.clip_range is None or name in self.model_fields_set else self.clip_range
        )


class GeoMeanArgs(ClippedArgs, GradientArgs):
    """Geometric mean of a sequence's ratios (arXiv:2507.20673); bounds hold for log ratios."""

    agg_mode: ClassVar[AggMode | None] = "run-mean"
    fixed_agg: ClassVar[bool] = True

    clip_range: float = Field(
        0.2, ge=0, le=1, description="both bounds of the log ratio, where the two below are null"
    )
    clip_range_low: float | None = Field(
        None, ge=0, le=1, description="the log ratio is clipped at -clip_range_low"
    )
    clip_range_high: float | None = Field(
        None, ge=0, description="the log ratio is clipped at clip_range_high"
    )


@policy_loss("gspo", args=GspoArgs)
def gspo(x: LossInputs, args: GspoArgs) -> LossOutput:
    """With q = mean of logprob - old over the sequence's tokens and s = exp(min(logprob -
    sg(logprob) + sg(q), 10)) per token:

        loss = max(-A s, -A clip(s, 1 - low, 1 + high)).

    Every token of a sequence has the same ratio, but its own gradient.  Defined with run-mean.
    Metrics, as means over valid tokens: pg_clipfrac, ppo_kl_seq (-q), those of `ratio_metrics`.

    Example: logprob - old = 0.1, -0.1, 0.3 gives s = exp(0.1) = 1.105171 for all three.
    """
    import torch

    a = valid(x.advantages, x.mask)
    logprobs = valid(x.logprobs, x.mask)
    q = row_means(ratios.difference(x).detach(), x)[x.row]
    s = (logprobs - logprobs.detach() + q).clamp(max=MAX_LOG_RATIO).exp()
    unclipped = -a * s
    clipped = -a * s.clamp(1 - args.low, 1 + args.high)
    loss = torch.maximum(unclipped, clipped)
    return ratios.output(loss, x, pg_clipfrac=clipped > unclipped, ppo_kl_seq=-q)


@policy_loss("geo_mean", args=GeoMeanArgs)
def geo_mean(x: LossInputs, args: GeoMeanArgs) -> LossOutput:
    """With v = clip(logprob - old, -20, 20) clipped to [-low, high] towards the pessimistic side,
    v' = sgn(A) min(sgn(A) v, sgn(A) clip(v, -low, high)), per sequence:

        loss = -mean(A) exp(mean(v')),  the loss of the step is its mean over runs, whatever
        `loss_agg_mode`; a run of several sequences counts once, each of these by its tokens.

    Weights of an off-policy correction enter as their geometric mean over the sequence.  Metrics,
    as means over valid tokens: pg_clipfrac (v' is not v), those of `ratio_metrics`.
    """
    import torch

    a = valid(x.advantages, x.mask)
    log_ratio = ratios.log_ratio(x)
    sign = a.sign()
    pessimistic = sign * torch.minimum(
        sign * log_ratio, sign * log_ratio.clamp(-args.low, args.high)
    )
    loss = -row_means(a, x) * row_means(pessimistic, x).exp()
    if x.weights is not None:
        # a weight of 0 anywhere takes the sequence's to about 0
        floor = torch.finfo(x.weights.dtype).tiny
        loss = loss * row_means(valid(x.weights, x.mask).clamp(min=floor).log(), x).exp()
    of_runs = replace(x, loss_agg_mode="run-mean", weights=None)
    clipped = (pessimistic != log_ratio) & (a != 0)
    return ratios.output(loss[x.row], of_runs, pg_clipfrac=clipped)


define_algorithm(
    "gspo",
    "Ratios of whole sequences (arXiv:2507.18071).",
    policy_loss_fn="gspo",
    repeat_times=2,
    loss_agg_mode="run-mean",
)
define_algorithm(
    "luspo",
    "GSPO where a sequence counts by its length (arXiv:2602.05261): every token weighs the same, so "
    "answers do not shrink.",
    policy_loss_fn="gspo",
    loss_agg_mode="seq-mean-token-sum",
)
define_algorithm(
    "gmpo",
    "Geometric mean of a sequence's ratios (arXiv:2507.20673), with the paper's bounds of the log "
    "ratio.",
    policy_loss_fn="geo_mean",
    policy_loss_fn_args={"clip_range": 0.4},
    loss_agg_mode="run-mean",
)

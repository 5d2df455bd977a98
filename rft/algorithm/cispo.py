"""CISPO (arXiv:2506.13585): clipped importance weights that carry no gradient."""

from __future__ import annotations

from pydantic import Field

from rft.algorithm import ratio as ratios
from rft.algorithm.aggregate import valid
from rft.algorithm.args import GradientArgs
from rft.algorithm.base import LossInputs, LossOutput, define_algorithm, policy_loss


class CispoArgs(GradientArgs):
    """Clipped importance weight, gradient through log-probs only (arXiv:2506.13585)."""

    clip_range_low: float = Field(1.0, ge=0, le=1, description="the weight is clipped at 1 - this")
    clip_range_high: float = Field(0.28, ge=0, description="the weight is clipped at 1 + this")
    enable_mask_clip: bool = Field(
        False, description="tokens whose ratio is beyond the two bounds below have no loss"
    )
    mask_clip_range_low: float = Field(
        1.0, ge=0, le=1, description="tokens of bad answers have no loss below the ratio 1 - this"
    )
    mask_clip_range_high: float = Field(
        0.28, ge=0, description="tokens of good answers have no loss above the ratio 1 + this"
    )


@policy_loss("cispo", args=CispoArgs)
def cispo(x: LossInputs, args: CispoArgs) -> LossOutput:
    """With ratio = exp(clip(logprob - old, -20, 20)):

        loss = -A sg(clip(ratio, 1 - low, 1 + high)) logprob.

    No token loses its gradient, unless `enable_mask_clip` takes those with A > 0 above 1 +
    mask_clip_range_high and those with A < 0 below 1 - mask_clip_range_low; they stay in the
    denominators.  Metrics, as means over valid tokens: pg_clipfrac (the weight is
    clipped), unmasked_frac, those of `ratio_metrics`.
    """
    a = valid(x.advantages, x.mask)
    logprobs = valid(x.logprobs, x.mask)
    ratio = ratios.log_ratio(x).detach().exp()
    weight = ratio.clamp(1 - args.clip_range_low, 1 + args.clip_range_high)
    values = -a * weight * logprobs
    counts = x.mask
    if args.enable_mask_clip:
        over = (ratio > 1 + args.mask_clip_range_high) & (a > 0)
        under = (ratio < 1 - args.mask_clip_range_low) & (a < 0)
        counts = counts & ~over & ~under
        values = valid(values, counts)
    return ratios.output(values, x, pg_clipfrac=weight != ratio, unmasked_frac=counts)


define_algorithm(
    "cispo",
    "Clipped importance weights (arXiv:2506.13585).",
    policy_loss_fn="cispo",
    repeat_times=2,
)

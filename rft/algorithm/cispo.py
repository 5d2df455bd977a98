"""CISPO (arXiv:2506.13585): clipped importance weights that carry no gradient."""

from __future__ import annotations

from pydantic import Field

from rft.algorithm import ratio as ratios
from rft.algorithm.aggregate import valid
from rft.algorithm.args import GradientArgs
from rft.algorithm.base import LossInputs, LossOutput, define_algorithm, policy_loss


class CispoArgs(GradientArgs):
    """Clipped importance weight, gradient through log-probs only (arXiv:2506.13585)."""

    clip_range_low: float = Field(
        1.0, ge=0, le=1, description="lower bound of the weight: 1 - clip_range_low"
    )
    clip_range_high: float = Field(
        0.28, ge=0, description="upper bound of the weight: 1 + clip_range_high"
    )
    enable_mask_clip: bool = Field(
        False, description="mask tokens whose ratio is beyond the mask_clip bounds"
    )
    mask_clip_range_low: float = Field(
        1.0,
        ge=0,
        le=1,
        description="mask ratios below 1 - mask_clip_range_low if the advantage is negative",
    )
    mask_clip_range_high: float = Field(
        0.28,
        ge=0,
        description="mask ratios above 1 + mask_clip_range_high if the advantage is positive",
    )


@policy_loss("cispo", args=CispoArgs)
def cispo(x: LossInputs, args: CispoArgs) -> LossOutput:
    """With ratio = exp(clip(logprob - old, -20, 20)):

        loss = -A stop_gradient(clip(ratio, 1 - low, 1 + high)) logprob.

    All tokens keep their gradient, unless `enable_mask_clip` masks those with A > 0 and a ratio
    above 1 + mask_clip_range_high, and those with A < 0 and a ratio below 1 - mask_clip_range_low;
    the denominators include masked tokens.  Metrics, as means over valid tokens: pg_clipfrac (the
    weight is clipped), unmasked_frac, those of `ratio_metrics`.
    """
    advantages = valid(x.advantages, x.mask)  # 0 outside the mask
    logprobs = valid(x.logprobs, x.mask)
    ratio = ratios.log_ratio(x).detach().exp()
    weight = ratio.clamp(1 - args.clip_range_low, 1 + args.clip_range_high)
    values = -advantages * weight * logprobs
    mask = x.mask
    if args.enable_mask_clip:
        too_high = (ratio > 1 + args.mask_clip_range_high) & (advantages > 0)
        too_low = (ratio < 1 - args.mask_clip_range_low) & (advantages < 0)
        mask = mask & ~too_high & ~too_low
        values = valid(values, mask)
    return ratios.output(values, x, pg_clipfrac=weight != ratio, unmasked_frac=mask)


define_algorithm(
    "cispo",
    "Clipped importance weights (arXiv:2506.13585).",
    policy_loss_fn="cispo",
    repeat_times=2,
)

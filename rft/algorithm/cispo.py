"""CISPO (arXiv:2506.13585): clipped importance weights that carry no gradient."""

from __future__ import annotations

from pydantic import Field

from rft.algorithm import ratio as ratios
from rft.algorithm.aggregate import aggregate, valid, weighted
from rft.algorithm.args import GradientArgs
from rft.algorithm.base import LossInputs, LossOutput, define_algorithm, policy_loss


class CispoArgs(GradientArgs):
    """Clipped importance weight, gradient through log-probs only (arXiv:2506.13585)."""

    clip_range_low: float = Field(1.0, ge=0, le=1, description="the weight is clipped at 1 - this")
    clip_range_high: float = Field(0.28, ge=0, description="the weight is clipped at 1 + this")
    enable_mask_clip: bool = Field(
        False, description="tokens whose ratio is beyond the two bounds below cost nothing"
    )
    mask_clip_range_low: float = Field(
        1.0, ge=0, le=1, description="so do tokens of bad answers below 1 - this"
    )
    mask_clip_range_high: float = Field(
        0.28, ge=0, description="so do tokens of good answers above 1 + this"
    )


@policy_loss("cispo", args=CispoArgs)
def cispo(x: LossInputs, args: CispoArgs) -> LossOutput:
    """With ratio = exp(clip(logprob - old, -20, 20)):

        loss = -A sg(clip(ratio, 1 - low, 1 + high)) logprob.

    No token loses its gradient, unless `enable_mask_clip` takes those with A > 0 above 1 +
    mask_clip_range_high and those with A < 0 below 1 - mask_clip_range_low; they stay in the
    denominators.  Metrics, as means over valid tokens: cispo_loss, pg_clipfrac (the weight is
    clipped), unmasked_frac, those of `ratio_metrics`.
    """
    a = valid(x.advantages, x.mask)
    own = valid(x.logprobs, x.mask)
    log_ratio = ratios.log_ratio(x)
    ratio = log_ratio.detach().exp()
    weight = ratio.clamp(1 - args.clip_range_low, 1 + args.clip_range_high)
    values = -a * weight * own
    counts = x.mask
    if args.enable_mask_clip:
        over = (ratio > 1 + args.mask_clip_range_high) & (a > 0)
        under = (ratio < 1 - args.mask_clip_range_low) & (a < 0)
        counts = counts & ~over & ~under
        values = valid(values, counts)
    loss = aggregate(weighted(values, x), x)
    sums, maxima = ratios.ratio_metrics(log_ratio, x)
    sums["cispo_loss"] = loss.detach() * x.denominators.tokens
    sums["pg_clipfrac"] = ratios.share(weight != ratio, x)
    sums["unmasked_frac"] = ratios.share(counts, x)
    return LossOutput(loss=loss, sums=sums, maxima=maxima)


define_algorithm(
    "cispo",
    "Clipped importance weights (arXiv:2506.13585).",
    advantage_fn="grpo",
    policy_loss_fn="cispo",
    repeat_times=2,
)

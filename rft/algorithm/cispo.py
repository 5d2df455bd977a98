"""CISPO (arXiv:2506.13585): clipped importance weights that carry no gradient."""

from __future__ import annotations

from rft.algorithm import ratio as ratios
from rft.algorithm.aggregate import aggregate, valid, weighted
from rft.algorithm.base import LossInputs, LossOutput, policy_loss
from rft.algorithm.loss_args import CispoArgs


@policy_loss("cispo", args=CispoArgs)
def cispo(x: LossInputs, args: CispoArgs) -> LossOutput:
    """With ratio = exp(clip(logprob - old, -20, 20)):

        loss = -A sg(clip(ratio, 1 - low, 1 + high)) logprob.

    No token loses its gradient, unless `enable_mask_clip` takes those with A > 0 above 1 + mask_clip_range_high and those with A < 0
    below 1 - mask_clip_range_low; they stay in the denominators.  Metrics, as means over valid tokens: cispo_loss, pg_clipfrac (the
    weight is clipped), unmasked_frac, those of `ratio.told`.
    """
    a, own = valid(x.advantages, x.mask), valid(x.logprobs, x.mask)
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
    sums, maxima = ratios.told(log_ratio, x)
    sums["cispo_loss"] = loss.detach() * x.denominators.tokens
    sums["pg_clipfrac"] = ratios.share(weight != ratio, x)
    sums["unmasked_frac"] = ratios.share(counts, x)
    return LossOutput(loss=loss, sums=sums, maxima=maxima)

"""The clipped policy loss of PPO (arXiv:1707.06347) with dual clip (arXiv:1912.09729).

Knows no advantages' origin, no aggregation, no processes.  Invariant: a token outside the mask changes neither loss nor gradient.
"""

from __future__ import annotations

import torch

from rft.algorithm.aggregate import aggregate, masked_sum, valid
from rft.algorithm.args import PpoArgs
from rft.algorithm.base import LossInputs, LossOutput, policy_loss

LOG_RATIO_LIMIT = 20.0  # exp(20) is finite in float32 with room to square


@policy_loss("ppo", args=PpoArgs)
def ppo(x: LossInputs, args: PpoArgs) -> LossOutput:
    """Per token, with ratio = exp(clip(logprob - old, -20, 20)):

        loss = max(-A ratio, -A clip(ratio, 1 - low, 1 + high)),  and where A < 0 at most -A c.

    x.logprobs, x.old_logprobs, x.advantages: float32 [N].  The gradient is zero for A > 0 above 1 + high, for A < 0 below 1 - low
    or above c.  Metrics, as means over valid tokens: pg_clipfrac (the clipped term is the larger), pg_clipfrac_lower (dual clip
    is active), ppo_kl (old - new log-prob), ratio, ratio_abs_dev (|ratio - 1|); the largest ratio is ratio_max.
    """
    a = valid(x.advantages, x.mask)
    log_ratio = (valid(x.logprobs, x.mask) - valid(x.old_logprobs, x.mask)).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = log_ratio.exp()
    plain = -a * ratio
    clipped = -a * ratio.clamp(1 - args.low, 1 + args.high)
    worse = torch.maximum(plain, clipped)
    limit = -a * args.clip_ratio_c
    loss = aggregate(torch.where(a < 0, torch.minimum(worse, limit), worse), x)
    seen = ratio.detach()
    return LossOutput(
        loss=loss,
        sums={
            "pg_clipfrac": masked_sum((clipped > plain).float(), x.mask),
            "pg_clipfrac_lower": masked_sum(((worse > limit) & (a < 0)).float(), x.mask),
            "ppo_kl": masked_sum(-log_ratio, x.mask),
            "ratio": masked_sum(seen, x.mask),
            "ratio_abs_dev": masked_sum((seen - 1).abs(), x.mask),
        },
        maxima={"ratio_max": valid(seen, x.mask).max() if seen.numel() else seen.new_zeros(())},
    )

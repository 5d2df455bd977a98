"""The clipped policy loss of PPO (arXiv:1707.06347) with dual clip (arXiv:1912.09729).

Independent of how advantages arise, of aggregation and of processes.  Invariant: a token outside
the mask changes neither loss nor gradient.
"""

from __future__ import annotations

from pydantic import Field

from rft.algorithm import ratio as ratios
from rft.algorithm.aggregate import row_means, valid
from rft.algorithm.args import ClippedArgs, GradientArgs
from rft.algorithm.base import LossInputs, LossOutput, define_algorithm, policy_loss


class PpoArgs(ClippedArgs, GradientArgs):
    """Clipped importance ratio (arXiv:1707.06347) with dual clip (arXiv:1912.09729) and separate
    bounds (arXiv:2503.14476).
    """

    clip_ratio_c: float = Field(
        3.0,
        gt=1,
        description="dual clip: a token with negative advantage A costs at most -A times this",
    )
    enable_sequence_masking: bool = Field(
        False,
        description="bad answers that the policy has moved far away from have no loss "
        "(arXiv:2512.02556)",
    )
    delta_sequence_masking: float = Field(
        0.1, ge=0, description="how far: mean of old less new log-prob of the sequence, in nats"
    )
    fallback_to_policy_gradient: bool = Field(
        False,
        description="the ratio is taken against the policy itself: it is 1, nothing is clipped",
    )


@policy_loss("ppo", args=PpoArgs)
def ppo(x: LossInputs, args: PpoArgs) -> LossOutput:
    """Per token, with ratio = exp(clip(logprob - old, -20, 20)):

        loss = max(-A ratio, -A clip(ratio, 1 - low, 1 + high)),  and where A < 0 at most -A c.

    x.logprobs, x.old_logprobs, x.advantages: float32 [N].  The gradient is zero for A > 0 above 1 +
    high, for A < 0 below 1 - low or above c.  With `enable_sequence_masking` tokens with A < 0 cost
    nothing in sequences whose mean of old - logprob is above `delta_sequence_masking`; they stay in
    the denominators.  With `fallback_to_policy_gradient` ratio = exp(logprob - sg(logprob)): it is
    1, nothing is clipped, and the gradient is REINFORCE's.

    Metrics, as means over valid tokens: pg_clipfrac (the clipped term is the larger),
    pg_clipfrac_lower (dual clip is active), those of `ratio_metrics`, and with sequence masking
    seq_mask/masked_tokens and seq_mask/mean_sequence_kl.
    """
    import torch

    a = valid(x.advantages, x.mask)
    log_ratio = ratios.log_ratio(x)
    moved = log_ratio
    if args.fallback_to_policy_gradient:
        logprobs = valid(x.logprobs, x.mask)
        moved = logprobs - logprobs.detach()
    ratio = moved.exp()
    unclipped = -a * ratio
    clipped = -a * ratio.clamp(1 - args.low, 1 + args.high)
    limit = -a * args.clip_ratio_c
    worse = torch.maximum(unclipped, clipped)
    loss = torch.where(a < 0, torch.minimum(worse, limit), worse)
    metrics = {"pg_clipfrac": clipped > unclipped, "pg_clipfrac_lower": (worse > limit) & (a < 0)}
    if args.enable_sequence_masking:
        apart = row_means(-log_ratio.detach(), x)[x.row]
        far = (apart > args.delta_sequence_masking) & (a < 0)
        loss = valid(loss, ~far)
        metrics |= {"seq_mask/masked_tokens": far, "seq_mask/mean_sequence_kl": apart}
    return ratios.output(loss, x, **metrics)


define_algorithm(
    "ppo",
    "Clipped ratio with a critic (arXiv:1707.06347).",
    advantage_fn="ppo",
    repeat_times=1,
)

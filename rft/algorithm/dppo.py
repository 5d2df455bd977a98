"""DPPO (arXiv:2602.04879): tokens are left out by how far their probability has moved, not by the
ratio, so that a rare token is not held back for a large ratio between two tiny probabilities.

Invariant: a token is left out only where its gradient would move it further away.
"""

from __future__ import annotations

from pydantic import Field

from rft.algorithm import ratio as ratios
from rft.algorithm.aggregate import valid
from rft.algorithm.args import GradientArgs
from rft.algorithm.base import LossInputs, LossOutput, define_algorithm, policy_loss

TINY = 1e-8  # keeps the logarithm of 1 - p finite


class DppoArgs(GradientArgs):
    """Ratio loss on tokens whose probability has moved little (arXiv:2602.04879)."""

    clip_range_low: float = Field(
        0.15, gt=0, description="largest divergence of a token of a bad answer that has fallen"
    )
    clip_range_high: float = Field(
        0.15, gt=0, description="largest divergence of a token of a good answer that has risen"
    )
    clip_ratio_c: float = Field(20.0, ge=1, description="the ratio is cut at this")


@policy_loss("dppo_tv", args=DppoArgs)
def dppo_tv(x: LossInputs, args: DppoArgs) -> LossOutput:
    """With p = exp(logprob), q = exp(old), ratio = exp(clip(logprob - old, -20, 20)), D = p - q:

        loss = -A sg(min(ratio, clip_ratio_c)) logprob,  0 where A > 0 and D > clip_range_high, or A
        < 0 and -D > clip_range_low.

    Tokens left out stay in the denominators.  The paper's threshold is 0.15; veRL takes the actor's
    clip_ratio, 0.2, and clip_ratio_c 3, and prime-rl 0.2.  Metrics, as means over valid tokens:
    pg_clipfrac (left out), those of `ratio_metrics`.

    Example: p 0.6, q 0.4, A 1: 0.2 is above 0.15, the loss is 0.  p 0.003, q 0.001: it is -3
    logprob, though the ratio is 3.
    """
    return _masked(x, args)


@policy_loss("dppo_kl", args=DppoArgs)
def dppo_kl(x: LossInputs, args: DppoArgs) -> LossOutput:
    """As `dppo_tv`, with the sign of p - q and the size of the KL of the token against all others:

        |D| = q log(q / p) + (1 - q) log((1 - q) / (1 - p)),  1e-8 added to both 1 - q and 1 - p.

    The paper's threshold is 0.05, which the algorithm of this name writes.
    """
    return _masked(x, args, by_kl=True)


def _masked(x: LossInputs, args: DppoArgs, *, by_kl: bool = False) -> LossOutput:
    a = valid(x.advantages, x.mask)
    logprobs = valid(x.logprobs, x.mask)
    log_ratio = ratios.log_ratio(x).detach()
    p = logprobs.detach().exp()
    q = valid(x.old_logprobs, x.mask).exp()
    moved = p - q
    if by_kl:
        rest = (1 - q) * ((1 - q + TINY) / (1 - p + TINY)).log()
        moved = (rest - q * log_ratio).copysign(moved)
    out = ((a > 0) & (moved > args.clip_range_high)) | ((a < 0) & (-moved > args.clip_range_low))
    weight = log_ratio.exp().clamp(max=args.clip_ratio_c)
    return ratios.output(valid(-a * weight * logprobs, ~out), x, pg_clipfrac=out)


DOC = "Tokens are left out by how far their probability has moved (arXiv:2602.04879)."
define_algorithm("dppo_tv", DOC, policy_loss_fn="dppo_tv")
define_algorithm(
    "dppo_kl",
    DOC,
    policy_loss_fn="dppo_kl",
    policy_loss_fn_args={"clip_range_low": 0.05, "clip_range_high": 0.05},
)

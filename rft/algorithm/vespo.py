"""VESPO (arXiv:2602.10693): whole sequences weigh by a smooth function of their ratio.

Invariant: a sequence is wholly in one micro-batch, so its ratio is exact.
"""

from __future__ import annotations

from pydantic import Field

from rft.algorithm import ratio as ratios
from rft.algorithm.aggregate import row_sums, valid
from rft.algorithm.args import GradientArgs
from rft.algorithm.base import LossInputs, LossOutput, define_algorithm, policy_loss

MIN_LOG_RATIO = -18.42  # log(1e-8)


class VespoArgs(GradientArgs):
    """Gamma kernel of the ratio of a whole sequence (arXiv:2602.10693)."""

    k_pos: float = Field(2.0, gt=0, description="A >= 0: how fast the weight falls below ratio 1")
    lambda_pos: float = Field(3.0, gt=0, description="A >= 0: how fast it falls above")
    k_neg: float = Field(3.0, gt=0, description="A < 0: how fast the weight falls below ratio 1")
    lambda_neg: float = Field(2.0, gt=0, description="A < 0: how fast it falls above")


@policy_loss("vespo", args=VespoArgs)
def vespo(x: LossInputs, args: VespoArgs) -> LossOutput:
    """With w = exp(clip(sum of clip(logprob - old, -20, 20) over the sequence, log 1e-8, 20)):

        loss = -A sg(phi) logprob,  phi = w^k exp(lambda (1 - w)),

    k and lambda by the sign of each token's advantage.  phi(1) = 1: on-policy it is REINFORCE.  TRL
    and the authors' code put an off-policy correction into w; here its weights multiply the loss.
    Metric, as a mean over valid tokens: phi, those of `ratio_metrics`.

    Example: two tokens that each rose by 0.1 have w = 1.221403, and phi = 0.767814 for A > 0.
    """
    import torch

    a = valid(x.advantages, x.mask)
    log_w = row_sums(ratios.log_ratio(x).detach(), x).clamp(MIN_LOG_RATIO, ratios.LOG_RATIO_LIMIT)
    pos, neg = (
        (k * log_w + rate * (1 - log_w.exp())).exp()[x.row]
        for k, rate in ((args.k_pos, args.lambda_pos), (args.k_neg, args.lambda_neg))
    )
    phi = torch.where(a >= 0, pos, neg)
    return ratios.output(-a * phi * valid(x.logprobs, x.mask), x, phi=phi)


define_algorithm(
    "vespo",
    "Smooth weights of whole sequences, for old rows (arXiv:2602.10693).",
    policy_loss_fn="vespo",
)

"""SAPO (arXiv:2511.20347): a soft gate in place of a clip."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from rft.algorithm import ratio as ratios
from rft.algorithm.aggregate import valid
from rft.algorithm.args import AggMode, GradientArgs
from rft.algorithm.base import LossInputs, LossOutput, define_algorithm, policy_loss


class SapoArgs(GradientArgs):
    """Soft gate instead of a clip (arXiv:2511.20347)."""

    agg_mode: ClassVar[AggMode | None] = "run-mean"

    tau_pos: float = Field(1.0, gt=0, description="steepness of the gate for positive advantages")
    tau_neg: float = Field(1.05, gt=0, description="steepness of the gate for the others")


@policy_loss("sapo", args=SapoArgs)
def sapo(x: LossInputs, args: SapoArgs) -> LossOutput:
    """With ratio = exp(clip(logprob - old, -20, 20)) and tau = tau_pos where A > 0, else tau_neg:

        loss = -A gate,  gate = 4 / tau sigmoid(tau (ratio - 1)).

    The gradient is -A 4 p (1 - p) ratio times that of logprob, p = sigmoid(tau (ratio - 1)): it is
    the policy gradient at ratio 1 and fades on both sides.  This is the paper's and veRL's loss;
    Trinity-RFT multiplies the stopped gate with logprob instead, whose gradient grows up to 4 / tau
    where ratio is large.  Defined with run-mean.  Metrics, as means over valid tokens:
    avg_soft_gate, pos_adv_frac, those of `ratio_metrics`.

    Example: ratio 1.5 gives a gate of 2.489837 for tau 1 and 2.393585 for tau 1.05.
    """
    import torch

    a = valid(x.advantages, x.mask)
    tau = torch.where(a > 0, torch.full_like(a, args.tau_pos), torch.full_like(a, args.tau_neg))
    gate = torch.sigmoid(tau * (ratios.log_ratio(x).exp() - 1)) * (4 / tau)
    return ratios.output(-a * gate, x, avg_soft_gate=gate, pos_adv_frac=a > 0)


define_algorithm(
    "sapo",
    "Soft gates (arXiv:2511.20347).",
    policy_loss_fn="sapo",
    repeat_times=2,
    loss_agg_mode="run-mean",
)

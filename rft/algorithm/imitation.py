"""Imitation: the tokens of a row are what the policy shall say.  Advantages and sampling policies
are not read.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from rft.algorithm.aggregate import aggregate, valid
from rft.algorithm.args import Args, Sampled
from rft.algorithm.base import LossInputs, LossOutput, define_algorithm, policy_loss

if TYPE_CHECKING:
    import torch


class SftArgs(Args):
    """For losses that imitate the rows as they are and take no arguments."""

    samples: ClassVar[Sampled] = "none"


class SftPhiArgs(SftArgs):
    """-log-prob p (1 - p) (arXiv:2508.11408)."""

    cutoff_prob: float = Field(
        1.0, gt=0, le=1, description="log-probs are limited to the log of this"
    )


@policy_loss("sft", args=SftArgs)
def sft(x: LossInputs, args: SftArgs) -> LossOutput:
    """Negative log-likelihood: loss = -logprob, per token.  Metric: sft_loss."""
    return likelihood(x)


@policy_loss("sft_is", args=SftArgs)
def sft_is(x: LossInputs, args: SftArgs) -> LossOutput:
    """loss = -logprob sg(p), p = exp(logprob), per token: the gradient of -p (arXiv:2508.05629).
    Metric: sft_loss.
    """
    logprobs = valid(x.logprobs, x.mask)
    return _output(-logprobs * logprobs.detach().exp(), x)


@policy_loss("sft_phi", args=SftPhiArgs)
def sft_phi(x: LossInputs, args: SftPhiArgs) -> LossOutput:
    """With l = min(logprob, log cutoff_prob), p = exp(l), per token: loss = -l sg(p (1 - p))
    (arXiv:2508.11408).

    Tokens that are nearly certain either way count little; above the cutoff there is no gradient.
    Metric: sft_loss.
    """
    return uncertain(x, args.cutoff_prob)


def likelihood(x: LossInputs) -> LossOutput:
    """`sft`, without its empty arguments."""
    return _output(-valid(x.logprobs, x.mask), x)


def uncertain(x: LossInputs, cutoff_prob: float = 1.0) -> LossOutput:
    """`sft_phi` with its argument."""
    logprobs = valid(x.logprobs, x.mask).clamp(max=math.log(cutoff_prob))
    p = logprobs.detach().exp()
    return _output(-logprobs * p * (1 - p), x)


def _output(values: torch.Tensor, x: LossInputs) -> LossOutput:
    loss = aggregate(values, x)
    return LossOutput(loss=loss, sums={"sft_loss": loss.detach() * x.denominators.tokens})


define_algorithm(
    "sft",
    "Supervised fine-tuning on chats.",
    advantage_fn="none",
    policy_loss_fn="sft",
    repeat_times=1,
    data="chats",
    entropy_loss_fn="none",
)
define_algorithm(
    "cpt",
    "Continued pre-training on texts.",
    advantage_fn="none",
    policy_loss_fn="sft",
    repeat_times=1,
    data="texts",
    entropy_loss_fn="none",
)

"""KL losses that hold the policy near the reference model, from log-probs of the sampled tokens
alone.

With d = ref - logprob: k1 = -d, abs = |d|, k2 = d^2/2, k3 = e^d - d - 1 (Schulman, "Approximating
KL divergence"), low_var_kl = k3 with d clipped to +-20 and the result to +-10, corrected_k3 = ratio
k3 with the ratio against the old policy cut at 2, unbiased_k3 (DeepSeek-V3.2, arXiv:2512.02556)
the same uncut, gradient through both; an expert's tokens have no old policy, their ratio is 1.
`name+` has the value of `name` and the gradient of k2, which on samples of the policy is the
gradient of KL(policy || reference); k1 alone has an expected gradient of 0. Invariant: every estimator is 0 where the two models agree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from pydantic import Field

from rft.algorithm.aggregate import aggregate, valid
from rft.algorithm.args import Args, NoArgs
from rft.algorithm.base import LossInputs, LossOutput, kl_loss

if TYPE_CHECKING:
    import torch

    Estimator = Callable[[torch.Tensor], torch.Tensor]

MAX_RATIO = 2.0  # of corrected_k3


class KlArgs(Args):
    """Weight of a KL against the reference model, as a loss or in the reward; constant or steered
    (arXiv:1909.08593).
    """

    kl_coef: float = Field(
        0.001,
        ge=0,
        description="factor of the KL, the first one where it is adaptive; 0 switches the KL and "
        "its model off",
    )
    adaptive: bool = Field(False, description="steer kl_coef so that the KL comes near target_kl")
    target_kl: float = Field(0.1, gt=0, description="the KL that is steered for, in nats per token")
    horizon: int = Field(
        10000, gt=0, description="experiences after which kl_coef follows an error wholly"
    )


def k1(d: torch.Tensor) -> torch.Tensor:
    """Unbiased, of either sign."""
    return -d


def absolute(d: torch.Tensor) -> torch.Tensor:
    """|d|."""
    return d.abs()


def k2(d: torch.Tensor) -> torch.Tensor:
    """Biased, never negative, low variance."""
    return d.square() / 2


def k3(d: torch.Tensor) -> torch.Tensor:
    """Unbiased, never negative; as a loss its gradient is that of KL(reference || policy)."""
    import torch

    return torch.expm1(d) - d


def low_var_kl(d: torch.Tensor) -> torch.Tensor:
    """k3 between limits; no gradient where a limit holds."""
    return k3(d.clamp(-20, 20)).clamp(-10, 10)


ESTIMATORS: dict[str, Estimator] = {
    "k1": k1,
    "abs": absolute,
    "k2": k2,
    "k3": k3,
    "low_var_kl": low_var_kl,
}


def _loss(
    estimate: Estimator, x: LossInputs, args: KlArgs, *, straight_through: bool, max_ratio: float
) -> LossOutput:
    if x.ref_logprobs is None:
        raise ValueError("a KL loss needs x.ref_logprobs; `needs(settings).reference` says so")
    logprobs = valid(x.logprobs, x.mask)
    d = valid(x.ref_logprobs, x.mask) - logprobs
    value = estimate(d)
    if max_ratio:
        sampled = x.mask if x.is_expert is None else x.mask & ~x.is_expert
        value = value * (valid(logprobs, sampled) - valid(x.old_logprobs, sampled)).clamp(
            -20, 20
        ).exp().clamp(max=max_ratio)
    if straight_through:
        pull = k2(d)
        value = pull - pull.detach() + value.detach()
    total = aggregate(value, x)
    coef = x.factors.get("kl_loss", args.kl_coef)
    # what a controller steers: the mean over the rows of the mean over their tokens
    kl = aggregate(value.detach(), replace(x, loss_agg_mode="seq-mean-token-mean"))
    tokens = x.denominators.tokens
    return LossOutput(
        loss=coef * total, sums={"kl_loss": total.detach() * tokens, "kl": kl * tokens}
    )


def _register(name: str, estimate: Estimator, max_ratio: float = 0.0) -> None:
    def add(name: str, straight_through: bool) -> None:
        @kl_loss(name, args=KlArgs)
        def loss(x: LossInputs, args: KlArgs) -> LossOutput:
            return _loss(estimate, x, args, straight_through=straight_through, max_ratio=max_ratio)

    add(name, False)
    add(name + "+", True)


for _name, _estimate in ESTIMATORS.items():
    _register(_name, _estimate)
_register("corrected_k3", k3, MAX_RATIO)
_register("unbiased_k3", k3, float("inf"))


@kl_loss("none", args=NoArgs)
def none(x: LossInputs, args: NoArgs) -> LossOutput:
    """No KL loss."""
    return LossOutput(loss=x.logprobs.new_zeros(()))

"""The entropy bonus: rewards a policy for staying undecided.  Entropies are in nats per token and
come in.
"""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from rft.algorithm.aggregate import aggregate, masked_sum, nothing, part
from rft.algorithm.args import Args, NoArgs
from rft.algorithm.base import LossInputs, LossOutput, entropy_loss


class EntropyArgs(Args):
    """Weight of the entropy bonus, constant or steered (arXiv:2505.22312)."""

    entropy_coef: float = Field(
        0.0,
        ge=0,
        description="factor of the entropy bonus, the first one where it is adaptive; else 0 "
        "switches it off and no entropy is computed",
    )
    adaptive: bool = Field(
        False, description="steer entropy_coef so that the entropy stays near target_entropy"
    )
    target_entropy: float = Field(
        0.2, gt=0, description="entropy below which there is a bonus, in nats per token"
    )
    delta: float = Field(0.005, gt=0, description="change of entropy_coef in a step")
    min_coef: float = Field(0.0, ge=0, description="smallest entropy_coef")
    max_coef: float = Field(1.0, gt=0, description="largest entropy_coef")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.adaptive and not self.min_coef <= self.entropy_coef <= self.max_coef:
            raise ValueError(
                f"entropy_coef {self.entropy_coef} must be between min_coef {self.min_coef} and "
                f"max_coef {self.max_coef}"
            )
        return self


@entropy_loss("default", args=EntropyArgs)
def default(x: LossInputs, args: EntropyArgs) -> LossOutput:
    """loss = -entropy_coef Agg(H), with the aggregation of the policy loss.  x.entropy: float32 [N]
    with gradient.

    With `adaptive` the coefficient is that of `EntropyController`.  TRL's `use_adaptive_entropy` is
    the same rule.
    """
    if x.entropy is None:
        raise ValueError("an entropy loss needs x.entropy; `needs(settings).entropy` says so")
    return LossOutput(
        loss=-x.factors.get("entropy_loss", args.entropy_coef) * aggregate(x.entropy, x),
        sums={"entropy": masked_sum(x.entropy, x.mask)},
    )


@entropy_loss("mix", args=EntropyArgs)
def mix(x: LossInputs, args: EntropyArgs) -> LossOutput:
    """`default` over the policy's own rows alone, with their tokens and rows as denominators; an
    expert's rows have no bonus.
    """
    if (policy := part(x, expert=False)) is None:
        return LossOutput(loss=nothing(x))
    out = default(policy, args)
    each = x.denominators.tokens / policy.denominators.tokens
    return LossOutput(loss=out.loss, sums={name: value * each for name, value in out.sums.items()})


@entropy_loss("none", args=NoArgs)
def none(x: LossInputs, args: NoArgs) -> LossOutput:
    """No entropy bonus."""
    return LossOutput(loss=x.logprobs.new_zeros(()))

"""The entropy bonus: rewards a policy for staying undecided.  Entropies are in nats per token and
come in.
"""

from __future__ import annotations

from pydantic import Field

from rft.algorithm.aggregate import aggregate, masked_sum, nothing, part
from rft.algorithm.args import Args, NoArgs
from rft.algorithm.base import LossInputs, LossOutput, entropy_loss


class EntropyArgs(Args):
    """Weight of the entropy bonus."""

    entropy_coef: float = Field(
        0.0,
        ge=0,
        description="factor of the entropy bonus; 0 switches it off and no entropy is computed",
    )


@entropy_loss("default", args=EntropyArgs)
def default(x: LossInputs, args: EntropyArgs) -> LossOutput:
    """loss = -entropy_coef Agg(H), with the aggregation of the policy loss.  x.entropy: float32 [N]
    with gradient.
    """
    if x.entropy is None:
        raise ValueError("an entropy loss needs x.entropy; `needs(settings).entropy` says so")
    return LossOutput(
        loss=-args.entropy_coef * aggregate(x.entropy, x),
        sums={"entropy": masked_sum(x.entropy, x.mask)},
    )


@entropy_loss("mix", args=EntropyArgs)
def mix(x: LossInputs, args: EntropyArgs) -> LossOutput:
    """`default` over the policy's own rows alone, with their tokens and rows as denominators; an
    expert's rows have no bonus.
    """
    if (own := part(x, expert=False)) is None:
        return LossOutput(loss=nothing(x))
    out = default(own, args)
    each = x.denominators.tokens / own.denominators.tokens
    return LossOutput(loss=out.loss, sums={name: value * each for name, value in out.sums.items()})


@entropy_loss("none", args=NoArgs)
def none(x: LossInputs, args: NoArgs) -> LossOutput:
    """No entropy bonus."""
    return LossOutput(loss=x.logprobs.new_zeros(()))

"""The clipped value loss of a critic (arXiv:1506.02438, arXiv:1707.06347).

Depends on values and what they should have been, not on the model they come from.
Invariant: as for policies, parts of a step add up to the loss of the whole, and a token outside the
mask has no gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rft.algorithm.aggregate import aggregate, masked_sum, valid
from rft.algorithm.base import LossOutput, TokenRows

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class ValueInputs(TokenRows):
    """What the loss of a critic reads, float32 [N].  `values` carries gradient."""

    values: torch.Tensor
    old_values: torch.Tensor  # the critic's before the step
    returns: torch.Tensor


def value_loss(x: ValueInputs, cliprange: float) -> LossOutput:
    """With C = clip(V, old - cliprange, old + cliprange), per token:  max((V - R)^2, (C - R)^2) /
    2,  aggregated as the policy's losses.

    The gradient is 0 where the clipped term is the larger one and V lies outside the range.  Sums,
    all to be divided by `denominators.tokens`: vf_loss, vf_clipfrac (the clipped term is the
    larger), vpred_mean.

    Example: V = 1, .2; old = .2, .2; R = 0, 1; cliprange .5: losses 1 and .64 before halving, .41
    together.
    """
    import torch

    v, old, target = (valid(t, x.mask) for t in (x.values, x.old_values, x.returns))
    clipped = torch.minimum(torch.maximum(v, old - cliprange), old + cliprange)
    unclipped = (v - target).square()
    other = (clipped - target).square()
    loss = aggregate(torch.maximum(unclipped, other), x) / 2
    return LossOutput(
        loss=loss,
        sums={
            "vf_loss": loss.detach() * x.denominators.tokens,
            "vf_clipfrac": masked_sum((other > unclipped).float(), x.mask),
            "vpred_mean": masked_sum(v, x.mask),
        },
    )


def explained_variance(values: np.ndarray, returns: np.ndarray) -> float:
    """1 - Var(returns - values) / (Var(returns) + 1e-5): 1 = the critic knew them, 0 = a constant
    would do as well.
    """
    values = values.astype(np.float64)
    returns = returns.astype(np.float64)
    return float(1.0 - np.var(returns - values) / (np.var(returns) + 1e-5))

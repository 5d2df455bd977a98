"""PPO on the tokens where the policy was least sure: the 80/20 rule (arXiv:2506.01939).

Invariant: which tokens are trained is decided over all tokens of the step, under the weights before
it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
from pydantic import Field

from rft.algorithm.aggregate import masked_sum, valid, weighted
from rft.algorithm.args import Computed
from rft.algorithm.base import (
    LossInputs,
    LossOutput,
    StepInputs,
    define_algorithm,
    policy_extra,
    policy_loss,
)
from rft.algorithm.ppo import PpoArgs, ppo

FORK = "fork"


class ForkingArgs(PpoArgs):
    """PPO on the tokens of highest entropy (arXiv:2506.01939)."""

    before: ClassVar[frozenset[Computed]] = frozenset({"entropy"})

    share: float = Field(0.2, gt=0, le=1, description="share of the step's tokens that are trained")


@policy_loss("forking_tokens", args=ForkingArgs)
def forking_tokens(x: LossInputs, args: ForkingArgs) -> LossOutput:
    """loss of `ppo` on the tokens of highest entropy, else 0; all tokens are in the denominators.

    TRL's `top_entropy_quantile` is `share`; it chooses among the tokens of a micro-batch, under the
    weights of the pass.  Metrics, as means over valid tokens: fork_frac (the token is trained),
    those of `ppo`.
    """
    fork = valid(x.extra[FORK], x.mask)
    out = ppo(replace(x, weights=weighted(fork, x)), args)
    out.sums["fork_frac"] = masked_sum(fork, x.mask)
    return out


@policy_extra("forking_tokens", args=ForkingArgs)
def highest_entropy(
    x: StepInputs, advantages: Sequence[np.ndarray], args: ForkingArgs
) -> Mapping[str, Sequence[np.ndarray]]:
    """1 for tokens whose entropy is at or above the quantile 1 - share of the step's, else 0.

    float32 [L_i].  Example: share 0.4 of entropies 0.9, 0.1, 0.2, 0.8, 0.3 gives 1, 0, 0, 1, 0.
    """
    entropy = np.concatenate([row.entropy for row in x.rows if row.entropy is not None])
    limit = np.quantile(entropy[x.counted], 1 - args.share)
    return {FORK: x.split((entropy >= limit).astype(np.float32))}


define_algorithm(
    "forking_tokens",
    "DAPO on the fifth of the tokens where the policy was least sure (arXiv:2506.01939).",
    policy_loss_fn="forking_tokens",
    policy_loss_fn_args={"clip_range_high": 0.28},
    repeat_times=16,
)

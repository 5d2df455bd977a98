"""M2PO (arXiv:2510.01161): tokens whose ratio has gone too far are left out until the second moment
of the others is small.

Invariant: which tokens are left out is decided over all tokens of the step, under the weights
before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
from pydantic import Field

from rft.algorithm import ratio as ratios
from rft.algorithm.aggregate import valid
from rft.algorithm.args import Computed, GradientArgs
from rft.algorithm.base import (
    LossInputs,
    LossOutput,
    StepInputs,
    define_algorithm,
    policy_extra,
    policy_loss,
)

KEPT = "m2po_kept"


class M2poArgs(GradientArgs):
    """Ratio loss on tokens kept by their second moment (arXiv:2510.01161)."""

    before: ClassVar[frozenset[Computed]] = frozenset({"old"})

    m2_threshold: float = Field(
        0.04, gt=0, description="largest mean of the squared log ratio among the kept tokens"
    )
    log_ratio_clip: float = Field(
        20.0, gt=0, description="limit of the log ratio before the exponential"
    )


@policy_loss("m2po", args=M2poArgs)
def m2po(x: LossInputs, args: M2poArgs) -> LossOutput:
    """loss = -A ratio on the kept tokens, else 0, ratio = exp(clip(logprob - old,
    +-log_ratio_clip)).

    All valid tokens are in the denominators.  Metrics, as means over valid tokens: masked_fraction,
    those of `ratio_metrics`.
    """
    keep = valid(x.extra[KEPT], x.mask) > 0
    log_ratio = ratios.log_ratio(x, args.log_ratio_clip)
    values = valid(-valid(x.advantages, x.mask) * log_ratio.exp(), keep)
    return ratios.output(values, x, masked_fraction=~keep)


@policy_extra("m2po", args=M2poArgs)
def kept_tokens(
    x: StepInputs, advantages: Sequence[np.ndarray], args: M2poArgs
) -> Mapping[str, Sequence[np.ndarray]]:
    """1 for tokens that are kept, else 0, float32 [L_i].

    Of the tokens that move on in the direction they have gone (A > 0 and ratio > 1, A < 0 and ratio
    < 1), sorted by (log ratio)^2, the longest beginning whose mean is at most m2_threshold is kept;
    all other tokens are.
    """
    log_ratio = np.concatenate([x.log_ratio(row) for row in x.rows])
    onwards = x.counted & (np.concatenate(advantages) * log_ratio > 0)
    moments = np.square(log_ratio[onwards])
    order = np.argsort(moments, kind="stable")
    running = np.cumsum(moments[order]) / np.arange(1, len(order) + 1)
    keep = np.ones(len(log_ratio), np.float32)
    keep[np.flatnonzero(onwards)[order[np.count_nonzero(running <= args.m2_threshold) :]]] = 0
    return {KEPT: x.split(keep)}


define_algorithm(
    "m2po",
    "Second-moment mask for stale rows (arXiv:2510.01161).",
    policy_loss_fn="m2po",
)

"""Importance ratios of tokens and their metrics, shared by the losses that use them.

Invariant: a token outside the mask has ratio 1 and no gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rft.algorithm.aggregate import aggregate, masked_sum, valid, weighted
from rft.algorithm.base import LossInputs, LossOutput

if TYPE_CHECKING:
    import torch

LOG_RATIO_LIMIT = 20.0  # exp(20) is finite in float32 with room to square


def difference(x: LossInputs) -> torch.Tensor:
    """logprob - old, [N]; 0 outside the mask."""
    return valid(x.logprobs, x.mask) - valid(x.old_logprobs, x.mask)


def log_ratio(x: LossInputs, limit: float = LOG_RATIO_LIMIT) -> torch.Tensor:
    """clip(logprob - old, -limit, limit), [N]; no gradient beyond the limits."""
    return difference(x).clamp(-limit, limit)


def ratio_metrics(
    log_ratio: torch.Tensor, x: LossInputs
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(sums, maxima) that every ratio loss reports: ppo_kl (old - new log-prob), ratio,
    ratio_abs_dev (|ratio - 1|); ratio_max.
    """
    log_ratio = log_ratio.detach()
    ratio = log_ratio.exp()
    sums = {
        "ppo_kl": masked_sum(-log_ratio, x.mask),
        "ratio": masked_sum(ratio, x.mask),
        "ratio_abs_dev": masked_sum((ratio - 1).abs(), x.mask),
    }
    return sums, {"ratio_max": valid(ratio, x.mask).max() if ratio.numel() else ratio.new_zeros(())}


def output(values: torch.Tensor, x: LossInputs, **metrics: torch.Tensor) -> LossOutput:
    """Token losses, [N], weighted and aggregated, with `ratio_metrics` and the means over valid
    tokens of `metrics`, float or bool [N].
    """
    sums, maxima = ratio_metrics(log_ratio(x), x)
    for name, metric in metrics.items():
        sums[name] = masked_sum(metric.to(values.dtype), x.mask)
    return LossOutput(loss=aggregate(weighted(values, x), x), sums=sums, maxima=maxima)

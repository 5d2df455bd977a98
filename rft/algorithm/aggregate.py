"""How token losses become one number, exactly, however the step is cut into micro-batches and ranks.

    mode                       all valid tokens of the step (m: mask, L_i: valid tokens of row i, K: max_response_tokens)
    token-mean                 sum m X / tokens
    seq-mean-token-sum         sum m X / rows
    seq-mean-token-mean        sum_i (sum_t m X)_i / L_i / rows
    seq-mean-token-sum-norm    sum m X / (K rows)

tokens and rows (those with a valid token) count the whole step and come in.  Invariant: the results of all parts add up to
the result for the whole.  It rests on every row lying wholly in one micro-batch, where L_i is counted.
"""

from __future__ import annotations

import torch

from rft.algorithm.base import LossInputs


def valid(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`values` with 0 where the mask is False; NaN and infinity there are harmless, in the gradient too."""
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


def masked_sum(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Detached sum over valid tokens, for metrics."""
    return valid(values.detach(), mask).sum()


def aggregate(values: torch.Tensor, x: LossInputs) -> torch.Tensor:
    """This micro-batch's part of the loss: scalar from `values`, float32 [N], by `x.loss_agg_mode`."""
    d = x.denominators
    if d.tokens <= 0 or d.rows <= 0:
        raise ValueError(f"a step with {d.tokens} valid tokens in {d.rows} rows has no loss; the caller skips such a step")
    values = valid(values, x.mask)
    match x.loss_agg_mode:
        case "token-mean":
            return values.sum() / d.tokens
        case "seq-mean-token-sum":
            return values.sum() / d.rows
        case "seq-mean-token-mean":
            lengths = values.new_zeros(x.num_rows).index_add_(0, x.row, x.mask.to(values.dtype))
            return (values / lengths.clamp(min=1)[x.row]).sum() / d.rows
        case "seq-mean-token-sum-norm":
            return values.sum() / (d.max_response_tokens * d.rows)

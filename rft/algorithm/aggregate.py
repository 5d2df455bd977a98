"""How token losses become one number, exactly, however the step is cut into micro-batches and
ranks, and runs into rows.

    mode                       all valid tokens of the step (m: mask, L: valid tokens of row i, run r, group g, K: max_response_tokens)
    token-mean                 sum m X / tokens
    token-sum                  sum m X
    run-mean                   sum_r (sum_t m X)_r / L_r / runs
    prompt-mean                sum_g (sum_t m X)_g / L_g / groups
    seq-mean-token-sum         sum m X / runs
    seq-mean-token-sum-norm    sum m X / (K runs)
    seq-mean-token-mean        sum_i (sum_t m X)_i / L_i / rows

tokens, groups, runs and rows (those with a valid token), L_g and L_r count the whole step and come
in.
Invariant: the results of all parts add up to the result for the whole.  L_i is counted in the
micro-batch, which holds every row wholly; the rows of a run
or of a group may lie in several.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rft.algorithm.base import LossInputs, TokenRows

if TYPE_CHECKING:
    import torch


def valid(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`values` with 0 where the mask is False; NaN and infinity there are harmless, in the gradient
    too.
    """
    return values.masked_fill(~mask, 0)


def masked_sum(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Detached sum over valid tokens, for metrics."""
    return valid(values.detach(), mask).sum()


def row_sums(values: torch.Tensor, x: TokenRows) -> torch.Tensor:
    """Sums of `values`, [N], over the valid tokens of each row: [S]."""
    return values.new_zeros(x.num_rows).index_add_(0, x.row, valid(values, x.mask))


def row_means(values: torch.Tensor, x: TokenRows) -> torch.Tensor:
    """Means of `values`, [N], over the valid tokens of each row: [S]; 0 for a row that has none."""
    import torch

    return row_sums(values, x) / row_sums(torch.ones_like(values), x).clamp(min=1)


def _means(values: torch.Tensor, x: TokenRows, tokens: torch.Tensor | None) -> torch.Tensor:
    """Of each token [N] its share of the mean over its unit, which has so many `tokens`; None: means
    of rows [S].
    """
    return row_means(values, x) if tokens is None else values / tokens.clamp(min=1)


def weighted(values: torch.Tensor, x: LossInputs) -> torch.Tensor:
    """Token losses times the weights of an off-policy correction, where there is one."""
    return values if x.weights is None else valid(values, x.mask) * valid(x.weights, x.mask)


def part(x: LossInputs, *, expert: bool) -> LossInputs | None:
    """The rows of an expert, or the others, with their own denominators.  None: the step has no
    such rows.
    """
    if x.is_expert is None:
        return None if expert else x
    d = x.denominators
    policy = replace(
        d,
        tokens=d.expert_tokens,
        rows=d.expert_rows,
        num_runs=d.num_runs and d.expert_runs,
        num_groups=d.num_groups and d.expert_groups,
    )
    if not expert:
        policy = replace(
            d,
            tokens=d.tokens - policy.tokens,
            rows=d.rows - policy.rows,
            num_runs=d.num_runs and d.num_runs - d.expert_runs,
            num_groups=d.num_groups and d.num_groups - d.expert_groups,
        )
    if policy.tokens <= 0 or policy.rows <= 0:
        return None
    return replace(x, mask=x.mask & (x.is_expert if expert else ~x.is_expert), denominators=policy)


def nothing(x: LossInputs) -> torch.Tensor:
    """A loss of 0 with a gradient of 0."""
    import torch

    return valid(x.logprobs, torch.zeros_like(x.mask)).sum()


def aggregate(values: torch.Tensor, x: TokenRows) -> torch.Tensor:
    """This micro-batch's part of the loss: scalar from `values`, float32 [N], by `x.loss_agg_mode`."""
    d = x.denominators
    if d.tokens <= 0 or d.rows <= 0:
        raise ValueError(
            f"a step with {d.tokens} valid tokens in {d.rows} rows has no loss; the caller skips "
            f"such a step"
        )
    values = valid(values, x.mask)
    match x.loss_agg_mode:
        case "token-mean":
            return values.sum() / d.tokens
        case "token-sum":
            return values.sum()
        case "run-mean":
            return _means(values, x, x.run_tokens).sum() / d.runs
        case "prompt-mean":
            tokens = x.run_tokens if x.group_tokens is None else x.group_tokens
            return _means(values, x, tokens).sum() / d.groups
        case "seq-mean-token-sum":
            return values.sum() / d.runs
        case "seq-mean-token-sum-norm":
            return values.sum() / (d.max_response_tokens * d.runs)
        case "seq-mean-token-mean":
            return row_means(values, x).sum() / d.rows

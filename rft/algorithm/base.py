"""What an algorithm is made of: pure functions over token tensors, each with its own `Args`.

Nothing here knows processes, buffers or configuration.  Denominators come in, so cutting a batch differently gives the same
gradient: a micro-batch's losses are *sums* divided by totals of the whole step, and the parts add up.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from rft.algorithm.args import AggMode
from rft.plugins import kind

advantage = kind("advantage_fn")
policy_loss = kind("policy_loss_fn")
kl_loss = kind("kl_loss_fn")
entropy_loss = kind("entropy_loss_fn")


@dataclass(frozen=True)
class Denominators:
    """Totals over the whole train step (all micro-batches, all ranks)."""

    tokens: float  # sum of the loss mask
    rows: float  # rows with at least one unmasked token
    max_response_tokens: int  # K of seq-mean-token-sum-norm


@dataclass(frozen=True)
class LossInputs:
    """One micro-batch in packed form.  N = number of response tokens in it, S = number of sequences.

    All per-token tensors are float32 [N]; `row` is int64 [N], the sequence each token belongs to (0..S-1).
    `mask` is bool [N] (False tokens never count, whatever they hold).  `logprobs` carries gradient; nothing else does, save
    `entropy`.  Invariant: all tokens of a sequence are in the same micro-batch, where per-sequence statistics are taken.
    """

    logprobs: torch.Tensor
    old_logprobs: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor
    row: torch.Tensor
    num_rows: int
    denominators: Denominators
    ref_logprobs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    rollout_logprobs: torch.Tensor | None = None
    loss_agg_mode: AggMode = "token-mean"  # set by `Algorithm.loss` from the settings


@dataclass(frozen=True)
class LossOutput:
    """`loss` is a scalar to call backward on.  `sums` are masked sums by metric name.

    Sums add over micro-batches and ranks; divided by `denominators.tokens` they are the metric.  Losses among them are scaled so
    that this gives the loss itself, whatever the aggregation mode.  `maxima` combine by max.  All are detached scalars.
    """

    loss: torch.Tensor
    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    maxima: dict[str, torch.Tensor] = field(default_factory=dict)

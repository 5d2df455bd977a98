"""Draw one token per row from logits.  Depends on no model and no requests.

Order of the steps as in vLLM: choices, minimum length, penalties, temperature, min_p, top_k, top_p.
Reported log-probs (natural log) are of the distribution after all steps.
Invariant: a row's draw depends only on its own logits and its own random numbers.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from rft.types.task import SamplingArgs

NOTHING = float("-inf")


@dataclass
class RowState:
    """Sampling state of one row; `written` are its generated tokens so far."""

    sampling: SamplingArgs
    seed: int
    prompt: Sequence[int]
    end_tokens: Sequence[int]
    written: list[int] = field(default_factory=list)
    choices: Sequence[int] = ()  # the only allowed tokens; empty = all

    def __post_init__(self) -> None:
        self.random = np.random.Generator(np.random.Philox(self.seed % (1 << 64)))

    @property
    def penalized(self) -> bool:
        s = self.sampling
        return s.repetition_penalty != 1 or s.presence_penalty != 0 or s.frequency_penalty != 0

    @property
    def too_short(self) -> bool:
        return len(self.written) < self.sampling.min_tokens


def draw(logits: torch.Tensor, rows: Sequence[RowState]) -> tuple[list[int], list[float]]:
    """Draw one token and its log-prob for each row.  `logits` [B, V] are overwritten.

    One uniform number per row and token, none when greedy.
    """
    logits = logits.float()
    if torch.are_deterministic_algorithms_enabled():  # torch then refuses cumsum on GPUs
        logits = logits.cpu()
    for i, row in enumerate(rows):
        if row.choices:
            only = logits[i, list(row.choices)]
            logits[i].fill_(NOTHING)[list(row.choices)] = only
        if row.too_short:
            logits[i, list(row.end_tokens)] = NOTHING
        if row.penalized:
            _penalize(logits[i], row)
    temperature = torch.tensor(
        [row.sampling.temperature or 1.0 for row in rows], device=logits.device
    )
    if bool((temperature != 1).any()):
        logits /= temperature.unsqueeze(1)
    for i, row in enumerate(rows):
        if row.sampling.temperature > 0:
            _cut(logits[i], row.sampling)
    logps = logits.log_softmax(-1)
    uniform = torch.tensor(
        [row.random.random() if row.sampling.temperature > 0 else 0.0 for row in rows],
        dtype=torch.float64,
    )
    greedy = torch.tensor([row.sampling.temperature == 0 for row in rows], device=logits.device)
    tokens = torch.where(greedy, logps.argmax(-1), pick(logps, uniform.to(logits.device)))
    chosen = logps.gather(1, tokens.unsqueeze(1)).squeeze(1)
    return tokens.tolist(), chosen.tolist()


def pick(logps: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Return the token of each row, int64 [B], at which the cumulative distribution of `logps` [B,
    V] exceeds `uniform`, float64 [B] in [0, 1).

    Tokens of probability 0 are never drawn.  Sums are float64; float32 sums would misplace rare
    tokens of a large vocabulary.
    """
    sums = logps.double().exp_().cumsum_(-1)
    total = sums[:, -1:]
    # rounding may raise the product to the total
    at = torch.minimum(uniform.unsqueeze(1) * total, total.nextafter(torch.zeros_like(total)))
    # a row may be nan
    return torch.searchsorted(sums, at, right=True).squeeze(1).clamp_max(logps.shape[1] - 1)


def _penalize(logits: torch.Tensor, row: RowState) -> None:
    """Apply the repetition penalty over prompt and answer (divides positive, multiplies negative
    logits); the other penalties over the answer.
    """
    s = row.sampling
    if s.repetition_penalty != 1:
        used = torch.tensor(sorted({*row.prompt, *row.written}), device=logits.device)
        old = logits[used]
        logits[used] = torch.where(old > 0, old / s.repetition_penalty, old * s.repetition_penalty)
    if row.written and (s.presence_penalty or s.frequency_penalty):
        tokens, counts = torch.tensor(row.written, device=logits.device).unique(return_counts=True)
        logits[tokens] -= s.frequency_penalty * counts + s.presence_penalty


def _cut(logits: torch.Tensor, s: SamplingArgs) -> None:
    """Set logits outside min_p, top_k and top_p to -inf, in place."""
    if s.min_p > 0:
        logits[logits < logits.max() + float(np.log(s.min_p))] = NOTHING
    if s.top_k != -1 and s.top_k < len(logits):
        logits[logits < logits.topk(s.top_k).values[-1]] = NOTHING
    if s.top_p < 1:
        ordered, index = logits.sort(descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        # the cumulative probability before the likeliest token is 0, so that token stays
        logits[index[before >= s.top_p]] = NOTHING

"""The gradient of distillation from likely tokens, written once more: transformers in float64, one row
at a time, no tiles.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rft.trainer.rows.pack import TrainRow

V = 259  # tokens of the tiny models


def divergence(kind: str, t: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    """Of log-probs [L, C], summed over the classes."""
    m = torch.log(0.5 * t.exp() + 0.5 * s.exp())
    return {
        "forward": t.exp() * (t - s),
        "reverse": s.exp() * (s - t),
        "jsd": 0.5 * t.exp() * (t - m) + 0.5 * s.exp() * (s - m),
        "skew_forward": t.exp() * (t - m),
        "skew_reverse": s.exp() * (s - m),
    }[kind].sum(-1)


def reference(model: Any, rows: list[TrainRow], kind: str) -> dict[str, torch.Tensor]:
    """Gradient of the mean divergence over all trained tokens, row by row; with all tokens of the
    vocabulary their divergence, without a class for others.
    """
    model.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    tokens = 0
    for row in rows:
        ids = torch.from_numpy(row.tokens.astype(np.int64))[None]
        at = torch.from_numpy(row.loss_mask.nonzero()[0]) - 1
        temperatures = torch.as_tensor(row.temperatures).expand(len(row.tokens))[at + 1]
        s = (model(ids).logits[0, at] / temperatures[:, None].double()).log_softmax(-1)
        assert row.top_ids is not None and row.top_logprobs is not None
        chosen = torch.from_numpy(row.top_ids.astype(np.int64))
        t = torch.from_numpy(row.top_logprobs.astype(np.float64))
        if chosen.shape[1] == V:
            t = t[:, :-1].log_softmax(-1)
            s = s.gather(1, chosen)
        else:
            t = t.log_softmax(-1)
            others = s.scatter(1, chosen, -torch.inf).logsumexp(-1, keepdim=True)
            s = torch.cat([s.gather(1, chosen), others], 1)
        total = total + divergence(kind, t, s).sum()
        tokens += len(at)
    (total / tokens).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

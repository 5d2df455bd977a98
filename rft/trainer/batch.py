"""Rows of one micro-batch as the tensors a model reads, shared by training, scoring and the reference model.

Knows rows and layouts; not models or losses.  Invariant: token n of the result belongs to row `row[n]`; rows are in the order given and
tokens in the order of their row, whichever way the input is laid out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rft.trainer import attention, prefix
from rft.trainer.pack import TrainRow

GIVEN = ("old", "ref", "values", "returns", "weights")


@dataclass(frozen=True)
class MicroBatch:
    """N trained tokens of S rows.  Inputs are one prefix tree [1, T] with `tree`, or padded rows [S, W] with `attention_mask`."""

    input_ids: torch.Tensor  # int64 [1, T] or [S, W]
    position_ids: torch.Tensor  # same shape
    attention_mask: torch.Tensor | None
    tree: Any  # Layout, or its share of one (rft.trainer.ulysses); None: padded rows
    predict: torch.Tensor  # int64 [N], flat position in the input that predicts each trained token
    targets: torch.Tensor  # int64 [N]
    temperatures: torch.Tensor  # float32 [N]
    rollout_logprobs: torch.Tensor  # float32 [N]
    advantages: torch.Tensor  # float32 [N]
    mask: torch.Tensor  # bool [N], tokens that count
    is_expert: torch.Tensor  # bool [N]
    row: torch.Tensor  # int64 [N]
    num_rows: int
    given: Mapping[str, torch.Tensor]  # float32 [N]: old, ref, values, returns, weights, where the rows have them
    extra: Mapping[str, torch.Tensor]  # float32 [N], see `LossInputs.extra`

    @property
    def computed(self) -> int:
        """Positions the model computes, padding included."""
        return self.input_ids.numel()


def make(rows: Sequence[TrainRow], *, share: bool, heads_per_key: int, dtype: torch.dtype, device: torch.device) -> MicroBatch:
    """The micro-batch of `rows`, on `device`.  `share`: prefixes are computed once (`rft.trainer.prefix`), else rows are padded."""
    inputs = [r.tokens[: r.input_length] for r in rows]
    trained = [r.loss_mask.nonzero()[0] for r in rows]
    lengths = [len(at) for at in trained]

    def tensor(parts: Sequence[np.ndarray], dtype: type) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(parts).astype(dtype)).to(device)

    if share:
        tree = prefix.build(inputs)
        ids, positions = (torch.from_numpy(a).to(device)[None] for a in (tree.tokens, tree.positions))
        mask, how = None, attention.layout(tree, heads_per_key=heads_per_key, dtype=dtype, device=device)
        predict = [path[at - 1] for path, at in zip(tree.paths, trained, strict=True)]
    else:
        width = max(map(len, inputs))
        padded = np.zeros((len(rows), width), np.int64)
        real = np.zeros((len(rows), width), np.int64)
        for i, tokens in enumerate(inputs):
            padded[i, : len(tokens)], real[i, : len(tokens)] = tokens, 1
        ids, mask = torch.from_numpy(padded).to(device), torch.from_numpy(real).to(device)
        positions, how = torch.arange(width, device=device).expand_as(ids), None
        predict = [i * width + at - 1 for i, at in enumerate(trained)]

    def spread(name: str, default: float) -> torch.Tensor:
        """Column `name` of every row, [L] or one value for all its tokens."""
        values = [default if (v := getattr(r, name)) is None else v for r in rows]
        if any(isinstance(v, np.ndarray) for v in values):
            each = [v if isinstance(v, np.ndarray) else np.full(n, v, np.float32) for v, n in zip(values, lengths, strict=True)]
            return tensor(each, np.float32)
        return torch.from_numpy(np.repeat(np.asarray(values, np.float32), lengths)).to(device)

    return MicroBatch(
        input_ids=ids,
        position_ids=positions,
        attention_mask=mask,
        tree=how,
        predict=tensor(predict, np.int64),
        targets=tensor([r.tokens[at] for r, at in zip(rows, trained, strict=True)], np.int64),
        temperatures=tensor([r.temperatures[at] for r, at in zip(rows, trained, strict=True)], np.float32),
        rollout_logprobs=tensor([r.logprobs[at] for r, at in zip(rows, trained, strict=True)], np.float32),
        advantages=spread("advantages", 0.0),
        mask=spread("keep", 1.0).bool(),
        is_expert=spread("is_expert", 0.0).bool(),
        row=torch.from_numpy(np.repeat(np.arange(len(rows)), lengths)).to(device),
        num_rows=len(rows),
        given={name: spread(name, 0.0) for name in GIVEN if getattr(rows[0], name) is not None},
        extra={name: tensor([r.extra[name] for r in rows], np.float32) for name in rows[0].extra},
    )

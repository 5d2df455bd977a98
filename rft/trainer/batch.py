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

_DTYPES = {np.float32: torch.float32, np.bool_: torch.bool}
GIVEN = ("old", "ref", "values", "returns", "weights")


@dataclass(frozen=True)
class MicroBatch:
    """N trained tokens of S rows.  Inputs are one prefix tree [1, T] with `tree`, or padded rows [S, W] with `attention_mask`."""

    input_ids: torch.Tensor  # int64 [1, T] or [S, W]
    position_ids: torch.Tensor  # same shape
    attention_mask: torch.Tensor | None  # bool [S, W]
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

    def tensor(values: np.ndarray, dtype: type) -> torch.Tensor:
        return torch.from_numpy(values.astype(dtype, copy=False)).to(device)

    inputs = [r.inputs for r in rows]
    mask = np.concatenate([r.loss_mask for r in rows])
    trained = mask.nonzero()[0]  # in the tokens of all rows, one row after the other
    ends = np.cumsum([len(r.tokens) for r in rows])
    lengths = np.diff(trained.searchsorted(ends), prepend=0)
    begins = ends - [len(r.tokens) for r in rows]
    if share:
        tree = prefix.build(inputs)
        ids, positions = (torch.from_numpy(a).to(device)[None] for a in (tree.tokens, tree.positions))
        attended, how = None, attention.layout(tree, heads_per_key=heads_per_key, dtype=dtype, device=device)
        paths = np.concatenate(tree.paths)
        offsets = np.cumsum([0, *map(len, inputs[:-1])])
        predict = paths[trained + np.repeat(offsets - begins - 1, lengths)]
    else:
        read = np.array([len(tokens) for tokens in inputs])
        width = int(read.max())
        padded = torch.empty((len(rows), width), dtype=torch.int64)  # filled by NumPy: torch would wake its threads
        for line, tokens in zip(padded.numpy(), inputs, strict=True):
            line[: len(tokens)], line[len(tokens) :] = tokens, 0
        ids, attended = padded.to(device), tensor(np.arange(width) < read[:, None], np.bool_)
        positions, how = torch.arange(width, device=device).expand_as(ids), None
        predict = trained + np.repeat(np.arange(len(rows)) * width - begins - 1, lengths)

    def gathered(name: str) -> np.ndarray:
        """What column `name`, [T] of every row, says of the trained tokens."""
        values: np.ndarray = np.concatenate([getattr(r, name) for r in rows])[mask]
        return values

    def spread(values: Sequence[Any], default: Any, dtype: type = np.float32) -> torch.Tensor:
        """Values of every row, [L] or one for all its tokens; None is `default`."""
        values = [default if v is None else v for v in values]
        if all(v is values[0] for v in values) and not isinstance(values[0], np.ndarray):
            return torch.tensor(values[0], dtype=_DTYPES[dtype], device=device).expand(len(trained))
        if any(isinstance(v, np.ndarray) for v in values):
            return tensor(np.concatenate([np.broadcast_to(v, n) for v, n in zip(values, lengths, strict=True)]), dtype)
        return tensor(np.repeat(np.asarray(values, dtype), lengths), dtype)

    temperatures = [t[r.loss_mask] if isinstance(t := r.temperatures, np.ndarray) else t for r in rows]
    return MicroBatch(
        input_ids=ids,
        position_ids=positions,
        attention_mask=attended,
        tree=how,
        predict=tensor(predict, np.int64),
        targets=tensor(gathered("tokens"), np.int64),
        temperatures=spread(temperatures, 1.0),
        rollout_logprobs=tensor(gathered("logprobs"), np.float32),
        advantages=spread([r.advantages for r in rows], 0.0),
        mask=spread([r.keep for r in rows], True, np.bool_),
        is_expert=spread([r.is_expert for r in rows], False, np.bool_),
        row=tensor(np.repeat(np.arange(len(rows)), lengths), np.int64),
        num_rows=len(rows),
        given={name: spread([getattr(r, name) for r in rows], 0.0) for name in GIVEN if getattr(rows[0], name) is not None},
        extra={name: tensor(np.concatenate([r.extra[name] for r in rows]), np.float32) for name in rows[0].extra},
    )

"""Rows of one micro-batch as the tensors a model reads, shared by training, scoring and the
reference model.

Knows rows and layouts; not models or losses.  Invariant: token n of the result belongs to row
`row[n]`; rows are in the order given and tokens in the order of their row, whichever way the input
is laid out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from rft.trainer import attention, prefix
from rft.trainer.pack import TrainRow
from rft.types.experts import TOKEN
from rft.types.row_layout import AskedLayout

_DTYPES = {np.float32: torch.float32, np.bool_: torch.bool}
GIVEN = ("old", "ref", "values", "returns", "weights", "run_tokens")


@dataclass(frozen=True)
class MicroBatch:
    """N trained tokens of S rows.  Inputs are one prefix tree [1, T] with `tree`, or padded rows
    [S, W] with `attention_mask`.
    """

    input_ids: torch.Tensor  # int64 [1, T] or [S, W]
    position_ids: torch.Tensor  # same shape
    attention_mask: torch.Tensor | None  # bool [S, W]
    tree: Any  # Layout, or its share of one (rft.trainer.ulysses); None: padded rows
    lengths: Sequence[int]  # of packed rows, which lie one behind the other; of other layouts empty
    predict: torch.Tensor  # int64 [N], flat position in the input that predicts each trained token
    targets: torch.Tensor  # int64 [N]
    # float32 [N]; None: all are 1, so that no logits have to be divided
    temperatures: torch.Tensor | None
    rollout_logprobs: torch.Tensor  # float32 [N]
    advantages: torch.Tensor  # float32 [N]
    mask: torch.Tensor  # bool [N], tokens that count
    is_expert: torch.Tensor  # bool [N]
    row: torch.Tensor  # int64 [N]
    num_rows: int
    given: Mapping[str, torch.Tensor]  # float32 [N]: those of GIVEN, where the rows have them
    extra: Mapping[str, torch.Tensor]  # float32 [N], see `LossInputs.extra`
    # float32 [positions of the input], how many rows have each; 0 for padding
    counts: torch.Tensor | None = None
    # int32 [positions, layers, experts] to go through; -1: the router's own choice
    experts: torch.Tensor | None = None

    @property
    def computed(self) -> int:
        """Positions the model computes, padding included."""
        return self.input_ids.numel()

    def ends(self) -> dict[str, torch.Tensor]:
        """Where packed rows end, as kernels of layers with state take it: by transformers' names."""
        if not self.lengths:
            return {}
        device = self.input_ids.device
        numbers = np.repeat(np.arange(len(self.lengths), dtype=np.int32), self.lengths)
        ends = torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32, device=device)
        return {
            "seq_idx": torch.from_numpy(numbers)[None].to(device),
            "cu_seq_lens_q": ends,
            "cu_seq_lens_k": ends,
        }


def make(
    rows: Sequence[TrainRow], *, layout: AskedLayout, device: torch.device, counted: bool = False
) -> MicroBatch:
    """The micro-batch of `rows`, with `counts` if `counted`; prefixes are computed once
    (`rft.trainer.prefix`) where `layout` says so.
    """

    def tensor(values: np.ndarray, dtype: type) -> torch.Tensor:
        return torch.from_numpy(values.astype(dtype, copy=False)).to(device)

    inputs = [r.marked if layout != "padded" else r.inputs for r in rows]
    mask = np.concatenate([r.loss_mask for r in rows])
    trained = mask.nonzero()[0]  # in the tokens of all rows, one row after the other
    ends = np.cumsum([len(r.tokens) for r in rows])
    lengths = np.diff(trained.searchsorted(ends), prepend=0)
    begins = ends - [len(r.tokens) for r in rows]
    if layout != "padded":
        tree = prefix.build(
            inputs, max_mask=prefix.NOTHING if layout == "packed" else prefix.MAX_MASK
        )
        ids, positions = (
            torch.from_numpy(a).to(device)[None] for a in (tree.tokens & TOKEN, tree.positions)
        )
        places: Sequence[np.ndarray] = tree.paths
        attended = None
        how = attention.Layout(tree, device)
        packed = [len(b.path) for b in tree.branches] if layout == "packed" else []
    else:
        ids, positions, attended = _padded(inputs, device)
        places = [np.arange(len(x)) + i * ids.shape[1] for i, x in enumerate(inputs)]
        how = None
        packed = []
    paths = np.concatenate(places)
    predict = paths[
        trained + np.repeat(np.cumsum([0, *map(len, inputs[:-1])]) - begins - 1, lengths)
    ]

    def gathered(name: str) -> np.ndarray:
        """Column `name`, [T] of every row, at the trained tokens."""
        values: np.ndarray = np.concatenate([getattr(r, name) for r in rows])[mask]
        return values

    def spread(values: Sequence[Any], default: Any, dtype: type = np.float32) -> torch.Tensor:
        """Values of every row, [L] or one for all its tokens; None is `default`."""
        values = [default if v is None else v for v in values]
        if all(v is values[0] for v in values) and not isinstance(values[0], np.ndarray):
            return torch.tensor(values[0], dtype=_DTYPES[dtype], device=device).expand(len(trained))
        if any(isinstance(v, np.ndarray) for v in values):
            return tensor(
                np.concatenate(
                    [np.broadcast_to(v, n) for v, n in zip(values, lengths, strict=True)]
                ),
                dtype,
            )
        return tensor(np.repeat(np.asarray(values, dtype), lengths), dtype)

    temperatures = [
        t[r.loss_mask] if isinstance(t := r.temperatures, np.ndarray) else t for r in rows
    ]
    return MicroBatch(
        input_ids=ids,
        position_ids=positions,
        attention_mask=attended,
        tree=how,
        lengths=packed,
        predict=tensor(predict, np.int64),
        targets=tensor(gathered("tokens"), np.int64),
        temperatures=None
        if all(np.all(t == 1.0) for t in temperatures)
        else spread(temperatures, 1.0),
        rollout_logprobs=tensor(gathered("logprobs"), np.float32),
        advantages=spread([r.advantages for r in rows], 0.0),
        mask=spread([r.keep for r in rows], True, np.bool_),
        is_expert=spread([r.is_expert for r in rows], False, np.bool_),
        row=tensor(np.repeat(np.arange(len(rows)), lengths), np.int64),
        num_rows=len(rows),
        given={
            name: spread([getattr(r, name) for r in rows], 0.0)
            for name in GIVEN
            if getattr(rows[0], name) is not None
        },
        extra={
            name: tensor(np.concatenate([r.extra[name] for r in rows]), np.float32)
            for name in rows[0].extra
        },
        counts=tensor(np.bincount(paths, minlength=ids.numel()), np.float32) if counted else None,
        experts=_experts(rows, places, ids.numel(), device),
    )


def _experts(
    rows: Sequence[TrainRow], places: Sequence[np.ndarray], count: int, device: torch.device
) -> torch.Tensor | None:
    """The experts of all `count` positions; `places` of each row's.  None where no row has any."""
    shape = next((r.experts.shape[1:] for r in rows if r.experts is not None), None)
    if shape is None:
        return None
    found = np.full((count, *shape), -1, np.int32)
    for row, place in zip(rows, places, strict=True):
        if row.experts is not None:
            known = min(len(row.experts), len(place))
            found[place[:known]] = row.experts[:known]
    return torch.from_numpy(found).to(device)


def _padded(
    inputs: Sequence[np.ndarray], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids and positions int64 [S, W] and the attention mask bool [S, W] of rows with a line for
    each.
    """
    lengths = np.array([len(tokens) for tokens in inputs])
    # filled by NumPy: torch would wake its threads
    padded = torch.empty((len(inputs), int(lengths.max())), dtype=torch.int64)
    for line, tokens in zip(padded.numpy(), inputs, strict=True):
        # filled up with the row's own first id: one for padding may be embedded as 0, where norms
        # have no slope
        line[: len(tokens)], line[len(tokens) :] = tokens, tokens[0]
    positions = torch.arange(padded.shape[1], device=device).expand_as(padded)
    mask = torch.from_numpy(np.arange(padded.shape[1]) < lengths[:, None]).to(device)
    return padded.to(device), positions, mask

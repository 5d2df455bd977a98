"""Build the tensors that a model reads from the rows of a micro-batch, for training, scoring and
the reference model.

Depends on rows and layouts, not on models or losses.  Invariant: token n of the result belongs to
row `row[n]`; rows keep their order and tokens the order of their row, in every layout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from rft.trainer.model import attention
from rft.trainer.model.upload import upload
from rft.trainer.rows import prefix
from rft.trainer.rows.pack import TrainRow
from rft.types.experts import TOKEN
from rft.types.row_layout import AskedLayout

_DTYPES = {np.float32: torch.float32, np.bool_: torch.bool}
TOKEN_VALUES = ("old", "ref", "values", "returns", "weights", "run_tokens", "group_tokens")


@dataclass(frozen=True)
class ImageInputs:
    """Images of a micro-batch, each once, with N features in all their places."""

    arrays: Mapping[str, torch.Tensor]  # by the names of the model's forward
    types: torch.Tensor  # int64, of the shape of `input_ids`: 1 at the places of features
    places: torch.Tensor  # int64 [N], flat positions of the features, in order
    order: torch.Tensor  # int64 [N], the feature of each place, counted over all images


@dataclass(frozen=True)
class MicroBatch:
    """N trained tokens of S rows.

    The input is a prefix tree [1, T] with `tree`, or padded rows [S, W] with `attention_mask`.
    """

    input_ids: torch.Tensor  # int64 [1, T] or [S, W]
    position_ids: torch.Tensor  # same shape; [3, ...] for images of a model with 3-d positions
    attention_mask: torch.Tensor | None  # bool [S, W]
    tree: Any  # Layout, or the Spread of rft.trainer.model.ulysses; None: padded rows
    paths: Sequence[np.ndarray]  # flat input position of each token that a row reads, by row
    places: np.ndarray  # int64 [N], flat input position that predicts each trained token
    predict: torch.Tensor  # the same on the device
    targets: torch.Tensor  # int64 [N]
    # float32 [N]; None: all are 1, so logits need no division
    temperatures: torch.Tensor | None
    rollout_logprobs: torch.Tensor  # float32 [N]
    advantages: torch.Tensor  # float32 [N]
    mask: torch.Tensor  # bool [N], tokens in the loss
    is_expert: torch.Tensor  # bool [N]
    row: torch.Tensor  # int64 [N]
    num_rows: int
    token_values: Mapping[str, torch.Tensor]  # float32 [N]: the TOKEN_VALUES that the rows have
    extra: Mapping[str, torch.Tensor]  # float32 [N], see `LossInputs.extra`
    top_ids: torch.Tensor | None = None  # int64 [N, k], the teacher's most likely tokens
    top_logprobs: torch.Tensor | None = None  # float32 [N, k + 1], the teacher's
    # float32 [positions of the input], number of rows that share each; 0 for padding
    counts: torch.Tensor | None = None
    # int32 [positions, layers, experts], prescribed experts; -1: the router's choice
    experts: torch.Tensor | None = None
    images: ImageInputs | None = None

    @property
    def computed(self) -> int:
        """Return how many positions the model computes, including padding."""
        return self.input_ids.numel()


def make(
    rows: Sequence[TrainRow], *, layout: AskedLayout, device: torch.device, counted: bool = False
) -> MicroBatch:
    """Lay out `rows` as one micro-batch, with `counts` if `counted`."""
    mask = np.concatenate([r.loss_mask for r in rows])
    trained = mask.nonzero()[0]  # indexes into the concatenated tokens of all rows
    ends = np.cumsum([len(r.tokens) for r in rows])
    lengths = np.diff(trained.searchsorted(ends), prepend=0)
    begins = ends - [len(r.tokens) for r in rows]
    inputs = [r.inputs if layout == "padded" else r.marked for r in rows]
    positions = _positions(inputs, layout, device)
    count = positions.input_ids.numel()
    paths = np.concatenate(positions.places)
    predict = paths[
        trained + np.repeat(np.cumsum([0, *map(len, inputs[:-1])]) - begins - 1, lengths)
    ]
    tensor = partial(_tensor, device)
    spread = partial(_spread, device, lengths)
    temperatures = [
        t[r.loss_mask] if isinstance(t := r.temperatures, np.ndarray) else t for r in rows
    ]
    tempered = not all(np.all(t == 1.0) for t in temperatures)
    return MicroBatch(
        input_ids=positions.input_ids,
        position_ids=positions.position_ids,
        attention_mask=positions.attention_mask,
        tree=positions.tree,
        paths=positions.places,
        places=predict,
        predict=tensor(predict, np.int64),
        targets=tensor(np.concatenate([r.tokens for r in rows])[mask], np.int64),
        temperatures=spread(temperatures, 1.0) if tempered else None,
        rollout_logprobs=tensor(np.concatenate([r.logprobs for r in rows])[mask], np.float32),
        advantages=spread([r.advantages for r in rows], 0.0),
        mask=spread([r.keep for r in rows], True, np.bool_),
        is_expert=spread([r.is_expert for r in rows], False, np.bool_),
        row=tensor(np.repeat(np.arange(len(rows)), lengths), np.int64),
        num_rows=len(rows),
        token_values={
            name: spread([getattr(r, name) for r in rows], 0.0)
            for name in TOKEN_VALUES
            if getattr(rows[0], name) is not None
        },
        extra={
            name: tensor(np.concatenate([r.extra[name] for r in rows]), np.float32)
            for name in rows[0].extra
        },
        top_ids=_stacked(tensor, [r.top_ids for r in rows], np.int64),
        top_logprobs=_stacked(tensor, [r.top_logprobs for r in rows], np.float32),
        counts=tensor(np.bincount(paths, minlength=count), np.float32) if counted else None,
        experts=_experts(rows, positions.places, count, device),
    )


class _Positions(NamedTuple):
    """The input of a micro-batch, see `MicroBatch`; `places`: flat positions of each row's tokens."""

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    attention_mask: torch.Tensor | None
    tree: attention.Layout | None
    places: Sequence[np.ndarray]


def _positions(
    inputs: Sequence[np.ndarray], layout: AskedLayout, device: torch.device
) -> _Positions:
    """Lay out rows; common prefixes are computed once unless rows are packed or padded."""
    if layout == "padded":
        ids, position_ids, attended = _padded(inputs, device)
        places = [np.arange(len(x)) + i * ids.shape[1] for i, x in enumerate(inputs)]
        return _Positions(ids, position_ids, attended, None, places)
    most = prefix.NOTHING if layout == "packed" else prefix.MAX_MASK
    tree = prefix.build(inputs, max_mask=most)
    ids, position_ids = (upload(a, device)[None] for a in (tree.tokens & TOKEN, tree.positions))
    return _Positions(ids, position_ids, None, attention.Layout(tree, device), tree.paths)


def _tensor(device: torch.device, values: np.ndarray, dtype: type) -> torch.Tensor:
    return upload(values.astype(dtype, copy=False), device)


def _stacked(
    tensor: Callable[[np.ndarray, type], torch.Tensor],
    values: Sequence[np.ndarray | None],
    dtype: type,
) -> torch.Tensor | None:
    """Concatenate the rows' arrays [L, ...]; None where rows have none."""
    given = [v for v in values if v is not None]
    return tensor(np.concatenate(given), dtype) if given else None


def _spread(
    device: torch.device,
    lengths: np.ndarray,
    values: Sequence[Any],
    default: Any,
    dtype: type = np.float32,
) -> torch.Tensor:
    """Concatenate all rows' values, each [L] or a scalar for L tokens; None becomes `default`."""
    values = [default if v is None else v for v in values]
    if any(isinstance(v, np.ndarray) for v in values):
        arrays = [np.broadcast_to(v, n) for v, n in zip(values, lengths, strict=True)]
        return _tensor(device, np.concatenate(arrays), dtype)
    if all(v is values[0] for v in values):
        count = int(lengths.sum())
        return torch.full((), values[0], dtype=_DTYPES[dtype], device=device).expand(count)
    return _tensor(device, np.repeat(np.asarray(values, dtype), lengths), dtype)


def _experts(
    rows: Sequence[TrainRow], places: Sequence[np.ndarray], count: int, device: torch.device
) -> torch.Tensor | None:
    """Return the prescribed experts of all `count` positions; None if no row has any.

    `places`: positions of each row's tokens.
    """
    shape = next((r.experts.shape[1:] for r in rows if r.experts is not None), None)
    if shape is None:
        return None
    experts = np.full((count, *shape), -1, np.int32)
    for row, place in zip(rows, places, strict=True):
        if row.experts is not None:
            length = min(len(row.experts), len(place))
            experts[place[:length]] = row.experts[:length]
    return upload(experts, device)


def _padded(
    inputs: Sequence[np.ndarray], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ids and positions, int64 [S, W], and the attention mask, bool [S, W], of padded rows."""
    lengths = np.array([len(tokens) for tokens in inputs])
    # NumPy fills the array: torch would wake its threads
    padded = np.empty((len(inputs), int(lengths.max())), np.int64)
    for line, tokens in zip(padded, inputs, strict=True):
        # pad with the row's first id: a padding id may be embedded as 0, where norms have no
        # gradient
        line[: len(tokens)], line[len(tokens) :] = tokens, tokens[0]
    positions = torch.arange(padded.shape[1], device=device).expand(padded.shape)
    mask = upload(np.arange(padded.shape[1]) < lengths[:, None], device)
    return upload(padded, device), positions, mask

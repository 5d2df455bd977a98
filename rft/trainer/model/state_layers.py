"""Layers with state over packed rows: linear attention, Mamba and short convolutions compute each
row by itself.

Such a layer reads every position before its own, so over rows one after another it would carry
state from one row into the next.  Here the mixer of each layer gets the rectangles of padded rows
that attention uses (`rft.trainer.model.attention`); norms, MLPs, attention and the output layer
still compute packed positions.  A rectangle is an ordinary batch of rows, so kernels and plain
torch code compute it alike.  Depends on modules and rectangles, not on families.  Invariant: padding is
behind a row's end, and a causal layer never reads it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from rft.errors import ConfigError
from rft.trainer.model import attention
from rft.types.row_layout import KEY


class StateLayers:
    """The mixers of `lm` that carry state; `begin` says how the following forwards are laid out."""

    def __init__(self, lm: nn.Module) -> None:
        self._pieces: attention.Pieces | None = None
        self.mixers: list[Any] = [m for m in lm.modules() if _carries_state(m)]
        for mixer in self.mixers:
            name = next(iter(inspect.signature(mixer.forward).parameters))
            mixer.forward = partial(self._forward, mixer.forward, name)

    def begin(self, tree: Any) -> None:
        """Set the tree of the following forwards; None: plain rows.

        It stays set after a forward, because activation checkpointing runs the forward again.
        Raises ConfigError if ranks share the positions of a row.
        """
        if not self.mixers:
            return
        if tree is not None and not isinstance(tree, attention.Layout):
            raise ConfigError(
                "layers that carry state need whole rows, and ranks share their positions.  Set "
                "trainer.ulysses_sequence_parallel_size to 1",
                key=KEY,
            )
        self._pieces = None if tree is None else tree.pieces(None, None)

    def _forward(self, forward: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Any:
        """Compute `forward` for packed positions [1, T, H], one rectangle after another.

        Other tensors of T positions are laid out alike.
        """
        pieces = self._pieces
        if pieces is None:
            return forward(*args, **kwargs)
        if args:
            kwargs = {name: args[0], **kwargs}
        parts = {key: _rectangles(value, pieces) for key, value in kwargs.items()}
        outs = [
            forward(parts[name][i], *args[1:], **{k: v[i] for k, v in parts.items() if k != name})
            for i in range(len(pieces.rectangles))
        ]
        several = isinstance(outs[0], tuple)  # then the others are weights or caches, unused here
        flat = [(out[0] if several else out).flatten(0, 1) for out in outs]
        joined = attention.collect(torch.cat(flat), pieces)[None]
        return (joined, *[None] * (len(outs[0]) - 1)) if several else joined


def _rectangles(value: Any, pieces: attention.Pieces) -> list[Any]:
    """Return the part of `value` [1, T, ...] in each rectangle, [B, R, ...]; other values as they
    are.
    """
    if not (torch.is_tensor(value) and value.shape[:2] == (1, len(pieces.back))):
        return [value] * len(pieces.rectangles)
    sizes = [(r.keys.shape[0], r.height) for r in pieces.rectangles]
    parts = attention.spread(value[0], pieces).split([b * r for b, r in sizes])
    return [p.view(*size, *p.shape[1:]) for p, size in zip(parts, sizes, strict=True)]


def _carries_state(module: nn.Module) -> bool:
    """Return whether `module` mixes positions by a convolution or a decaying state."""
    return (
        any(isinstance(child, nn.Conv1d) for child in module.children())
        or "A_log" in module._parameters
        or "slope_rate" in module._buffers
    )

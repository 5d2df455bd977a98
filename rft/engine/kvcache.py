"""A key/value cache for rows that start and end at different times, for the `transformers` engine.

Independent of requests or sampling.  Row r holds its tokens at [0, length_r), without left
padding; rows 0..n-1 are in use, and the last row replaces a row that ends.  Invariant: a row's
attention does not depend on which other rows exist.

Shapes: B rows, H query heads, K key/value heads (H a multiple of K), L cached tokens, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class RowCache:
    """Passed to a model as `past_key_values`.  `begin_prefill` or `begin_decode` sets how the next
    forward stores its keys.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.keys: list[torch.Tensor] = []  # per layer [rows, K, capacity, D]
        self.values: list[torch.Tensor] = []
        self.rows = 0  # in use
        # per layer (keys, values) of a prefill
        self._fresh: list[tuple[torch.Tensor, torch.Tensor]] | None = None
        # (row numbers, positions) of a decode
        self._at: tuple[torch.Tensor, torch.Tensor] | None = None
        self._length = 0
        self._alone = False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0  # positions are passed explicitly

    @property
    def waiting(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of each layer that were prefilled and wait for `keep`."""
        return self._fresh or []

    def begin_prefill(self) -> None:
        self._fresh = []
        self._at = None

    def begin_decode(self, positions: torch.Tensor, length: int, only: int | None = None) -> None:
        """Start a decode: `positions` int64 [rows] of the new tokens; `length`: longest row
        afterwards.

        `only`: compute this row alone, with `positions` [1]; its keys are copied, so that even
        their memory layout does not depend on other rows.
        """
        self._fresh = None
        self._length = length
        self._alone = only is not None
        rows = torch.arange(self.rows, device=self.device)
        self._at = (rows if only is None else rows[only : only + 1], positions)

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store [B, K, new tokens, D] and return the keys and values to attend to.  Called by the
        model's attention layers.
        """
        if self._fresh is not None:
            assert layer_idx == len(self._fresh)
            self._fresh.append((key, value))
            return key, value
        assert self._at is not None
        rows, positions = self._at
        keys = self.keys[layer_idx]
        values = self.values[layer_idx]
        keys[rows, :, positions] = key[:, :, 0]
        values[rows, :, positions] = value[:, :, 0]
        if self._alone:
            return keys[rows, :, : self._length], values[rows, :, : self._length]
        return keys[: self.rows, :, : self._length], values[: self.rows, :, : self._length]

    def keep(
        self,
        source: Sequence[int],
        lengths: Sequence[int],
        into: Sequence[int],
        *,
        rows: int,
        capacity: int,
    ) -> None:
        """Store prefilled sequences: row `into[i]` gets the first `lengths[i]` tokens of sequence
        `source[i]`.

        Afterwards `rows` are in use, each with room for `capacity` tokens.
        """
        fresh = self._fresh
        self._fresh = None
        assert fresh is not None
        self._reserve(fresh, rows, capacity)
        self.rows = rows
        for layer, (key, value) in enumerate(fresh):
            for s, n, r in zip(source, lengths, into, strict=True):
                self.keys[layer][r, :, :n] = key[s, :, :n]
                self.values[layer][r, :, :n] = value[s, :, :n]

    def drop(self, row: int, last_length: int) -> None:
        """End row `row`; the last row, `last_length` tokens long, takes its number."""
        self.rows -= 1
        if row != self.rows:
            for t in (*self.keys, *self.values):
                t[row, :, :last_length] = t[self.rows, :, :last_length]

    def _reserve(
        self, like: list[tuple[torch.Tensor, torch.Tensor]], rows: int, capacity: int
    ) -> None:
        if self.keys and self.keys[0].shape[0] >= rows and self.keys[0].shape[2] >= capacity:
            return
        old_rows, old_capacity = (
            (self.keys[0].shape[0], self.keys[0].shape[2]) if self.keys else (0, 0)
        )
        rows = max(rows, old_rows)
        capacity = max(capacity, old_capacity)
        for which, target in enumerate((self.keys, self.values)):
            for layer, pair in enumerate(like):
                kv = pair[which]
                # zeros, not empty: a masked position has weight 0, and 0 x nan is nan
                grown = kv.new_zeros(rows, kv.shape[1], capacity, kv.shape[3])
                if layer < len(target):
                    grown[: self.rows, :, :old_capacity] = target[layer][: self.rows]
                    target[layer] = grown
                else:
                    target.append(grown)

"""A key/value cache whose rows come and go, and the attention that reads it.  For the
`transformers` engine.

Knows nothing of requests or sampling.  Row r holds its tokens at [0, length_r), without padding
before them; rows 0..n-1 are in use, and a row that ends is replaced by the last one.  Invariant:
what a row attends to does not depend on which other rows there are.

Shapes: B rows, H query heads, K key/value heads (H a multiple of K), L cached tokens, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

ATTENTION = "rft_rows"  # the name under which `attention` is registered with transformers


class RowCache:
    """Passed to a model as `past_key_values`.  `begin_prefill` / `begin_decode` say what the next
    forward does with its keys.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.keys: list[torch.Tensor] = []  # per layer [rows, K, capacity, D]
        self.values: list[torch.Tensor] = []
        self.rows = 0  # in use
        # per layer, of a prefill
        self._fresh: list[tuple[torch.Tensor, torch.Tensor]] | None = None
        # (row numbers, positions) of a decode
        self._at: tuple[torch.Tensor, torch.Tensor] | None = None
        self._length = 0
        self._alone = False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0  # positions are always given

    @property
    def waiting(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of each layer that were prefilled and wait for `keep`."""
        return self._fresh or []

    def begin_prefill(self) -> None:
        self._fresh = []
        self._at = None

    def begin_decode(self, positions: torch.Tensor, length: int, only: int | None = None) -> None:
        """`positions` int64 [rows]: where each row's new token goes; `length`: the longest row
        afterwards.

        `only`: the forward is of this row alone, `positions` [1]; its keys are copied, so that not
        even their place in memory tells of other rows.
        """
        self._fresh = None
        self._length = length
        self._alone = only is not None
        rows = torch.arange(self.rows, device=self.device)
        self._at = (rows if only is None else rows[only : only + 1], positions)

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Called by the model's attention layers with [B, K, new tokens, D]; gives what they attend
        to.
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
        """Store the prefilled sequences: row `into[i]` gets the first `lengths[i]` tokens of
        sequence `source[i]`.

        `rows` are in use afterwards; there is room for `capacity` tokens in each.
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
        """Row `row` ended: the last row, `last_length` tokens long, takes its place."""
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
                # zeros, not empty: a masked position still multiplies with weight 0, and 0 x nan is
                # nan
                grown = kv.new_zeros(rows, kv.shape[1], capacity, kv.shape[3])
                if layer < len(target):
                    grown[: self.rows, :, :old_capacity] = target[layer][: self.rows]
                    target[layer] = grown
                else:
                    target.append(grown)


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Scaled dot-product attention, [B, H, Q, D] → [B, Q, H, D of the values].

    For one query per row the H / K query heads that share a key head are treated as that many
    queries, so keys are not repeated.
    """
    batch, heads, queries, size = query.shape
    groups = heads // key.shape[1]
    if queries == 1:
        out = F.scaled_dot_product_attention(
            query.view(batch, -1, groups, size), key, value, attn_mask=attention_mask, scale=scaling
        )
        return out.reshape(batch, 1, heads, value.shape[-1]), None
    if groups > 1:
        key = key.repeat_interleave(groups, dim=1)
        value = value.repeat_interleave(groups, dim=1)
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling)
    return out.transpose(1, 2), None


def register() -> None:
    """Make `attention` known to transformers; calling it again changes nothing."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, attention)

"""Routed experts of each token of a sequence, stored compactly.  Torch-free.

An array of experts is unsigned [P, L, K]: the K chosen experts in each of L layers, for the first P
positions of a sequence.  Later positions are unknown: the last token of an answer is not computed.
Depends on the configuration keys of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rft.types import row_layout

MAX_BYTES = 256 << 20  # of one sequence
TOKEN = (1 << 32) - 1  # the bits of a marked token that are its id
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "top_k_experts", "moe_k")


@dataclass(frozen=True)
class Sizes:
    """Number of experts of a layer, and of those chosen for a token."""

    experts: int
    chosen: int

    @property
    def dtype(self) -> np.dtype:
        """The smallest type that holds every expert's number."""
        return np.dtype(np.uint8 if self.experts <= 256 else np.uint16)


def sizes_of(config: Mapping[str, Any]) -> Sizes | None:
    """Return the sizes of the model of `config` (config.json); None without experts."""
    text = row_layout.text_config(config)
    count = next((int(text[k]) for k in _COUNTS if text.get(k)), 0)
    chosen = next((int(text[k]) for k in _CHOSEN if text.get(k)), 0)
    if count > 1 and 0 < chosen < count:
        return Sizes(count, chosen)
    return None


def check(experts: np.ndarray, tokens: int) -> None:
    """Raise ValueError for wrong experts of a sequence of `tokens` tokens."""
    if experts.dtype not in (np.dtype(np.uint8), np.dtype(np.uint16)) or experts.ndim != 3:
        raise ValueError(
            f"routed_experts: {experts.dtype} with {experts.ndim} dimensions, must be uint8 or "
            f"uint16 [positions, layers, experts]"
        )
    if len(experts) > tokens:
        raise ValueError(
            f"routed_experts: of {len(experts)} positions, but there are {tokens} tokens"
        )
    if experts.nbytes > MAX_BYTES:
        raise ValueError(
            f"routed_experts: {experts.nbytes} bytes, at most {MAX_BYTES} are kept.  Shorten the "
            f"sequence, or write router_replay: off"
        )


def joined(calls: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """Concatenate the routing of the calls of one sequence, each from its first new position; None
    if a call has none.
    """
    result: np.ndarray | None = None
    for experts in calls:
        if experts is None:
            return None
        result = experts if result is None else np.concatenate([result, experts[len(result) :]])
    return result


def marked(tokens: np.ndarray, experts: np.ndarray | None) -> np.ndarray:
    """Add a hash of its experts to each token id, above the id's 32 bits (`TOKEN`): int64 [T]."""
    ids = tokens.astype(np.int64)
    if experts is not None and experts.size:
        flat = experts[: len(tokens)].reshape(min(len(experts), len(tokens)), -1)
        factors = np.random.default_rng(0).integers(
            1 << 63, size=flat.shape[1], dtype=np.uint64
        ) | np.uint64(1)
        # of each expert's number + 1
        hashes = (flat.astype(np.uint64) @ factors + factors.sum()) >> np.uint64(33)
        ids[: len(flat)] |= hashes.astype(np.int64) << 32
    return ids

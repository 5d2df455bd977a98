"""Which experts each token of a sequence went through, kept as small as can be.  Torch-free.

An array of experts is unsigned [P, L, K]: for the first P positions of a sequence, in each of L
layers with experts, the K that were chosen.  Positions behind P are unknown: nothing was computed
for the last token of an answer. Knows the configuration keys of transformers.
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
    """Of a model: how many experts a layer has, and how many a token goes through."""

    experts: int
    chosen: int

    @property
    def dtype(self) -> np.dtype:
        """The smallest type that holds every expert's number."""
        return np.dtype(np.uint8 if self.experts <= 256 else np.uint16)


def sizes_of(config: Mapping[str, Any]) -> Sizes | None:
    """Of the model of `config` (config.json); None: it has no experts to choose among."""
    text = row_layout.text_config(config)
    count = next((int(text[k]) for k in _COUNTS if text.get(k)), 0)
    chosen = next((int(text[k]) for k in _CHOSEN if text.get(k)), 0)
    return Sizes(count, chosen) if count > 1 and 0 < chosen < count else None


def check(experts: np.ndarray, tokens: int) -> None:
    """Raises ValueError that says what is wrong with the experts of a sequence of so many tokens."""
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
    """Of a sequence from the calls that made it, each of which computed a longer beginning; None
    where one of them does not tell.

    A position is taken from the call that computed its token first.
    """
    found: np.ndarray | None = None
    for experts in calls:
        if experts is None:
            return None
        found = experts if found is None else np.concatenate([found, experts[len(found) :]])
    return found


def marked(tokens: np.ndarray, experts: np.ndarray | None) -> np.ndarray:
    """Token ids, int64 [T], that differ where experts do: in the bits above the 32 of the id, see
    `TOKEN`.
    """
    found = tokens.astype(np.int64)
    if experts is not None and experts.size:
        flat = experts[: len(tokens)].reshape(min(len(experts), len(tokens)), -1)
        factors = np.random.default_rng(0).integers(
            1 << 63, size=flat.shape[1], dtype=np.uint64
        ) | np.uint64(1)
        # of each expert's number + 1
        hashes = (flat.astype(np.uint64) @ factors + factors.sum()) >> np.uint64(33)
        found[: len(flat)] |= hashes.astype(np.int64) << 32
    return found

"""The sizes of a causal language model that decide how much memory it takes, from its config.json.  Torch-free.

Knows the names that model families give the same size; not what the sizes are used for.  Invariant: where the tensors are known their
shapes are counted, and the formula for a Llama-like model is used only without them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_PLAIN_MLP = {"gpt2", "gpt_neo", "gpt_neox", "gptj", "opt", "bloom", "falcon", "phi", "starcoder2"}  # two matrices, no gate
LEAN = {"exaone4", "granite", "llama", "ministral", "mistral", "qwen2", "qwen3", "smollm3"}  # known to rft.trainer.lean
_NAMES = {
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "layers": ("num_hidden_layers", "n_layer", "n_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "vocab": ("vocab_size",),
}

Tensors = Mapping[str, tuple[str, tuple[int, ...]]]


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes in elements.  `parameters` counts a tied output layer once."""

    parameters: int
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int  # width that one token computes: of the chosen experts together
    gated: bool = True
    lean: bool = False  # norms and MLPs are Llama's, of which the trainer keeps less
    tied: bool = False

    @property
    def embedding(self) -> int:
        return self.vocab * self.hidden

    @property
    def block(self) -> int:
        """Parameters of one layer."""
        return max(0, self.parameters - self.embedding * (1 if self.tied else 2)) // self.layers

    @property
    def queries(self) -> int:
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def cached(self) -> int:
        """Elements that one token keeps in a key/value cache."""
        return 2 * self.layers * self.keys


def shape(config: Mapping[str, Any], tensors: Tensors | None = None) -> ModelShape:
    """Raises ValueError naming the sizes that `config` does not give."""
    text = config.get("text_config")
    c = text if isinstance(text, Mapping) else config
    found = {name: next((c[k] for k in keys if isinstance(c.get(k), int) and c[k] > 0), None) for name, keys in _NAMES.items()}
    if missing := [_NAMES[name][0] for name, value in found.items() if value is None]:
        raise ValueError(f"config.json does not give {', '.join(missing)}")
    hidden, layers, heads, vocab = (int(found[n] or 0) for n in ("hidden", "layers", "heads", "vocab"))
    kv_heads, head_dim = int(c.get("num_key_value_heads") or heads), int(c.get("head_dim") or hidden // heads)
    gated = c.get("model_type") not in _PLAIN_MLP
    width = int(c.get("intermediate_size") or c.get("n_inner") or 4 * hidden)
    experts = next((int(c[k]) for k in ("num_local_experts", "num_experts", "n_routed_experts") if c.get(k)), 0)
    expert = int(c.get("moe_intermediate_size") or width)
    tied = bool(c.get("tie_word_embeddings", config.get("tie_word_embeddings", True)))
    held = [t for n, t in tensors.items() if not (tied and n.endswith("lm_head.weight"))] if tensors else []
    counted = sum(math.prod(dims) for _, dims in held)
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    mlp = (3 if gated else 2) * hidden * (expert * experts if experts else width)
    formula = layers * (attention + mlp + 2 * hidden) + hidden + vocab * hidden * (1 if tied else 2)
    return ModelShape(
        parameters=counted or formula,
        vocab=vocab,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        mlp=expert * int(c.get("num_experts_per_tok") or 1) if experts else width,
        gated=gated,
        lean=c.get("model_type") in LEAN,
        tied=tied,
    )

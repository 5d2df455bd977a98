"""Choose a row layout that computes a model exactly, from its configuration.  Torch-free.

A micro-batch holds its rows as a prefix tree (shared), one after another (packed), or one per line
(padded).  In the first two, attention separates rows; of the other layers that read earlier
positions, those with state compute each packed row by itself (`rft.trainer.model.state_layers`).
Depends on the configuration keys of transformers.  Invariant: an unproven layer type is never
packed or shared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rft.errors import ConfigError

RowLayout = Literal["shared", "packed", "padded"]
AskedLayout = Literal["auto", "shared", "packed", "padded"]
KEY = "trainer.row_layout"

_STATE = frozenset(
    {"linear_attention", "mamba", "mamba2", "recurrent", "conv", "hybrid", "hybrid_sliding"}
)
_CARRIED = "carries state, so it computes packed rows one by one"
_SPARSE = "chooses positions by an index over the whole input"
_MASK = "sees a window of positions by a mask of its own"
NOT_SHARED: dict[str, str] = {  # layer type: reason against shared rows
    "window_attention": _MASK,
    "local": _MASK,
    "biased attention": "takes its bias from the place in the input",
    **dict.fromkeys(_STATE, _CARRIED),
    "indexed_attention": _SPARSE,
    "deepseek_sparse_attention": _SPARSE,
    "qwen_sparse_attention": _SPARSE,
    "compressed_sparse_attention": _SPARSE,
    "heavily_compressed_attention": _SPARSE,
    "minimax_m3_sparse": _SPARSE,
}
EXACT = frozenset(
    {
        "full_attention",
        "attention",
        "global",
        "sliding_attention",
        "chunked_attention",
        "soft-capped attention",
        "attention sinks",
        "latent attention",
        "mlp",
        "moe",
        "dense",
        "sparse",
        "experts",
    }
)

_LISTS = ("layer_types", "layers_block_type", "block_types", "attention_layers")
_PATTERN = {"M": "mamba", "*": "full_attention", "-": "mlp", "E": "moe"}
_STATE_KEYS = (
    "mamba_",
    "ssm_",
    "linear_num_",
    "linear_key_",
    "conv_L_cache",
    "lru_width",
    "state_size",
    "time_step_rank",
    "rwkv_",
)
_CAPS = ("final_logit_softcapping", "logits_soft_cap")
_FACTORS = ("logit_scale", "lm_head_multiplier")
_DIVISORS = ("logits_scaling", "logits_mup_width_multiplier")


@dataclass(frozen=True)
class Head:
    """Change of the output layer's logits z: cap * tanh(scale * z / cap), or scale * z."""

    scale: float = 1.0
    cap: float | None = None


@dataclass(frozen=True)
class Choice:
    """A row layout and the reason for it."""

    layout: RowLayout
    reason: str


def choose(config: Mapping[str, Any], requested: AskedLayout = "auto") -> Choice:
    """Choose the layout for the model of `config` (config.json).

    "auto": the first of shared, packed, padded that every layer allows; layers with state allow
    packed.  Raises ConfigError for unknown layer types and for a requested layout that is not exact.
    """
    if requested == "padded":
        return Choice("padded", "asked for; padded rows are exact for every layer type")
    types = layer_types(config)
    if unknown := [t for t in types if t not in NOT_SHARED and t not in EXACT]:
        raise ConfigError(
            f"the model has layers of type {unknown[0]}, which are not proven in "
            f"{'shared or packed' if requested == 'auto' else requested} "
            "rows.  Write padded, which is compared with plain rows when the model is loaded",
            key=KEY,
            given=requested,
        )
    bad = [t for t in types if t in NOT_SHARED]
    packable = _STATE.issuperset(bad)
    allowed = "auto, packed or padded" if packable else "auto or padded"
    if bad and requested != "auto" and not (packable and requested == "packed"):
        raise ConfigError(
            f"{bad[0]} {NOT_SHARED[bad[0]]}.  Write {allowed}", key=KEY, given=requested
        )
    if not bad:
        return Choice(
            "shared" if requested == "auto" else requested, f"every layer is {' or '.join(types)}"
        )
    reason = "; ".join(f"{t} {NOT_SHARED[t]}" for t in bad)
    return Choice("packed" if packable else "padded", reason)


def layer_types(config: Mapping[str, Any]) -> list[str]:
    """Return the layer types of a model, each once, in transformers' words, and special kinds of
    attention.
    """
    c = text_config(config)
    return list(dict.fromkeys([*_listed(c), *_attention(c)]))


# model type with an image tower: vLLM's class of its language model
TEXT_CLASSES = {
    "qwen3_5": "Qwen3_5ForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForCausalLM",
}


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of config.json for the language model."""
    text = config.get("text_config")
    if isinstance(text, Mapping):
        return text
    return config


def head(config: Mapping[str, Any]) -> Head:
    """Return the logit changes of the model of `config`, which lists its defaults too."""
    text = text_config(config)
    entries = {
        k: v
        for c in (config, text)
        for k in (*_CAPS, *_FACTORS, *_DIVISORS)
        if (v := c.get(k)) is not None
    }
    factors = [entries[k] for k in _FACTORS if k in entries] + [
        1 / entries[k] for k in _DIVISORS if k in entries
    ]
    return Head(math.prod(factors), next((entries[k] for k in _CAPS if entries.get(k)), None))


def changing_rope(config: Mapping[str, Any]) -> tuple[str, int] | None:
    """Return (kind, positions) of rotary embeddings that change everywhere once a row is longer than
    `positions`.
    """
    c = text_config(config)
    ropes = c.get("rope_parameters") or c.get("rope_scaling") or {}
    for rope in [ropes, *(r for r in ropes.values() if isinstance(r, Mapping))]:
        kind = rope.get("rope_type") or rope.get("type")
        if kind in ("dynamic", "longrope"):
            original = rope.get("original_max_position_embeddings") or c.get(
                "original_max_position_embeddings"
            )
            longest = (
                original if kind == "longrope" and original else c.get("max_position_embeddings")
            )
            return str(kind), int(longest or 0)
    return None


def _listed(c: Mapping[str, Any]) -> Iterator[str]:
    """Yield listed layer types, or without a list those that other entries imply."""
    lists = [
        c[k]
        for k in _LISTS
        if isinstance(c.get(k), Sequence) and c[k] and not isinstance(c[k], str)
    ]
    if lists:
        yield from (str(t) for t in lists[0])
    elif isinstance(pattern := c.get("hybrid_override_pattern"), str):
        yield from (_PATTERN.get(mark, mark) for mark in pattern)
    else:
        if any(k.startswith(_STATE_KEYS) and v is not None for k, v in c.items()):
            yield "recurrent"
        if c.get("sliding_window") and c.get("use_sliding_window") is not False:
            yield "sliding_attention"
        if c.get("attention_chunk_size"):
            yield "chunked_attention"
        if c.get("index_topk"):
            yield "indexed_attention"
        yield "latent attention" if c.get("kv_lora_rank") else "full_attention"


def _attention(c: Mapping[str, Any]) -> Iterator[str]:
    """Yield kinds of attention other than softmax of scores."""
    if c.get("attn_logit_softcapping"):
        yield "soft-capped attention"
    if any("sink" in k and v and not k.endswith("token_id") for k, v in c.items()):
        yield "attention sinks"
    if (
        c.get("alibi")
        or c.get("use_alibi")
        or str(c.get("position_embedding_type", "")).startswith("relative")
    ):
        yield "biased attention"

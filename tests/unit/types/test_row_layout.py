"""Which layouts of rows a model's configuration allows."""

from __future__ import annotations

from typing import Any

import pytest

from rft.errors import ConfigError
from rft.types.row_layout import Head, changing_rope, choose, head, layer_types

FULL: dict[str, Any] = {"num_hidden_layers": 2}


@pytest.mark.parametrize(
    ("config", "types"),
    [
        (FULL, ["full_attention"]),
        (
            {"layer_types": ["full_attention", "linear_attention"]},
            ["full_attention", "linear_attention"],
        ),
        ({"text_config": {"layer_types": ["conv"]}, "layer_types": ["full_attention"]}, ["conv"]),
        ({"sliding_window": 4096}, ["sliding_attention", "full_attention"]),
        ({"sliding_window": 4096, "use_sliding_window": False}, ["full_attention"]),
        ({"sliding_window": 4096, "layer_types": ["full_attention"]}, ["full_attention"]),
        ({"attention_chunk_size": 8192}, ["chunked_attention", "full_attention"]),
        ({"attn_logit_softcapping": 50.0}, ["full_attention", "soft-capped attention"]),
        ({"use_attention_sinks": True}, ["full_attention", "attention sinks"]),
        ({"alibi": True}, ["full_attention", "biased attention"]),
        ({"kv_lora_rank": 512}, ["latent attention"]),
        ({"kv_lora_rank": 512, "index_topk": 2048}, ["indexed_attention", "latent attention"]),
        ({"mamba_d_state": 16}, ["recurrent", "full_attention"]),
        ({"hybrid_override_pattern": "M*-"}, ["mamba", "full_attention", "mlp"]),
        ({"layers_block_type": ["mamba", "hybrid"]}, ["mamba", "hybrid"]),
    ],
)
def test_layer_types_are_read_from_the_configuration(
    config: dict[str, Any], types: list[str]
) -> None:
    assert layer_types(config) == types
    state = set(types) & {"linear_attention", "conv", "mamba", "hybrid", "recurrent"}
    other = set(types) & {"indexed_attention", "biased attention"}
    layout = "padded" if other else "packed" if state else "shared"
    assert choose(config).layout == layout
    for asked in ("shared", "packed")[: ("shared", "packed", "padded").index(layout)]:
        with pytest.raises(ConfigError, match=r"trainer.row_layout: .*Write auto.* or padded"):
            choose(config, asked)  # type: ignore[arg-type]


def test_an_unknown_layer_type_is_refused_with_the_way_out() -> None:
    config = {"layer_types": ["full_attention", "quantum_attention"]}
    with pytest.raises(
        ConfigError, match=r"trainer.row_layout: .*layers of type quantum_attention.*Write padded"
    ):
        choose(config)
    assert choose(config, "padded").layout == "padded"


def test_heads_that_change_logits_are_found_in_text_config_too() -> None:
    assert head({"text_config": {"final_logit_softcapping": 30.0}}) == Head(cap=30.0)
    assert head({"logit_scale": 0.5, "logits_scaling": 8.0}) == Head(scale=0.0625)
    assert head({"logits_soft_cap": 20.0, "lm_head_multiplier": 2}) == Head(2.0, 20.0)
    assert head({"final_logit_softcapping": None, "logit_scale": None}) == Head() == head(FULL)


@pytest.mark.parametrize("kind", ["linear_attention", "mamba", "conv"])
def test_layers_with_state_are_packed_and_not_shared(kind: str) -> None:
    config = {"layer_types": ["full_attention", kind]}
    assert choose(config).layout == "packed" == choose(config, "packed").layout
    with pytest.raises(ConfigError, match=f"{kind} carries state.*Write auto, packed or padded"):
        choose(config, "shared")


def test_rope_that_changes_with_the_longest_row() -> None:
    phi = {
        "rope_scaling": {"type": "longrope"},
        "original_max_position_embeddings": 4096,
        "max_position_embeddings": 131072,
    }
    assert changing_rope(phi) == ("longrope", 4096)
    assert changing_rope(
        {"rope_parameters": {"rope_type": "dynamic"}, "max_position_embeddings": 2048}
    ) == ("dynamic", 2048)
    assert changing_rope({"rope_parameters": {"rope_type": "yarn"}}) is None

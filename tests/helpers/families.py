"""Tiny random models of many families, to prove that the trainer computes each of them as
transformers does.

Each has two to four layers of every type that its family mixes; nothing is downloaded.  Depends on
transformers' configurations only. Invariant: the same family and seed write the same weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rft.testing import tiny

VOCABULARY = 128
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_EXPERTS: dict[str, Any] = {
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_local_experts": 4,
}
_ROUTED: dict[str, Any] = {
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
_MLA: dict[str, Any] = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
    **_ROUTED,
    **_EXPERTS,
}
_DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
}
_TIED: dict[str, Any] = {"tie_word_embeddings": True}  # families that have no other head
_WINDOW: dict[str, Any] = {
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"],
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "phi3": {},
    "olmo2": {},
    "granite": {
        "logits_scaling": 8.0,
        "attention_multiplier": 0.3,
        "residual_multiplier": 0.5,
        "embedding_multiplier": 3.0,
    },
    "glm4": {},
    "smollm3": {},
    "stablelm": {},
    "nemotron": {},
    "gemma": _TIED,
    "gpt_neox": {},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "starcoder2": {"residual_dropout": 0.1, "embedding_dropout": 0.1, "attention_dropout": 0.1},
    "seed_oss": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "apertus": {},
    "ernie4_5": {},
    "hunyuan_v1_dense": {},
    "qwen2_moe": {**_EXPERTS, "decoder_sparse_step": 1, "shared_expert_intermediate_size": 32},
    "qwen3_moe": {**_EXPERTS, "decoder_sparse_step": 1},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "glm4_moe": {**_ROUTED, **_EXPERTS},
    "longcat_flash": {**_MLA, "moe_topk": 2, "zero_expert_num": 2, "num_layers": 2},
    "deepseek_v2": _MLA,
    # as its checkpoints say; by it vLLM has the routers' biases
    "deepseek_v3": {**_MLA, "topk_method": "noaux_tc"},
    "mistral": {"sliding_window": 6},
    "ministral": _WINDOW,
    "olmo3": _WINDOW,
    "exaone4": _WINDOW,
    "cohere": _TIED,
    "cohere2": {**_WINDOW, **_TIED},
    "gemma2": {**_WINDOW, **_TIED},
    "gemma3_text": _WINDOW,
    "gemma3n_text": {
        **_WINDOW,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 512,
        "num_kv_shared_layers": 0,
    },
    "gpt_oss": {**_WINDOW, **_EXPERTS},
    "deepseek_v4": {
        **_MLA,
        "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"],
    },
    "qwen3_next": {**_EXPERTS, **_DELTA, "shared_expert_intermediate_size": 16},
    "qwen3_5_text": _DELTA,
    "granitemoehybrid": {
        **_MAMBA,
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 0,
        "shared_intermediate_size": 48,
        "position_embedding_type": "rope",
    },
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 4,
        "mamba_d_state": 8,
        "use_mamba_kernels": False,
    },
    "nemotron_h": {
        "hybrid_override_pattern": "M*-",
        "num_hidden_layers": 3,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 1,
    },
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 64, "lm_head_multiplier": 0.5},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "olmo_hybrid": _DELTA,
    "minimax": {
        "layer_types": ["linear_attention", "full_attention"],
        "num_local_experts": 4,
        "mlp_beta_factor": 4,
        "block_size": 16,
    },
    "zamba2": {**_MAMBA, "num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "mamba"]},
    "llama4_text": {
        "attention_chunk_size": 6,
        "num_local_experts": 2,
        "intermediate_size_mlp": 48,
        "layer_types": ["chunked_attention", "full_attention"],
    },
}

# one of each kind of layer; the others are end-to-end tests
_USUAL = ("llama", "qwen3", "gemma2", "gpt2", "qwen3_moe", "deepseek_v3", "qwen3_next", "lfm2")


def each(names: Iterable[str]) -> list[Any]:
    """Return families as parameters of a test; `make test` plays the usual ones alone."""
    import pytest

    return [n if n in _USUAL else pytest.param(n, marks=pytest.mark.e2e) for n in names]


# what a few of them call the sizes of `rft.testing.tiny`: mixtures of experts, and a hybrid
TINY: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "head_dim": 32,
    },
    "qwen3_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "decoder_sparse_step": 1,
        "head_dim": 32,
    },
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 64},
    "gpt_oss": {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 64,
        "head_dim": 32,
        "sliding_window": 32,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 2.0,
            "original_max_position_embeddings": 256,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
    },
}
# vLLM's attention on CPUs has no smaller heads, and reloads no smaller experts
_SERVED: dict[str, Any] = {
    "hidden_size": 128,
    "head_dim": 32,
    "moe_intermediate_size": 32,
    "intermediate_size": 64,
}
_LATENT = {  # the kernel for latent attention knows the sizes of real models only
    "head_dim": 64,
    "kv_lora_rank": 512,
    "q_lora_rank": 64,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}
_SERVED_TOO: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 128},
    "lfm2": {"conv_dim": 128, "block_dim": 128},  # as its checkpoints say
    "opt": {"word_embed_proj_dim": 128},
    **{key: {"mamba_d_head": 64} for key in ("granitemoehybrid", "bamba", "zamba2")},
    "falcon_h1": {"mamba_d_head": 64, "mamba_d_ssm": 256},
    "longcat_flash": _LATENT,
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
}


def make(name: str, folder: Path, *, seed: int = 0, words: bool = False, **changes: Any) -> Path:
    """Write a tiny model of the family `name` into `folder` and return it; `changes` replace
    entries of its configuration.

    Weights are larger than a fresh model's, so that a wrong layer shows in the log-probs.  `words`:
    with a tokenizer and heads that engines have.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if words:
        tokenizer = tiny.tokenizer()
        tokenizer.save_pretrained(folder)
        changes = {"vocab_size": len(tokenizer), **_SERVED, **_SERVED_TOO.get(name, {}), **changes}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = AutoConfig.for_model(name, **{**_SIZES, **FAMILIES[name], **changes})
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(3.0)
            for buffer_name, buffer in model.named_buffers():
                if buffer_name.endswith("correction_bias"):  # of routers; fresh ones are zero
                    buffer.uniform_(-0.1, 0.1)
    model.save_pretrained(folder)
    return folder


def with_images(folder: Path) -> Path:
    """Write a tiny Gemma 3 that also takes images, whose configuration names no end token; with a
    tokenizer.
    """
    import torch
    from transformers import AutoModelForCausalLM, Gemma3Config

    words = tiny.tokenizer()
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    text = {
        **sizes,
        "vocab_size": len(words),
        "num_key_value_heads": 2,
        "head_dim": 8,
        "sliding_window": 6,
    }
    vision = {**sizes, "image_size": 28, "patch_size": 14}
    config = Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_id=5
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


_OWN_CLASSES = """
from transformers import LlamaConfig, LlamaForCausalLM


class Config(LlamaConfig):
    model_type = "rft_own"


class RftOwnForCausalLM(LlamaForCausalLM):
    config_class = Config
"""
_OWN_REGISTERED = """
from rft_own_classes import Config, RftOwnForCausalLM
from transformers import AutoConfig, AutoModelForCausalLM

AutoConfig.register("rft_own", Config)
AutoModelForCausalLM.register(Config, RftOwnForCausalLM)
"""
_OWN_IN_VLLM = """
from vllm import ModelRegistry

ModelRegistry.register_model("RftOwnForCausalLM", "vllm.model_executor.models.llama:LlamaForCausalLM")
"""


def with_own_class(folder: Path, *, vllm: bool = False) -> tuple[Path, str]:
    """Write a tiny model of a class that only a module beside it registers, with `vllm` there too;
    the model and the module's name.
    """
    model = tiny.make(folder / "model")
    page = model / "config.json"
    own = {"model_type": "rft_own", "architectures": ["RftOwnForCausalLM"]}
    page.write_text(json.dumps({**json.loads(page.read_text()), **own}))
    (folder / "rft_own_classes.py").write_text(_OWN_CLASSES)
    (folder / "rft_own_registered.py").write_text(_OWN_REGISTERED + _OWN_IN_VLLM * vllm)
    return model, "rft_own_registered"


def with_tower(name: str, folder: Path) -> Path:
    """Write a tiny "gemma3", "llama4" or "qwen3_5", its tower for images deeper than its language
    model, with the names of checkpoints.
    """
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "num_attention_heads": 4}
    text = {**_SIZES, **FAMILIES[f"{name}_text"], "tie_word_embeddings": name == "gemma3"}
    vision: dict[str, Any] = {
        **sizes,
        "num_hidden_layers": 3,
        "depth": 3,
        "image_size": 28,
        "patch_size": 14,
    }
    vision["out_hidden_size"] = 32
    more = {"mm_tokens_per_image": 4} if name == "gemma3" else {"tie_word_embeddings": False}
    if name == "llama4":
        vision |= {
            "intermediate_size": 128,
            "pixel_shuffle_ratio": 0.5,
            "vision_output_dim": 32,
            "projector_input_dim": 32,
        }
        vision |= {"projector_output_dim": 32}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = AutoConfig.for_model(name, text_config=text, vision_config=vision, **more)
        AutoModelForImageTextToText.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder

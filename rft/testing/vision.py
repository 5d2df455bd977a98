"""Tiny random models that read images, with their image processor, tokenizer and chat template, for
tests; nothing is downloaded.

    python -m rft.testing.vision FAMILY FOLDER      writes the model
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from rft.testing import tiny

_TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_PATCHES = {"depth": 2, "num_heads": 4, "intermediate_size": 48, "patch_size": 4}
_SQUARES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_QWEN = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
_GEMMA = ("<start_of_image>", "<image_soft_token>", "<end_of_image>")
_IDEFICS = ("<fake_token_around_image>", "<image>", "<global-img>", "<end_of_utterance>")
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}


def _qwen(pixels: Any, **vision: Any) -> dict[str, Any]:
    return {
        "marks": _QWEN,
        "shows": "<|vision_start|><|image_pad|><|vision_end|>",
        "text": {"rope_parameters": _ROPE},
        "vision": {**_PATCHES, "out_hidden_size": 32, **vision},
        "ids": {
            "vision_start_token_id": "<|vision_start|>",
            "vision_end_token_id": "<|vision_end|>",
            "image_token_id": "<|image_pad|>",
            "video_token_id": "<|video_pad|>",
        },
        "processor": ("Qwen2VLImageProcessorPil", pixels),
    }


_SIZE = {"size": {"shortest_edge": 64, "longest_edge": 4096}, "patch_size": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": _qwen(
        _SIZE, hidden_size=32, window_size=16, fullatt_block_indexes=[1], tokens_per_second=2
    ),
    "qwen3_vl": _qwen(
        {**_SIZE, "image_mean": [0.5] * 3, "image_std": [0.5] * 3},
        hidden_size=32,
        deepstack_visual_indexes=[0, 1],
        num_position_embeddings=64,
    ),
    "gemma3": {
        "marks": _GEMMA,
        "shows": "<start_of_image>",
        "text": {"sliding_window": 6, "query_pre_attn_scalar": 8},
        "vision": {**_SQUARES, "image_size": 28, "patch_size": 7},
        "ids": {
            "boi_token_index": "<start_of_image>",
            "image_token_id": "<image_soft_token>",
            "eoi_token_index": "<end_of_image>",
        },
        "more": {"mm_tokens_per_image": 4},
        "processor": ("Gemma3ImageProcessorPil", {"size": {"height": 28, "width": 28}}),
        "names": {
            "boi_token": "<start_of_image>",
            "image_token": "<image_soft_token>",
            "eoi_token": "<end_of_image>",
        },
    },
    "idefics3": {
        "marks": _IDEFICS + tuple(f"<row_{r}_col_{c}>" for r in (1, 2) for c in (1, 2)),
        "shows": "<image>",
        "text": {"model_type": "llama"},
        "vision": {**_SQUARES, "image_size": 32, "patch_size": 8},
        "ids": {"image_token_id": "<image>"},
        "more": {"scale_factor": 2},
        "processor": (
            "Idefics3ImageProcessorPil",
            {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}},
        ),
    },
}


def make(family: str, folder: Path, *, tied: bool = True, seed: int = 0, **changes: Any) -> Path:
    """Write a tiny model of `family` with everything that reads its inputs; return the folder.

    `changes`: entries of its text configuration.
    """
    import torch
    import transformers
    from transformers import AutoConfig, AutoModelForImageTextToText, GenerationConfig

    about = FAMILIES[family]
    words = tokenizer(family)
    text = {**_TEXT, **about["text"], "vocab_size": len(words), "tie_word_embeddings": tied}
    ids = {name: words.convert_tokens_to_ids(token) for name, token in about["ids"].items()}
    config = AutoConfig.for_model(
        family,
        text_config={**text, **changes},
        vision_config=about["vision"],
        tie_word_embeddings=tied,
        pad_token_id=0,
        **ids,
        **about.get("more", {}),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(3.0)  # fresh weights are too small for images to matter
    model.generation_config = GenerationConfig(pad_token_id=0, bos_token_id=1, eos_token_id=2)
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    kind, arguments = about["processor"]
    getattr(transformers, kind)(**arguments).save_pretrained(folder)
    return folder


def tokenizer(family: str) -> Any:
    """Return the byte-level tokenizer of the tiny models with the family's marks of images."""
    about = FAMILIES[family]
    words = tiny.tokenizer()
    words.add_tokens(list(about["marks"]), special_tokens=True)
    if names := about.get("names"):
        words._set_model_specific_special_tokens(names)
    words.chat_template = _TEMPLATE.replace("SHOWS", about["shows"])
    return words


_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'][0] }}"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for p in m['content'] %}"
    "{{ 'SHOWS' if p['type'] == 'image' else p['text'] }}{% endfor %}{% endif %}"
    "{{ '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>a' }}{% endif %}"
)


def picture(width: int, height: int, seed: int = 0) -> bytes:
    """Return a PNG file of coloured noise."""
    import io

    from PIL import Image

    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "PNG")
    return file.getvalue()


if __name__ == "__main__":
    print(json.dumps(str(make(sys.argv[1], Path(sys.argv[2])))))

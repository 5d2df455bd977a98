"""Tiny random vision-language models, and a task of generated pictures, for tests.

The models are like those of `rft.testing.tiny`: random, byte-level, nothing downloaded; with a
vision tower of two layers and the image processor of their family.  The task is to name the colour
of a picture.  Invariant: the same seed writes the same weights, pictures and rows.

    python -m rft.testing.tiny_vision FOLDER      writes a Qwen2.5-VL
"""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from rft.testing import tiny

COLOURS = {  # by the answer's letter
    "r": (220, 30, 30),
    "g": (30, 180, 60),
    "b": (40, 60, 220),
    "y": (240, 220, 40),
}
_QWEN_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_GEMMA_TOKENS = ("<start_of_image>", "<end_of_image>", "<image_soft_token>")
_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'][0] }}"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for p in m['content'] %}"
    "{% if p['type'] == 'image' %}{{ 'IMAGE' }}{% else %}{{ p['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>a' }}{% endif %}"
)
_TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,  # of 32 numbers each: vLLM's attention on CPUs has no smaller ones
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_CLIP = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
FAMILIES = ("qwen2_5_vl", "qwen3_vl", "gemma3", "qwen2_vl")


def make(folder: Path, family: str = "qwen2_5_vl", *, seed: int = 0) -> Path:
    """Write a model folder of one of FAMILIES (float32 safetensors, tokenizer, image processor) and
    return it.
    """
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText, GenerationConfig

    gemma = family == "gemma3"
    added = _GEMMA_TOKENS if gemma else _QWEN_TOKENS
    words = tiny.tokenizer()
    words.add_tokens(list(added), special_tokens=True)
    placeholder = "<start_of_image>" if gemma else "<|vision_start|><|image_pad|><|vision_end|>"
    words.chat_template = _TEMPLATE.replace("IMAGE", placeholder)
    ids = dict(zip(added, words.convert_tokens_to_ids(list(added)), strict=True))
    parts = _parts(family, ids, len(words))
    config = AutoConfig.for_model(family, **parts["config"])
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    model.generation_config = GenerationConfig(pad_token_id=0, bos_token_id=1, eos_token_id=2)
    model.save_pretrained(aside)
    words.save_pretrained(aside)
    if gemma:  # names that transformers' own processor, which vLLM loads, asks for
        page = aside / "tokenizer_config.json"
        named = dict(zip(("boi_token", "eoi_token", "image_token"), added, strict=True))
        written = {**json.loads(page.read_text()), "extra_special_tokens": named}
        page.write_text(json.dumps(written))
    processor = {"do_convert_rgb": True, **_CLIP, **parts["processor"]}
    (aside / "preprocessor_config.json").write_text(json.dumps(processor))
    shutil.rmtree(folder, ignore_errors=True)
    aside.chmod(0o755)
    os.replace(aside, folder)
    return folder


def _parts(family: str, ids: dict[str, int], vocab_size: int) -> dict[str, dict[str, Any]]:
    """Return the model's configuration and that of its image processor."""
    text: dict[str, Any] = {**_TEXT, "vocab_size": vocab_size}
    return _gemma(text, ids) if family == "gemma3" else _qwen(family, text, ids)


def _gemma(text: dict[str, Any], ids: dict[str, int]) -> dict[str, dict[str, Any]]:
    text |= {"head_dim": 32, "sliding_window": 32, "query_pre_attn_scalar": 32}
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 4,
    }
    config = {
        "text_config": text,
        "vision_config": vision,
        "mm_tokens_per_image": 4,
        "image_token_index": ids["<image_soft_token>"],
        "boi_token_index": ids["<start_of_image>"],
        "eoi_token_index": ids["<end_of_image>"],
        "tie_word_embeddings": True,
    }
    kind = "Gemma3ImageProcessor"
    size = {"height": 16, "width": 16}
    return {"config": config, "processor": {"image_processor_type": kind, "size": size}}


def _qwen(family: str, text: dict[str, Any], ids: dict[str, int]) -> dict[str, dict[str, Any]]:
    patches = {"patch_size": 4, "temporal_patch_size": 2}
    vision: dict[str, Any] = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": text["hidden_size"],
        "spatial_merge_size": 2,
        **patches,
    }
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 4, 4]}
    if family == "qwen3_vl":
        vision |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 64}
        text |= {"head_dim": 32, "rope_parameters": {**rope, "mrope_interleaved": True}}
    else:
        text["rope_parameters"] = rope
        if family == "qwen2_vl":
            vision |= {"embed_dim": 32, "hidden_size": text["hidden_size"], "mlp_ratio": 2}
        else:
            vision |= {"window_size": 16, "fullatt_block_indexes": [1]}
    config = {
        "text_config": text,
        "vision_config": vision,
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "tie_word_embeddings": True,
    }
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "merge_size": 2,
        "size": {"shortest_edge": 64, "longest_edge": 1024},
        **patches,
    }
    return {"config": config, "processor": processor}


def picture(
    colour: tuple[int, int, int], *, size: tuple[int, int] = (24, 16), seed: int = 0
) -> bytes:
    """Return a PNG of one colour with a little noise, (width, height) pixels."""
    import numpy as np
    from PIL import Image

    noise = np.random.default_rng(seed).integers(-12, 13, (size[1], size[0], 3))
    pixels = np.clip(np.array(colour) + noise, 0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def colour_tasks(split: str = "train", *, n: int = 256, seed: int = 0) -> list[dict[str, Any]]:
    """Rows {"prompt": "colour?", "images": [PNG], "response": "r"}.

    As a taskset: path `rft.testing.tiny_vision:colour_tasks` with `format.image_key: images`.
    """
    rng = random.Random(f"{split} {seed}")
    rows = []
    for _ in range(n):
        answer = rng.choice(list(COLOURS))
        size = (rng.choice((16, 24, 32)), rng.choice((16, 24)))
        file = picture(COLOURS[answer], size=size, seed=rng.randrange(1 << 30))
        rows.append({"prompt": "colour?", "images": [file], "response": answer})
    return rows


if __name__ == "__main__":
    print(make(Path(sys.argv[1])))

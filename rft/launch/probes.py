"""Fixed prompts of the log-prob canary: random ordinary token ids, so that every layer and many head rows take part."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

_LENGTH = 12


def vocab_size(model_path: str) -> int:
    """How many token ids the model has."""
    config = json.loads((Path(model_path) / "config.json").read_text())
    return int(config.get("text_config", config)["vocab_size"])


def probe_prompts(model_path: str, count: int, seed: int) -> list[list[int]]:
    """`count` prompts of 12 token ids drawn from the middle half of the vocabulary (special tokens live at its ends)."""
    vocabulary = vocab_size(model_path)
    draw = np.random.default_rng(seed)
    ids = draw.integers(vocabulary // 4, max(vocabulary * 3 // 4, vocabulary // 4 + 1), size=(count, _LENGTH))
    return [[int(i) for i in row] for row in ids]

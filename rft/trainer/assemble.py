"""A Hugging Face folder from the parts that ranks have saved, without the ranks.

Knows files; builds no model.  Invariant: one tensor is in memory at a time.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch

from rft.trainer import shards, tensors
from rft.trainer.saving import PRETRAINED
from rft.trainer.sharding import DTYPES


def assemble(saved: Path, target: Path) -> None:
    """Write the model in `saved`, the folder of a checkpoint's parts, to `target` with config and tokenizer, in the config's dtype.

    Raises CheckpointInvalid naming the file that is missing or does not fit.
    """
    for path in (saved / PRETRAINED).iterdir():
        shutil.copyfile(path, target / path.name)
    files = shards.find(saved, "model")
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    dtype = DTYPES.get(str(config.get("dtype") or config.get("torch_dtype")), torch.float32)
    specs = {name: (dtype, files.shape(name)) for name in files}
    tensors.write(target / "model.safetensors", specs, ((name, files.read(name)) for name in files))

"""A Hugging Face folder from the parts that ranks have saved, without the ranks.

Knows files; builds no model.  Invariant: one tensor is in memory at a time.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from rft.errors import CheckpointInvalid
from rft.trainer import adapterfiles, loading, shards, tensors
from rft.trainer.saving import ADAPTERS, PRETRAINED, read_page
from rft.trainer.sharding import DTYPES
from rft.trainer.tensors import Files
from rft.types.adapter import key
from rft.types.modelfiles import fingerprint


def assemble(saved: Path, target: Path) -> None:
    """Write the model in `saved`, the folder of a checkpoint's parts, to `target` with config and tokenizer, in the config's dtype.

    Where an adapter was trained it is added to the base that it was trained on.
    Raises CheckpointInvalid naming the file that is missing or does not fit.
    """
    for path in (saved / PRETRAINED).iterdir():
        shutil.copyfile(path, target / path.name)
    files, read = _adapted(saved) if read_page(saved).get("adapter") is not None else _whole(saved)
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    dtype = DTYPES.get(str(config.get("dtype") or config.get("torch_dtype")), torch.float32)
    specs = {name: (dtype, files.shape(name)) for name in files}
    tensors.write(target / "model.safetensors", specs, ((name, read(name)) for name in files))


Read = Callable[[str], torch.Tensor]


def _whole(saved: Path) -> tuple[Files, Read]:
    files = shards.find(saved, "model")
    return files, files.read


def _adapted(saved: Path) -> tuple[Files, Read]:
    about = read_page(saved)["adapter"]
    base, folder = Path(about["base_path"]), saved / ADAPTERS / about["name"]
    if not base.is_dir():
        raise CheckpointInvalid(
            f"{base}: the base of the adapter in {saved} is not there; export the adapter alone, or put it back"
        )
    if fingerprint(base) != about["base_sha256"]:
        raise CheckpointInvalid(f"{base}: its weights are not those that the adapter in {folder} was trained on")
    form, _, _ = adapterfiles.read(folder)
    files, adapter = loading.files_of(base), Files([folder / adapterfiles.WEIGHTS])
    modules = set(form.modules)
    if unknown := [m for m in form.modules if f"{m}.weight" not in files]:
        raise CheckpointInvalid(f"{base}: has no {unknown[0]}.weight, which the adapter is for")

    def read(name: str) -> torch.Tensor:
        module, weight = name.removesuffix(".weight"), files.read(name)
        if module not in modules:
            return weight
        a, b = (adapter.read(key(module, side)).float() for side in "AB")
        return torch.addmm(weight.float(), b, a, alpha=form.scale)

    return files, read

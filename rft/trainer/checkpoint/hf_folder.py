"""Assemble a Hugging Face folder from the parts that ranks have saved, without the ranks.

Depends on files, and a model without weights, which maps tensors to the names of checkpoints.
Invariant: one tensor is in memory at a time, except for a base model whose tensor names only
loading reveals.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from rft.engine.weights import saved_buffers
from rft.errors import CheckpointInvalid
from rft.trainer.checkpoint import shards
from rft.trainer.checkpoint.saving import (
    ADAPTERS,
    PRETRAINED,
    config_dtype,
    read_page,
    side_files,
    write_file,
    write_model,
)
from rft.trainer.model import adapterfiles, loading
from rft.trainer.model.loading import in_base
from rft.trainer.model.tensors import Files
from rft.trainer.settings import LearnerSettings
from rft.types.adapter import key
from rft.types.modelfiles import fingerprint


def assemble(saved: Path, target: Path) -> None:
    """Write the model in `saved`, the parts of a checkpoint, to `target` with config and tokenizer.

    Weights have the config's dtype.  A trained adapter is merged into its base model. Raises
    CheckpointInvalid naming the file that is missing or does not fit.
    """
    shutil.copytree(saved / PRETRAINED, target, dirs_exist_ok=True)
    page = read_page(saved)
    adapter = page.adapter
    source = shards.find(saved, "model") if adapter is None else _adapter(saved, adapter)
    _assemble(Path(page.base_path), source, target)


def assemble_first(settings: LearnerSettings, adapter: Path, target: Path) -> None:
    """Write the initial model of a run that starts from `adapter`, like `assemble`."""
    side_files(settings, target)
    _assemble(Path(settings.model_path), adapter, target)


def _assemble(base: Path, source: Files | Path, target: Path) -> None:
    """Write the weights of `source`, or those of `base` with the adapter `source`, to `target`.

    `target` already has its config.json.
    """
    lm = None
    files = loading.files_of(base) if base.is_dir() else Files([])
    # a model with custom code has one set of names
    if "auto_map" not in json.loads((target / "config.json").read_text(encoding="utf-8")):
        config = loading.config_of(target, trust_remote_code=False, override={})
        lm = loading.skeleton(config, trust_remote_code=False, attn_implementation="eager")
        if base.is_dir() and not all(
            n in files for n, _ in in_base(lm, files, lm.named_parameters())
        ):
            # only loading the weights reveals the names in the files
            lm = loading.pretrained(
                config, base, trust_remote_code=False, attn_implementation="eager"
            )
    dtype = config_dtype(target)
    buffers = set() if lm is None else set(saved_buffers(lm))
    weights, read = (source, source.read) if isinstance(source, Files) else _added(base, source, lm)
    specs = {
        n: torch.empty(
            weights.shape(n), dtype=weights.dtype(n) if n in buffers else dtype, device="meta"
        )
        for n in weights
    }
    values = ((n, read(n)) for n in weights)
    if weights is source and lm is not None:
        write_model(target, lm, files, specs, values, lm.all_tied_weights_keys)
    else:
        write_file(target, specs, values)


def _adapter(saved: Path, about: Mapping[str, Any]) -> Path:
    """Return the adapter folder in `saved` after checking that its base is present and unchanged."""
    base = Path(about["base_path"])
    folder = saved / ADAPTERS / str(about["name"])
    if not base.is_dir():
        raise CheckpointInvalid(
            f"{base}: the base of the adapter in {saved} is not there; export the adapter alone, "
            f"or put it back"
        )
    if fingerprint(base) != about["base_sha256"]:
        raise CheckpointInvalid(
            f"{base}: its weights are not those that the adapter in {folder} was trained on"
        )
    return folder


def _added(base: Path, folder: Path, lm: Any) -> tuple[Files, Callable[[str], torch.Tensor]]:
    form, _, _ = adapterfiles.read(folder)
    files = loading.files_of(base)
    adapter = Files([folder / adapterfiles.WEIGHTS])
    weights = {f"{m}.weight": m for m in form.modules}
    if lm is not None and not set(weights) <= set(files):
        weights = {
            name: m
            for w, m in weights.items()
            for name, _ in in_base(lm, files, [(w, torch.empty(1, device="meta"))])
        }
    if unknown := [name for name in weights if name not in files]:
        raise CheckpointInvalid(f"{base}: has no {unknown[0]}, which the adapter is for")

    def read(name: str) -> torch.Tensor:
        weight = files.read(name)
        if (module := weights.get(name)) is None:
            return weight
        a, b = (adapter.read(key(module, side)).float() for side in "AB")
        return torch.addmm(weight.float(), b, a, alpha=form.scale)

    return files, read

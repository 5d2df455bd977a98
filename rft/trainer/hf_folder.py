"""A Hugging Face folder from the parts that ranks have saved, without the ranks.

Knows files, and a model without weights, by which tensors get the names of checkpoints.  Invariant:
one tensor is in memory at a time, but for a base whose files have names that only loading them
tells.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from rft.engine.weights import saved_buffers
from rft.errors import CheckpointInvalid
from rft.trainer import adapterfiles, loading, shards, tensors
from rft.trainer.loading import in_base
from rft.trainer.saving import ADAPTERS, PRETRAINED, read_page, side_files, untrained
from rft.trainer.settings import LearnerSettings
from rft.trainer.sharding import DTYPES
from rft.trainer.tensors import Files
from rft.types.adapter import key
from rft.types.modelfiles import fingerprint


def assemble(saved: Path, target: Path) -> None:
    """Write the model in `saved`, the folder of a checkpoint's parts, to `target` with config and
    tokenizer, in the config's dtype.

    Where an adapter was trained it is added to the base that it was trained on.
    Raises CheckpointInvalid naming the file that is missing or does not fit.
    """
    shutil.copytree(saved / PRETRAINED, target, dirs_exist_ok=True)
    about = read_page(saved)
    adapter = about.get("adapter")
    source = shards.find(saved, "model") if adapter is None else _adapter(saved, adapter)
    _assemble(Path(about.get("base_path") or "/nowhere"), source, target)


def assemble_first(settings: LearnerSettings, adapter: Path, target: Path) -> None:
    """The same for the model that a run begins with which starts from `adapter`."""
    side_files(settings, target)
    _assemble(Path(settings.model_path), adapter, target)


def _assemble(base: Path, source: Files | Path, target: Path) -> None:
    """`target` has its config already; `source`: the weights, or an adapter that is added to those
    of `base`.
    """
    page = json.loads((target / "config.json").read_text(encoding="utf-8"))
    lm = None
    dtype = DTYPES.get(str(page.get("dtype") or page.get("torch_dtype")), torch.float32)
    there = loading.files_of(base) if base.is_dir() else Files([])
    if "auto_map" not in page:  # the model's own code, where it brings some, knows one set of names
        config = loading.config_of(target, trust_remote_code=False, override={})
        lm = loading.skeleton(config, trust_remote_code=False, attn_implementation="eager")
        if base.is_dir() and not {n for n, _ in in_base(lm, there, lm.named_parameters())} <= set(
            there
        ):
            # knows the names there
            lm = loading.pretrained(
                config, base, trust_remote_code=False, attn_implementation="eager"
            )
    exact = set() if lm is None else set(saved_buffers(lm))
    files, read = (source, source.read) if isinstance(source, Files) else _added(base, source, lm)
    due = {
        n: torch.empty(files.shape(n), dtype=files.dtype(n) if n in exact else dtype, device="meta")
        for n in files
    }
    given: Iterable[tuple[str, torch.Tensor]] = ((name, read(name)) for name in files)
    if files is source and lm is not None:
        due = dict(in_base(lm, there, due.items()))
        given = in_base(lm, there, given)
        names = untrained(lm, there, due, lm.all_tied_weights_keys)
        due |= {n: torch.empty(there.shape(n), dtype=there.dtype(n), device="meta") for n in names}
        given = chain(given, ((n, there.read(n)) for n in names))
    tensors.write(
        target / "model.safetensors", {n: (t.dtype, tuple(t.shape)) for n, t in due.items()}, given
    )


def _adapter(saved: Path, about: Mapping[str, Any]) -> Path:
    """The adapter in `saved`, once it is sure that its base is there."""
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

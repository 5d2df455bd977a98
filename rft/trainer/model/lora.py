"""The adapter inside a model: peft's layers in place of linear layers, their values, and weights
with the adapter merged.

Depends on peft's LoRA layers and how tensors are cut over ranks, not on losses, optimizers or the
files of a run. Invariant: the same seed gives the same adapter on every rank and for every number
of ranks; the base is never changed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from rft.errors import CheckpointInvalid, ConfigError
from rft.trainer.model import adapterfiles, tensors
from rft.trainer.model.adapterfiles import Form
from rft.trainer.model.tensors import Files
from rft.trainer.settings import LoraSettings
from rft.types.adapter import AdapterSpec, key
from rft.types.experts import sizes_of
from rft.types.modelfiles import fingerprint

TRAINED = "default"  # peft's names of the adapter and of its frozen copy, the reference model
ANCHOR = "anchor"
_BASE = ".base_layer."


@dataclass(frozen=True)
class Adapter:
    """The adapter in a model.

    `layers`: peft's layers by module name; `linear`: names of all modules that could have an
    adapter.
    """

    settings: LoraSettings
    form: Form
    layers: Mapping[str, Any]
    linear: tuple[str, ...]
    base: str  # fingerprint of the base's weights
    base_path: str
    anchored: bool  # the reference model is the initial adapter, not the base

    def parameters(self, which: str = TRAINED) -> dict[str, nn.Parameter]:
        """Return the parameters by their name in an adapter's file."""
        sides = (("A", "lora_A"), ("B", "lora_B"))
        return {
            key(name, side): getattr(layer, attribute)[which].weight
            for name, layer in self.layers.items()
            for side, attribute in sides
        }

    def fill(self, seed: int) -> None:
        """Set the initial values: those in the folder `path`, or A uniform in ± 1 / sqrt(its
        inputs) and B zero.
        """
        with torch.no_grad():
            if self.settings.path is None:
                for name, p in self.parameters().items():
                    _fresh(name, p, seed)
                return
            files = Files([Path(self.settings.path) / adapterfiles.WEIGHTS])
            tensors.fill(files, self.parameters())
            if self.anchored:
                tensors.fill(files, self.parameters(ANCHOR))

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Make the model the reference inside the block: without adapter, or with the initial one."""
        for layer in self.layers.values():
            if self.anchored:
                layer._active_adapter = ANCHOR
            else:
                # peft's own method would also change requires_grad
                layer._disable_adapters = True
        try:
            yield
        finally:
            for layer in self.layers.values():
                layer._active_adapter = TRAINED
                layer._disable_adapters = False

    def merged(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """Return weight `name` of the base with the adapter merged, unsharded.

        Collective if sharded: each rank computes its own rows.
        """
        module, _, kind = name.rpartition(".")
        layer = self.layers.get(module) if kind == "weight" else None
        if layer is None:
            return tensors.full(weight)
        with torch.no_grad():
            b = tensors.local(layer.lora_B[TRAINED].weight)
            a = tensors.full(layer.lora_A[TRAINED].weight)
            merged = torch.addmm(tensors.local(weight), b, a, alpha=self.form.scale)
        if not isinstance(weight, DTensor):
            return merged
        sharded = DTensor.from_local(
            merged,
            weight.device_mesh,
            weight.placements,
            run_check=False,
            shape=weight.shape,
            stride=weight.stride(),
        )
        return tensors.full(sharded)

    def spec(self) -> AdapterSpec:
        """Return the description that an engine needs to add the adapter to its own base."""
        return AdapterSpec(rank=self.form.rank, scale=self.form.scale, base=self.base)

    def gathered(self) -> dict[str, torch.Tensor]:
        """Return a copy of the adapter in host memory.  Collective if sharded."""
        return {name: tensors.full(p).to("cpu", copy=True) for name, p in self.parameters().items()}

    def page(self) -> dict[str, Any]:
        """Return the adapter's entry in a checkpoint's page."""
        start = (
            None if self.settings.path is None else Path(self.settings.path) / adapterfiles.WEIGHTS
        )
        return {
            "name": self.settings.name,
            "base_path": self.base_path,
            "base_sha256": self.base,
            "start_sha256": None if start is None or not self.anchored else _sha256(start),
        }

    def check_page(self, page: Mapping[str, Any] | None, where: str) -> None:
        """Raise CheckpointInvalid unless a saved adapter has this base, name and start."""
        if page is None:
            raise CheckpointInvalid(
                f"{where}: the checkpoint holds a whole model, not an adapter; leave out "
                f"model.lora_configs"
            )
        if page.get("base_sha256") != self.base:
            raise CheckpointInvalid(
                f"{where}: the adapter is for the weights of {page.get('base_path')} (sha256 "
                f"{str(page.get('base_sha256'))[:12]}); those "
                f"in {self.base_path} are others ({self.base[:12]})"
            )
        if page.get("name") != self.settings.name:
            raise CheckpointInvalid(
                f"{where}: the adapter's name is {page.get('name')}, not {self.settings.name}"
            )
        if self.anchored and page.get("start_sha256") != (
            start_sha256 := self.page()["start_sha256"]
        ):
            raise CheckpointInvalid(
                f"{where}: the adapter in {self.settings.path}, which is the reference model, has "
                f"changed: sha256 {start_sha256}, was "
                f"{page.get('start_sha256')}"
            )

    def load(self, folder: Path) -> None:
        """Load the values in `folder`.  Raises CheckpointInvalid if its rank or scale differs."""
        form, _, _ = adapterfiles.read(folder)
        if (form.rank, form.scale) != (self.form.rank, self.form.scale):
            raise CheckpointInvalid(
                f"{folder}: has rank {form.rank} and scale {form.scale:g}, the run "
                f"{self.form.rank} and {self.form.scale:g}"
            )
        with torch.no_grad():
            tensors.fill(Files([folder / adapterfiles.WEIGHTS]), self.parameters())

    def write(self, folder: Path, values: Mapping[str, torch.Tensor]) -> list[Path]:
        """Write `values`, as `gathered` returns them, in peft's format; return the files."""
        folder.mkdir(parents=True, exist_ok=True)
        specs = {name: (t.dtype, tuple(t.shape)) for name, t in values.items()}
        tensors.write(
            folder / adapterfiles.WEIGHTS,
            specs,
            values.items(),
            {adapterfiles.BASE_HASH: self.base},
        )
        page = adapterfiles.config_page(self.form, self.linear)
        (folder / adapterfiles.CONFIG).write_text(json.dumps(page, indent=2), encoding="utf-8")
        return [folder / adapterfiles.CONFIG, folder / adapterfiles.WEIGHTS]


def wrap(lm: Any, settings: LoraSettings, model_path: str, *, anchored: bool) -> Adapter:
    """Put the adapter of `settings` into `lm`, with parameters on the meta device.

    `anchored`: also its frozen copy. Raises ConfigError for settings that do not fit the model.
    """
    import peft

    head = lm.get_output_embeddings()
    linear = {n: m for n, m in lm.named_modules() if isinstance(m, nn.Linear) and m is not head}
    if not linear:
        raise ConfigError(
            f"{type(lm).__name__} has no linear layers beside its output layer; train the whole "
            f"model",
            key=adapterfiles.KEY,
        )
    sizes = {n: (m.out_features, m.in_features) for n, m in linear.items()}
    if settings.path is None and settings.target_modules in (None, adapterfiles.ALL_LINEAR):
        read = set(lm.get_decoder().modules())  # the text layers, not vision towers
        sizes = {
            n: s
            for n, s in sizes.items()
            if linear[n] in read and not _gate(lm, n, s) and not _read_by_kernels(lm, n)
        }
    form = adapterfiles.form(settings, sizes, model_path)
    if past := [n for n in form.modules if _read_by_kernels(lm, n)]:
        raise ConfigError(
            f"{past[0]}: kernels of Mamba read its weight and would go past an adapter.  Leave it "
            f"out",
            key=f"{adapterfiles.KEY}.target_modules",
        )
    config = peft.LoraConfig(
        r=form.rank,
        lora_alpha=form.alpha,  # type: ignore[arg-type]  # its scale may be any number
        use_rslora=form.rslora,
        lora_dropout=0.0,  # engines sample without dropout
        bias="none",
        target_modules=[f"lm.{n}" for n in form.modules],
        task_type="CAUSAL_LM",
    )
    with torch.device("meta"):
        try:
            # wrapped in a module without a configuration, from which peft would mistake names of
            # dense layers for those of experts
            peft.inject_adapter_in_model(
                config, nn.ModuleDict({"lm": lm}), TRAINED, low_cpu_mem_usage=True
            )
        except ValueError as e:
            raise ConfigError(
                f"peft cannot adapt these layers: {e}", key=f"{adapterfiles.KEY}.target_modules"
            ) from e
        layers = {n: lm.get_submodule(n) for n in form.modules}
        for name, layer in layers.items():
            if not isinstance(layer, peft.tuners.lora.Linear):
                raise ConfigError(
                    f"{name} became a {type(layer).__name__}",
                    key=f"{adapterfiles.KEY}.target_modules",
                )
            if anchored:
                layer.update_layer(ANCHOR, form.rank, form.alpha, config=config)  # type: ignore[arg-type]
    base = fingerprint(Path(model_path))
    return Adapter(settings, form, layers, tuple(linear), base, model_path, anchored)


def _gate(lm: Any, name: str, size: tuple[int, int]) -> bool:
    """Return whether the linear layer `name` [out, in] routes to experts or weighs a shared one.

    "all-linear" does not adapt such a layer, as in engines.
    """
    experts = sizes_of(lm.config.to_dict())
    return (
        size[0] == 1
        or "router" in name.split(".")
        or (experts is not None and size[0] == experts.experts)
    )


def _read_by_kernels(lm: Any, name: str) -> bool:
    """Return whether Mamba kernels read the weight of linear layer `name` without calling it."""
    parent, _, leaf = name.rpartition(".")
    mixer = lm.get_submodule(parent)
    names = {name for name, _ in (*mixer.named_children(), *mixer.named_parameters(recurse=False))}
    return leaf in ("out_proj", "x_proj", "dt_proj") and {"conv1d", "D"} <= names


def base_name(name: str) -> str | None:
    """Return the Hugging Face name of a parameter; None for a parameter of the adapter."""
    return None if ".lora_A." in name or ".lora_B." in name else name.replace(_BASE, ".")


def freeze(model: nn.Module, adapter: Adapter) -> None:
    """Make the adapter the only trained part of `model`."""
    model.requires_grad_(False)
    for p in adapter.parameters().values():
        p.requires_grad_(True)


def _fresh(name: str, parameter: torch.Tensor, seed: int) -> None:
    """Set this rank's rows of an initial value.

    Every rank draws all of A, which is small, so the rows do not depend on the number of ranks.
    """
    part = tensors.piece(name, parameter)
    if ".lora_B." in name:
        part.data.zero_()
        return
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    bound = parameter.shape[1] ** -0.5
    values = torch.empty(part.shape).uniform_(-bound, bound, generator=generator)
    part.data.copy_(values[part.first : part.first + len(part.data)])


def _sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

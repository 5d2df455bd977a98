"""Read and write an adapter folder in peft's format, and choose the layers that an adapter is for.
Torch-free.

Depends on files and names, not on training.  Invariant: an accepted adapter is plain LoRA, of one
rank, on linear layers that the model has, so that its product can be added to their weights.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rft.errors import CheckpointInvalid, ConfigError
from rft.trainer.settings import LoraSettings
from rft.types.adapter import split
from rft.types.modelfiles import fingerprint, header

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
ALL_LINEAR = "all-linear"
RANK = 32
ALPHA = 32.0
BASE_HASH = "rft_base_sha256"  # metadata of WEIGHTS: `fingerprint` of the base
KEY = "model.lora_configs[0]"
# entries of adapter_config.json that change the computation, with the supported values
_DEFAULTS: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "use_dora": (False, None),
    "bias": ("none", None),
    "lora_bias": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "fan_in_fan_out": (False, None),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
    "alora_invocation_tokens": (None, []),
    # the other initialisations change the base weights
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
}


@dataclass(frozen=True, kw_only=True)
class Form:
    """Shape of an adapter: it adds `scale` x B x A to the weight of each of `modules`.

    A is [rank, in], B is [out, rank].
    """

    rank: int
    alpha: float
    rslora: bool = False
    modules: tuple[str, ...]
    base_name: str = ""

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


def choose(
    linear: Collection[str], targets: str | tuple[str, ...], exclude: str | tuple[str, ...] | None
) -> tuple[str, ...]:
    """Return which of the `linear` layers get an adapter.

    A name selects every layer that ends in it; a single string is a regular expression. Raises
    ConfigError naming a target or an exclusion that matches no layer.
    """
    choices = f"there are {', '.join(_ends(linear))}"
    chosen = (
        set(linear)
        if targets == ALL_LINEAR
        else _matching(linear, targets, f"{KEY}.target_modules", choices)
    )
    modules = chosen - (
        _matching(linear, exclude, f"{KEY}.exclude_modules", choices) if exclude else set()
    )
    if not modules:
        raise ConfigError(
            "leaves no layer for the adapter", key=f"{KEY}.exclude_modules", given=exclude
        )
    return tuple(name for name in linear if name in modules)


def _matching(
    linear: Collection[str], targets: str | tuple[str, ...], where: str, choices: str
) -> set[str]:
    if isinstance(targets, str):
        if not (matches := {n for n in linear if re.fullmatch(targets, n)}):
            raise ConfigError(
                f"is no name of a linear layer, nor an expression that matches one; {choices}",
                key=where,
                given=targets,
            )
        return matches
    matches = set()
    for name in targets:
        if not (fits := {n for n in linear if n == name or n.endswith(f".{name}")}):
            raise ConfigError(
                f"{name} is no linear layer of the model; {choices}", key=where, given=list(targets)
            )
        matches |= fits
    return matches


def _ends(names: Iterable[str]) -> list[str]:
    return sorted({name.rpartition(".")[2] for name in names})


def form(settings: LoraSettings, linear: Mapping[str, tuple[int, int]], model_path: str) -> Form:
    """Return the adapter's form for a model whose linear layers are `linear`: name -> (out, in).

    Raises ConfigError, with its key, for a setting that does not fit the model or the adapter in
    `settings.path`.
    """
    if settings.path is not None:
        return _form_of_folder(settings, Path(settings.path), linear, model_path)
    adapter = Form(
        rank=settings.rank or RANK,
        alpha=float(settings.alpha or ALPHA),
        modules=choose(linear, settings.target_modules or ALL_LINEAR, settings.exclude_modules),
        base_name=settings.base_name or model_path,
    )
    smallest = min(adapter.modules, key=lambda n: min(linear[n]))
    if adapter.rank > min(linear[smallest]):
        raise ConfigError(
            f"is more than the size {min(linear[smallest])} of {smallest}; a lower one is as good",
            key=f"{KEY}.lora_rank",
            given=adapter.rank,
        )
    return adapter


def _form_of_folder(
    settings: LoraSettings, folder: Path, linear: Mapping[str, tuple[int, int]], model_path: str
) -> Form:
    def wrong(message: str, name: str = "path", value: object = None) -> ConfigError:
        return ConfigError(
            message, key=f"{KEY}.{name}", given=str(folder) if value is None else value
        )

    try:
        adapter, shapes, meta = read(folder)
    except CheckpointInvalid as e:
        raise wrong(str(e)) from e
    for module, sides in shapes.items():
        if module not in linear:
            raise wrong(
                f"adapts {module}, which is no linear layer of {model_path}: it belongs to another "
                f"model"
            )
        out, into = linear[module]
        if sides != {"A": (adapter.rank, into), "B": (out, adapter.rank)}:
            raise wrong(
                f"adapts {module} as {_shown(sides)}, which does not fit the model's [{out}, "
                f"{into}] at rank {adapter.rank}"
            )
    if BASE_HASH in meta:
        if meta[BASE_HASH] != fingerprint(Path(model_path)):
            raise wrong(
                f"was trained on other weights than those in {model_path}; name its base in "
                f"model.model_path"
            )
    elif (
        adapter.base_name
        and settings.base_name
        and Path(adapter.base_name).name != Path(settings.base_name).name
    ):
        raise wrong(
            f"was trained on {adapter.base_name}, not on {settings.base_name}; if these are the same "
            f"weights, write that name in "
            "base_model_name"
        )
    for name, written, has in (
        ("lora_rank", settings.rank, adapter.rank),
        ("lora_alpha", settings.alpha, adapter.alpha),
    ):
        if written is not None and written != has:
            raise wrong(
                f"is {written:g}, but the adapter in {folder} has {has:g}; leave it out",
                name,
                written,
            )
    if settings.target_modules is not None or settings.exclude_modules is not None:
        chosen = choose(
            tuple(linear), settings.target_modules or ALL_LINEAR, settings.exclude_modules
        )
        if set(chosen) != set(adapter.modules):
            differs = sorted(set(chosen) ^ set(adapter.modules))[0]
            raise wrong(
                f"names other layers than the adapter in {folder} has, e.g. {differs}; leave it "
                f"out",
                "target_modules",
                chosen,
            )
    return adapter


def _shown(sides: Mapping[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{side} {list(shape)}" for side, shape in sorted(sides.items()))


# ---------------------------------------------------------------- files


def read(folder: Path) -> tuple[Form, dict[str, dict[str, tuple[int, ...]]], dict[str, str]]:
    """Return (form, shapes by module and side, metadata) of the adapter in `folder`.

    Raises CheckpointInvalid naming an entry or file that is unsupported or damaged.
    """
    if not folder.is_dir():
        raise CheckpointInvalid(
            f"{folder} is not a folder; an adapter is a folder with {CONFIG} and {WEIGHTS}"
        )
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        rank = config.get("r")
        alpha = config.get("lora_alpha")
        name = config.get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError) as e:
        raise CheckpointInvalid(f"{folder / CONFIG} cannot be read: {e}") from e
    for entry, allowed in _DEFAULTS.items():
        if entry in config and config[entry] not in allowed:
            raise CheckpointInvalid(
                f"{folder / CONFIG} has {entry}: {config[entry]!r}; only {allowed[0]!r} is "
                f"supported"
            )
    if (
        type(rank) is not int
        or rank < 1
        or isinstance(alpha, bool)
        or not isinstance(alpha, int | float)
        or not alpha > 0
    ):
        raise CheckpointInvalid(
            f"{folder / CONFIG} has r {rank!r} and lora_alpha {alpha!r}; both must be positive "
            f"numbers"
        )
    if not (folder / WEIGHTS).is_file():
        raise CheckpointInvalid(
            f"{folder} has no {WEIGHTS}; other formats can run code when read, save it as "
            f"safetensors"
        )
    tensors, _ = header(folder / WEIGHTS)
    meta = tensors.pop("__metadata__", None) or {}
    shapes: dict[str, dict[str, tuple[int, ...]]] = {}
    for tensor, about in tensors.items():
        if (named := split(tensor)) is None:
            raise CheckpointInvalid(
                f"{folder / WEIGHTS} holds {tensor}, which is not of a linear layer's adapter"
            )
        module, side = named
        shapes.setdefault(module, {})[side] = tuple(about["shape"])
    if not shapes:
        raise CheckpointInvalid(f"{folder / WEIGHTS} is empty")
    adapter = Form(
        rank=rank,
        alpha=float(alpha),
        rslora=bool(config.get("use_rslora")),
        modules=tuple(sorted(shapes)),
        base_name=str(name or ""),
    )
    return adapter, shapes, {str(k): str(v) for k, v in meta.items()}


def config_page(adapter: Form, linear: Collection[str]) -> dict[str, Any]:
    """Return the content of adapter_config.json.

    Layers are written by their last name component if that selects the same layers.
    """
    short = tuple(_ends(adapter.modules))
    same = set(choose(linear, short, None)) == set(adapter.modules)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": adapter.base_name,
        "r": adapter.rank,
        "lora_alpha": int(adapter.alpha) if adapter.alpha.is_integer() else adapter.alpha,
        "lora_dropout": 0.0,
        "use_rslora": adapter.rslora,
        "use_dora": False,
        "bias": "none",
        "fan_in_fan_out": False,
        "target_modules": list(short if same else adapter.modules),
        "modules_to_save": None,
        "init_lora_weights": True,
        "inference_mode": True,
    }

"""Build a Hugging Face model without weights, then fill it from safetensors; every rank reads only
its own rows.

Depends on transformers' conventions (tied names, buffers that are no weights), not on FSDP2's
settings or losses. Invariant: no parameter or buffer stays without a value; missing tensors are
refused by name.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rft.engine.auto_class import auto_class
from rft.engine.weights import in_checkpoints, saved_buffers
from rft.errors import CheckpointInvalid, ConfigError, SetupError, is_out_of_memory
from rft.files.strict_json import parse_json
from rft.trainer.model import tensors
from rft.trainer.model.tensors import Files
from rft.trainer.settings import LearnerSettings
from rft.types import modelfiles, rotary

log = logging.getLogger(__name__)
_MODEL = "model.model_path"
# (name, parameter) -> set its initial value; return False if the files must contain it
Fresh = Callable[[str, torch.Tensor], bool]


def override_of(settings: LearnerSettings, path: str) -> dict[str, Any]:
    """Return `override_config` for the model in `path`.

    The entries are the policy's, so a critic of another family gets none.
    """
    same = path == settings.model_path or _family(path) == _family(settings.model_path)
    return settings.override_config if same else {}


def _family(folder: str) -> str | None:
    """Return the model type; None if config.json cannot be read, which the loader reports."""
    with suppress(OSError, ValueError):
        return str(parse_json(Path(folder, "config.json").read_text()).get("model_type"))
    return None


def config_of(folder: Path, *, trust_remote_code: bool, override: Mapping[str, Any]) -> Any:
    """Return the model's configuration with the entries of `override` replaced.

    Raises ConfigError for unknown entries and for quantized weights.
    """
    from transformers import AutoConfig

    if not folder.is_dir():
        raise SetupError(
            f"{folder}: not a folder; the trainer loads models from local Hugging Face folders"
        )
    try:
        config = AutoConfig.from_pretrained(
            folder, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as e:  # each model's own code checks the entries
        raise ConfigError(
            f"transformers cannot read its config.json: {_describe(e)}",
            key=_MODEL,
            given=str(folder),
        ) from e
    if kind := (vars(config).get("quantization_config") or {}).get("quant_method"):
        reason = (
            f"its weights are stored as {kind}, which is not trained; use the model's bfloat16 "
            f"weights"
        )
        raise ConfigError(reason, key=_MODEL, given=str(folder))
    for name, value in rotary.applied_to(folder, override).items():
        if not hasattr(config, name):
            raise ConfigError(
                f"{type(config).__name__} has no entry {name}",
                key="model.override_config",
                given=name,
            )
        setattr(config, name, value)
    return config


def skeleton(config: Any, *, trust_remote_code: bool, attn_implementation: str) -> Any:
    """Return the causal model of `config`, parameters on the meta device, buffers on the CPU."""
    auto = auto_class(config)
    how = {"dtype": torch.float32, "trust_remote_code": trust_remote_code}
    with no_progress(), torch.device("meta"):
        try:
            lm = auto.from_config(config, attn_implementation=attn_implementation, **how)
        except Exception as e:  # third-party model code may raise anything
            try:
                lm = auto.from_config(config, attn_implementation="eager", **how)
            except Exception as plain:
                reason = f"transformers cannot build it from its config.json: {_describe(plain)}"
                raise ConfigError(reason, key=_MODEL, given=config.name_or_path) from plain
            if attn_implementation != "sdpa":  # sdpa is the default, and most models have it
                raise ConfigError(
                    _describe(e), key="trainer.attn_implementation", given=attn_implementation
                ) from e
            log.warning("this model has no sdpa attention, so it computes with eager")
    lm.tie_weights()
    _buffers(lm)
    return lm.eval()


def _buffers(lm: Any) -> None:
    """Allocate the modules' buffers and set the values of those that are not in files (rotary
    frequencies), as transformers does.
    """
    every = list(_initialised(lm, lm))
    for model, module in every:
        buffers = {n: b for n, b in module.named_buffers(recurse=False) if b.is_meta}
        for name, buffer in buffers.items():
            empty = torch.full(
                buffer.shape, float("nan") if buffer.is_floating_point() else 0, dtype=buffer.dtype
            )
            module.register_buffer(
                name, empty, persistent=name not in module._non_persistent_buffers_set
            )
        if buffers:
            model._init_weights(module)
    if any(b.is_floating_point() and bool(b.isnan().any()) for b in lm.buffers()):
        # some models set a layer's buffers from outside the layer
        for model, module in every:
            model._init_weights(module)


def _initialised(model: Any, module: nn.Module) -> Iterator[tuple[Any, nn.Module]]:
    """Yield each module below `module` with the nearest enclosing model, which initialises it."""
    from transformers import PreTrainedModel

    model = module if isinstance(module, PreTrainedModel) else model
    yield model, module
    for child in module.children():
        yield from _initialised(model, child)


def use_liger(lm: Any, device: str) -> None:
    """Replace layers of `lm` by Liger's fused layers.

    Raises ConfigError if liger-kernel is not installed, cannot run on `device`, or has no layers for
    this family.
    """
    if device != "cuda" or importlib.util.find_spec("liger_kernel") is None:
        reason = (
            "liger-kernel is not installed"
            if device == "cuda"
            else f"its kernels run on GPUs, not on {device}"
        )
        raise ConfigError(f"{reason}; write false", key="trainer.use_liger", given=True)
    before = _forwards(lm)
    importlib.import_module("liger_kernel.transformers")._apply_liger_kernel_to_instance(model=lm)
    if _forwards(lm) == before:
        raise ConfigError(
            f"liger-kernel has no layers for {lm.config.model_type}; write false",
            key="trainer.use_liger",
            given=True,
        )


def _forwards(lm: nn.Module) -> list[Any]:
    """Return the forward functions that modules have of their own, as Liger binds them."""
    return [vars(m).get("forward") for m in lm.modules()]


def materialise(model: nn.Module, device: torch.device | str, computes: torch.device | str) -> None:
    """Allocate every meta parameter on `device`, without values; move other parameters there and
    buffers to `computes`.

    A parameter with two names stays one parameter.
    """
    placed: dict[int, torch.Tensor] = {}

    def place(t: torch.Tensor) -> torch.Tensor:
        if not t.is_meta:
            # FSDP2 does not move buffers for a pass
            return t.to(device if isinstance(t, nn.Parameter) else computes)
        if id(t) not in placed:
            placed[id(t)] = torch.empty_like(t, device=device)
        return placed[id(t)]

    swap = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)  # parameters keep their identity
    try:
        model._apply(place)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swap)


def fill(
    lm: Any,
    names: Mapping[str, torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
    tied: Mapping[str, str],
    folder: Path,
    fresh: Fresh | None = None,
) -> None:
    """Copy the weights in `folder` into `names` and, if the files have them, into `buffers`.

    `tied`: other name -> name in `names` of the same tensor.  `fresh` sets initial values of
    tensors that may be missing. Raises SetupError naming tensors that are missing or have another
    shape, or files that cannot be read.
    """
    files = files_of(folder)
    other = {name: alias for alias, name in tied.items()}
    missing = []
    used = set(buffers)
    with torch.no_grad():
        for name, into in {**names, **buffers}.items():
            stored = name if name in files else other.get(name, name)
            try:
                if stored in files:
                    files.fill(stored, into)
                elif parts := _parts(lm, files, name, into.shape, "cpu"):
                    used |= _join(files, parts, into)
                elif name in names and (fresh is None or not fresh(name, into)):
                    missing.append(name)
            except CheckpointInvalid as e:
                raise SetupError(
                    f"{e}; override_config or config.json does not fit the weights"
                ) from e
    if missing:
        raise SetupError(f"{folder}: has no weights for {_some(missing)}")
    if unset := [
        n for n, b in buffers.items() if b.is_floating_point() and bool(torch.isnan(b).any())
    ]:
        raise SetupError(
            f"{folder}: nothing gives {_some(unset)} a value; this model cannot be built without "
            f"its weights"
        )
    if extra := sorted(
        set(files)
        - set(names)
        - set(tied)
        - used
        - {n for n in files if n.endswith("rotary_emb.inv_freq")}
    ):
        log.warning(
            "%s: %d tensors are of no use to this model, e.g. %s", folder, len(extra), extra[0]
        )


def in_base(
    lm: Any, files: Files, weights: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield `weights` under the names of the base model's `files`.

    Like `in_checkpoints`, with a prefix if `lm` is a submodel in the files, as in Llama 4.
    """
    for name, tensor in in_checkpoints(lm, weights):
        inside = f"{lm.base_model_prefix}.{name}"
        yield inside if name not in files and inside in files else name, tensor


def _parts(
    lm: Any, files: Files, name: str, shape: torch.Size, device: str
) -> dict[str, torch.Tensor]:
    """Return the tensors in `files` that make up `name`, if they are stored under other names.

    Maps the tensor's name, or that of the first expert, to the row elements that it contains. Empty
    if nothing matches.
    """
    target = torch.empty(shape, device="meta")
    every = dict(in_base(lm, files, [(name, target)]))
    if not all(n in files and files.shape(n) == t.shape for n, t in every.items()):
        return {}
    if any(t is target for t in every.values()):  # only renamed
        return every
    row = torch.arange(math.prod(shape[1:]), device=device).view(1, *shape[1:])
    first = dict(in_base(lm, files, [(name, row)]))
    return first if {_of_expert(n, e) for n in first for e in range(shape[0])} == set(every) else {}


def _join(files: Files, parts: Mapping[str, torch.Tensor], into: torch.Tensor) -> set[str]:
    """Fill `into`, or this rank's rows of it, from its `_parts`; return the names of all parts."""
    part = tensors.piece("", into)
    for name, at in parts.items():
        if at.shape == into.shape:
            files.fill(name, into)
            continue
        at = at.flatten().to(into.device)
        for expert, row in enumerate(part.data, part.first):
            row.view(-1)[at] = files.read(_of_expert(name, expert)).flatten().to(row)
    return {_of_expert(name, expert) for name in parts for expert in range(into.shape[0])}


def _of_expert(first: str, expert: int) -> str:
    return first.replace(".experts.0.", f".experts.{expert}.")


def fill_from(
    lm: Any,
    names: Mapping[str, torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
    tied: Mapping[str, str],
    folder: Path,
    *,
    trust: bool,
) -> None:
    """Fill like `fill`; if only transformers can convert the files, load all weights through it."""
    if readable(lm, names, tied, folder):
        fill(lm, names, buffers, tied, folder)
        return
    config = config_of(folder, trust_remote_code=trust, override={})
    state = pretrained(
        config, folder, trust_remote_code=trust, attn_implementation="eager"
    ).state_dict()
    with torch.no_grad():
        for name, into in {**names, **buffers}.items():
            part = tensors.piece(name, into)
            part.data.copy_(
                state[name][part.first : part.first + len(part.data)]
                if part.data.dim()
                else state[name]
            )


def readable(
    lm: Any, names: Mapping[str, torch.Tensor], tied: Mapping[str, str], folder: Path
) -> bool:
    """Return whether the files contain the parameters by their names, or expert by expert.

    If not, only transformers can convert them.
    """
    files = files_of(folder)
    other = {name: alias for alias, name in tied.items()}
    due = {n: t for n, t in names.items() if n not in files and other.get(n, n) not in files}
    return not due or all(
        n in files or _parts(lm, files, n, t.shape, "meta")
        for n, t in {**due, **saved_buffers(lm)}.items()
    )


def files_of(folder: Path) -> Files:
    """Return the safetensors files of a Hugging Face folder.

    Raises SetupError if the folder has none or they cannot be read.
    """
    try:
        return Files(modelfiles.files(folder))
    except (CheckpointInvalid, ValueError, KeyError, AttributeError) as e:
        raise SetupError(f"{folder}: its weights cannot be read: {e}") from e


def pretrained(
    config: Any, folder: Path, *, trust_remote_code: bool, attn_implementation: str
) -> Any:
    """Return the model loaded by transformers, unsharded, for files whose names it has to convert.

    Raises SetupError for missing weights.
    """
    with no_progress():
        try:
            lm, info = auto_class(config).from_pretrained(
                folder,
                config=config,
                dtype=torch.float32,
                attn_implementation=attn_implementation,
                use_safetensors=True,
                trust_remote_code=trust_remote_code,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # reported below, by name
            )
        except (RuntimeError, ValueError, OSError) as e:
            if is_out_of_memory(e):
                raise
            raise SetupError(
                f"{folder}: transformers cannot load it: {e}; config.json does not fit the weights"
            ) from e
    if info["missing_keys"]:
        raise SetupError(
            f"{folder}: has no weights for {_some(sorted(map(str, info['missing_keys'])))}"
        )
    if other := [
        f"{name} is {tuple(file_shape)}, the model has {tuple(model_shape)}"
        for name, file_shape, model_shape in sorted(info["mismatched_keys"])
    ]:
        raise SetupError(f"{folder}: {_some(other)}; config.json does not fit the weights")
    return lm


def _describe(e: Exception) -> str:
    return textwrap.shorten(f"{type(e).__name__}: {e}", 400)


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


@contextmanager
def no_progress() -> Iterator[None]:
    """Hide transformers' progress bars inside the block."""
    from transformers.utils import logging as hf

    shown = hf.is_progress_bar_enabled()
    hf.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            hf.enable_progress_bar()

"""A Hugging Face model built without its weights, then filled from safetensors: every rank reads
its own rows and nothing else.

Knows transformers' conventions (tied names, buffers that are no weights), not FSDP2's settings or
losses. Invariant: no parameter and no buffer keeps a value that nobody gave it; what the files lack
is refused by name.
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

from rft.engine.weights import in_checkpoints, saved_buffers
from rft.errors import CheckpointInvalid, ConfigError, SetupError, is_out_of_memory
from rft.files.strict_json import parse_json
from rft.trainer import tensors
from rft.trainer.settings import LearnerSettings
from rft.trainer.tensors import Files
from rft.types import modelfiles, rotary

log = logging.getLogger(__name__)
_MODEL = "model.model_path"
# (name, parameter): give it a first value; False: it has to be in the files
Fresh = Callable[[str, torch.Tensor], bool]


def override_of(settings: LearnerSettings, path: str) -> dict[str, Any]:
    """`override_config` for the model in `path`: its entries are the policy's, so a critic of
    another family gets none.
    """
    same = path == settings.model_path or _family(path) == _family(settings.model_path)
    return settings.override_config if same else {}


def _family(folder: str) -> str | None:
    """None where config.json cannot be read, which is told where it is loaded."""
    with suppress(OSError, ValueError):
        return str(parse_json(Path(folder, "config.json").read_text()).get("model_type"))
    return None


def config_of(folder: Path, *, trust_remote_code: bool, override: Mapping[str, Any]) -> Any:
    """The model's configuration with the entries of `override` replaced; unknown entries and
    quantized weights are refused.
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
    except Exception as e:  # entries are checked by each model's own code
        raise ConfigError(
            f"transformers cannot read its config.json: {_said(e)}", key=_MODEL, given=str(folder)
        ) from e
    if kind := (vars(config).get("quantization_config") or {}).get("quant_method"):
        why = (
            f"its weights are stored as {kind}, which is not trained; use the model's bfloat16 "
            f"weights"
        )
        raise ConfigError(why, key=_MODEL, given=str(folder))
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
    """The causal model of `config` with parameters on the meta device, and with real buffers on the
    CPU.
    """
    from transformers import AutoModelForCausalLM

    how = {"dtype": torch.float32, "trust_remote_code": trust_remote_code}
    with no_progress(), torch.device("meta"):
        try:
            lm = AutoModelForCausalLM.from_config(
                config, attn_implementation=attn_implementation, **how
            )
        except Exception as e:  # a model's code may be anyone's
            try:
                lm = AutoModelForCausalLM.from_config(config, attn_implementation="eager", **how)
            except Exception as plain:
                why = f"transformers cannot build it from its config.json: {_said(plain)}"
                raise ConfigError(why, key=_MODEL, given=config.name_or_path) from plain
            if attn_implementation != "sdpa":  # which most models have, and is the default
                raise ConfigError(
                    _said(e), key="trainer.attn_implementation", given=attn_implementation
                ) from e
            log.warning("this model has no sdpa attention, so it computes with eager")
    lm.tie_weights()
    _buffers(lm)
    return lm.eval()


def _buffers(lm: Any) -> None:
    """Give each module's own buffers memory, and the values that transformers gives those that are
    not in files (rotary frequencies).
    """
    every = list(_initialised(lm, lm))
    for model, module in every:
        own = {n: b for n, b in module.named_buffers(recurse=False) if b.is_meta}
        for name, buffer in own.items():
            empty = torch.full(
                buffer.shape, float("nan") if buffer.is_floating_point() else 0, dtype=buffer.dtype
            )
            module.register_buffer(
                name, empty, persistent=name not in module._non_persistent_buffers_set
            )
        if own:
            model._init_weights(module)
    if any(b.is_floating_point() and bool(b.isnan().any()) for b in lm.buffers()):
        # some models give a layer's buffers their values from outside the layer
        for model, module in every:
            model._init_weights(module)


def _initialised(model: Any, module: nn.Module) -> Iterator[tuple[Any, nn.Module]]:
    """Each module below `module` with the model in it that gives it its values: the nearest one."""
    from transformers import PreTrainedModel

    model = module if isinstance(module, PreTrainedModel) else model
    yield model, module
    for child in module.children():
        yield from _initialised(model, child)


def use_liger(lm: Any, device: str) -> None:
    """Replace layers of `lm` by Liger's fused ones.  Raises ConfigError where they are not
    installed or do not run.
    """
    if device != "cuda" or importlib.util.find_spec("liger_kernel") is None:
        why = (
            "liger-kernel is not installed"
            if device == "cuda"
            else f"its kernels run on GPUs, not on {device}"
        )
        raise ConfigError(f"{why}; write false", key="trainer.use_liger", given=True)
    importlib.import_module("liger_kernel.transformers")._apply_liger_kernel_to_instance(model=lm)


def materialise(model: nn.Module, device: torch.device | str, computes: torch.device | str) -> None:
    """Memory on `device`, without values, for every parameter that is on the meta device; others
    move there, buffers to `computes`.

    A parameter with two names stays one parameter.
    """
    made: dict[int, torch.Tensor] = {}

    def place(t: torch.Tensor) -> torch.Tensor:
        if not t.is_meta:
            # nothing brings buffers there for a pass
            return t.to(device if isinstance(t, nn.Parameter) else computes)
        if id(t) not in made:
            made[id(t)] = torch.empty_like(t, device=device)
        return made[id(t)]

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
    """Copy the weights of `lm` in `folder` into `names` and, where the files have them, into
    `buffers`.

    `tied`: other name -> name in `names` of the same tensor.  `fresh` gives first values to what
    may be missing. Raises SetupError naming tensors that are missing or have another shape, or
    files that cannot be read.
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
    lm: Any, files: Files, given: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """As `in_checkpoints`; with a prefix where `files` of the base have `lm` as a part of a whole,
    as those of Llama 4.
    """
    for name, tensor in in_checkpoints(lm, given):
        inside = f"{lm.base_model_prefix}.{name}"
        yield inside if name not in files and inside in files else name, tensor


def _parts(
    lm: Any, files: Files, name: str, shape: torch.Size, device: str
) -> dict[str, torch.Tensor]:
    """What `files` have instead of `name`: a tensor of another name, or of its first expert, by
    name which elements of a row each holds.

    Empty where there is nothing.
    """
    whole = torch.empty(shape, device="meta")
    every = dict(in_base(lm, files, [(name, whole)]))
    if not all(n in files and files.shape(n) == t.shape for n, t in every.items()):
        return {}
    if any(t is whole for t in every.values()):  # renamed, and nothing else
        return every
    row = torch.arange(math.prod(shape[1:]), device=device).view(1, *shape[1:])
    first = dict(in_base(lm, files, [(name, row)]))
    return first if {_of_expert(n, e) for n in first for e in range(shape[0])} == set(every) else {}


def _join(files: Files, parts: Mapping[str, torch.Tensor], into: torch.Tensor) -> set[str]:
    """Fill `into`, or the rows of it that this rank holds, from its `_parts`; the names of all of
    them.
    """
    mine = tensors.piece("", into)
    for name, at in parts.items():
        if at.shape == into.shape:
            files.fill(name, into)
            continue
        at = at.flatten().to(into.device)
        for expert, row in enumerate(mine.data, mine.first):
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
    """As `fill`, also where only transformers knows how to change what the files have: then all of
    them are loaded.
    """
    if readable(lm, names, tied, folder):
        fill(lm, names, buffers, tied, folder)
        return
    config = config_of(folder, trust_remote_code=trust, override={})
    found = pretrained(
        config, folder, trust_remote_code=trust, attn_implementation="eager"
    ).state_dict()
    with torch.no_grad():
        for name, into in {**names, **buffers}.items():
            part = tensors.piece(name, into)
            part.data.copy_(
                found[name][part.first : part.first + len(part.data)]
                if part.data.dim()
                else found[name]
            )


def readable(
    lm: Any, names: Mapping[str, torch.Tensor], tied: Mapping[str, str], folder: Path
) -> bool:
    """Whether the files hold the model's parameters under their own names, or expert by expert.
    Else transformers has to change them.
    """
    files = files_of(folder)
    other = {name: alias for alias, name in tied.items()}
    due = {n: t for n, t in names.items() if n not in files and other.get(n, n) not in files}
    return not due or all(
        n in files or _parts(lm, files, n, t.shape, "meta")
        for n, t in {**due, **saved_buffers(lm)}.items()
    )


def files_of(folder: Path) -> Files:
    """The safetensors files of a Hugging Face folder.  Raises SetupError where there are none, or
    they cannot be read.
    """
    try:
        return Files(modelfiles.files(folder))
    except (CheckpointInvalid, ValueError, KeyError, AttributeError) as e:
        raise SetupError(f"{folder}: its weights cannot be read: {e}") from e


def pretrained(
    config: Any, folder: Path, *, trust_remote_code: bool, attn_implementation: str
) -> Any:
    """The model as transformers loads it, whole, for files whose names it has to change.  Missing
    weights are refused.
    """
    from transformers import AutoModelForCausalLM

    with no_progress():
        try:
            lm, info = AutoModelForCausalLM.from_pretrained(
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
        f"{name} is {tuple(there)}, the model has {tuple(made)}"
        for name, there, made in sorted(info["mismatched_keys"])
    ]:
        raise SetupError(f"{folder}: {_some(other)}; config.json does not fit the weights")
    return lm


def _said(e: Exception) -> str:
    return textwrap.shorten(f"{type(e).__name__}: {e}", 400)


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


@contextmanager
def no_progress() -> Iterator[None]:
    """Without transformers' progress bars."""
    from transformers.utils import logging as hf

    shown = hf.is_progress_bar_enabled()
    hf.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            hf.enable_progress_bar()

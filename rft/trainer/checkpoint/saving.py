"""Save and load one rank's part of a checkpoint: its rows of weights and optimizer averages, and a
page of JSON.

Depends on models and optimizers, not on versions, manifests or the schedule of saving. Invariant:
`take` fixes the saved values, and `write` neither waits for other ranks nor reads the model, so
training may go on meanwhile.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import torch
import xxhash
from msgspec import Struct

from rft.algorithm.controller import Steered
from rft.errors import CheckpointInvalid
from rft.fault_injection import fault
from rft.trainer.checkpoint import shards
from rft.trainer.checkpoint.manifest import hash_of
from rft.trainer.model import loading, optim, sharding, tensors
from rft.trainer.model.lora import Adapter
from rft.trainer.model.policy import Policy
from rft.trainer.model.tensors import Files, Piece
from rft.trainer.settings import LearnerSettings
from rft.types import rotary

STATE = "state.json"
ADAPTERS = "adapters"  # contains a peft folder named like the adapter
PRETRAINED = "pretrained"  # config and tokenizer, so that a checkpoint is self-contained
OF_TOKENIZER = (
    "*token*.json",
    "*.jinja",
    "vocab.*",
    "merges.txt",
    "*.model",
    "tekken.json",
    "*.tiktoken",
    "*.py",
    "chat_template*",
    "*_templates/*.jinja",
)
OF_MODEL = ("config.json", "generation_config.json", "*processor_config.json", "*.py")


@dataclass(frozen=True)
class Trained:
    """A model with its optimizer.  `prefix` of file names: "" (policy) or "critic_"."""

    policy: Policy
    optimizer: torch.optim.Optimizer
    prefix: str = ""


class StatePage(Struct, kw_only=True):
    """Content of `state.json`: all state after `step` except tensors."""

    step: int
    updates: int
    seed: int
    contents: list[str]
    optimizer_type: str
    critic_optimizer_type: str
    optimizer: dict[str, dict[str, float]]  # scalars of the optimizers, by kind of file
    world_size: int
    steered: dict[str, Steered]  # by the names of `needs.controllers`
    base_path: str
    adapter: dict[str, Any] | None  # see `Adapter.page`


@dataclass(frozen=True)
class CheckpointState:
    """Content of one rank's files: pieces by kind, adapters with their values, and the page."""

    pieces: dict[str, list[Piece]]
    adapters: list[tuple[Adapter, dict[str, torch.Tensor]]]
    page: StatePage


def take(
    parts: Sequence[Trained],
    settings: LearnerSettings,
    step: int,
    *,
    copy: bool,
    steered: Mapping[str, Steered],
) -> CheckpointState:
    """Return the state after `step`; `copy`: a copy on the host, so that training may go on."""
    contents = settings.save_contents
    pieces: dict[str, list[Piece]] = {}
    adapters = []
    for part in parts:
        names = part.policy.trainable()
        if "model" in contents and (adapter := part.policy.adapter) is not None:
            # an adapter is small: one file, in the format of peft
            adapters.append((adapter, adapter.gathered()))
        elif "model" in contents or part.prefix:  # a Hugging Face folder contains no critic
            weights = {**names, **part.policy.saved_buffers()}
            pieces[f"{part.prefix}model"] = shards.local_pieces(weights, copy=copy)
        if "optimizer" in contents and (averages := optim.moments(part.optimizer, names)):
            pieces[f"{part.prefix}optimizer"] = shards.local_pieces(averages, copy=copy)
    numbers = {part.prefix: optim.numbers(part.optimizer) for part in parts}
    policy_adapter = parts[0].policy.adapter
    page = StatePage(
        step=step,
        updates=int(numbers[""].get("step", 0)),
        seed=settings.seed,
        contents=[c for c in contents if c != "hf_model"],
        optimizer_type=settings.optim.optimizer_type,
        critic_optimizer_type=settings.critic.optim.optimizer_type,
        optimizer={f"{prefix}optimizer": values for prefix, values in numbers.items()},
        world_size=settings.world_size,
        steered=dict(steered),
        base_path=settings.model_path,
        adapter=None if policy_adapter is None else policy_adapter.page(),
    )
    return CheckpointState(pieces, adapters, page)


def write(
    state: CheckpointState, folder: Path, settings: LearnerSettings, rank: int
) -> dict[str, str]:
    """Write this rank's files into `folder`; return their hashes by name inside it."""
    folder.mkdir(parents=True, exist_ok=True)
    hashes: dict[str, str] = {}
    for kind, pieces in state.pieces.items():
        hashes |= shards.write(folder, kind, pieces, step=state.page.step)
        fault("checkpoint.files")
    if rank == 0:
        page = msgspec.json.format(msgspec.json.encode(state.page), indent=1)
        hashes[STATE] = _put(folder / STATE, page)
        files = side_files(settings, folder / PRETRAINED)
        for adapter, values in state.adapters:
            files += adapter.write(folder / ADAPTERS / adapter.settings.name, values)
        hashes |= {str(path.relative_to(folder)): hash_of(path) for path in files}
    return hashes


def read_page(folder: Path) -> StatePage:
    """Read `state.json`.  Raises CheckpointInvalid naming the file if it cannot be read."""
    path = folder / STATE
    try:
        return msgspec.json.decode(path.read_bytes(), type=StatePage)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as e:
        raise CheckpointInvalid(f"{path}: {e}") from e


def load(parts: Sequence[Trained], settings: LearnerSettings, folder: Path) -> None:
    """Restore a state that any number of ranks wrote.

    Raises CheckpointInvalid naming the file that does not fit.
    """
    page = read_page(folder)
    contents = settings.load_contents or ("model", "optimizer")
    kinds = shards.kinds(folder)
    for part in parts:
        names = part.policy.trainable()
        if "model" in contents:
            _load_model(folder, part, names, page, settings)
        if "optimizer" not in contents:
            continue
        kind = f"{part.prefix}optimizer"
        if kind in kinds:
            current = settings.critic.optim if part.prefix else settings.optim
            saved = page.critic_optimizer_type if part.prefix else page.optimizer_type
            place = f"{folder / STATE}{', critic' if part.prefix else ''}"
            optim.check_type(saved, current.optimizer_type, place)
            optim.restore(part.optimizer, names, shards.find(folder, kind), page.optimizer[kind])
        elif page.updates and settings.load_contents is not None:
            raise CheckpointInvalid(
                f"{folder}: holds no optimizer state; take optimizer out of "
                f"trainer.checkpoint.load_contents"
            )


def _load_model(
    folder: Path,
    part: Trained,
    names: Mapping[str, torch.Tensor],
    page: StatePage,
    settings: LearnerSettings,
) -> None:
    policy = part.policy
    if policy.adapter is not None:
        policy.adapter.check_page(page.adapter, str(folder / STATE))
        policy.adapter.load(folder / ADAPTERS / policy.adapter.settings.name)
        return
    if page.adapter is not None and not part.prefix:
        raise CheckpointInvalid(
            f"{folder / STATE}: the checkpoint holds the adapter {page.adapter.get('name')} of "
            f"{page.adapter.get('base_path')}, and no whole model; write its model.lora_configs"
        )
    kind = f"{part.prefix}model"
    buffers = policy.saved_buffers()
    if kind not in shards.kinds(folder):
        if part.prefix:
            raise CheckpointInvalid(
                f"{folder}: holds no critic: it was saved without one.  Begin with its exported "
                f"model (model.model_path), not with resume_from_path"
            )
        if (exported := folder.parent / "huggingface").is_dir():
            loading.fill_from(
                policy.lm,
                names,
                buffers,
                policy.tied(),
                exported,
                trust=settings.trust_remote_code,
            )
            return
    files = shards.find(folder, kind)
    with torch.no_grad():
        tensors.fill(files, {**names, **{n: b for n, b in buffers.items() if n in files}})


def export(
    policy: Policy,
    gathered: Iterable[tuple[str, torch.Tensor]],
    settings: LearnerSettings,
    folder: Path,
    rank: int,
) -> None:
    """Write `policy` as a Hugging Face folder, in the base model's dtype.  Rank 0 writes."""
    base = Path(settings.model_path)
    if rank == 0:
        side_files(settings, folder)
    dtype = config_dtype(base)
    specs = {n: torch.empty(p.shape, dtype=dtype, device="meta") for n, p in policy.names().items()}
    specs |= {n: torch.empty_like(b, device="meta") for n, b in policy.saved_buffers().items()}
    files = loading.files_of(base)
    target = folder if rank == 0 else None
    write_model(target, policy.lm, files, specs, gathered, policy.tied())


def config_dtype(folder: Path) -> torch.dtype:
    """Return the dtype that config.json names; float32 if it names none."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    name = str(config.get("dtype") or config.get("torch_dtype"))
    return sharding.DTYPES.get(name, torch.float32)


def write_model(
    folder: Path | None,
    lm: Any,
    base: Files,
    specs: Mapping[str, torch.Tensor],
    weights: Iterable[tuple[str, torch.Tensor]],
    tied: Collection[str],
) -> None:
    """Write `weights`, with the dtypes and shapes of `specs`, under the names of `base`.

    Tensors that only `base` has (vision towers, MTP layers) are copied from it, unless the names of
    `base` differ.  Folder None: gather the weights, write nothing.
    """
    renamed = dict(loading.in_base(lm, base, specs.items()))
    weights = loading.in_base(lm, base, weights)
    if folder is not None and set(renamed) <= set(base):
        prefix = f"{lm.base_model_prefix}."
        written = {*renamed, *tied}
        extra = [n for n in base if n not in written and n.removeprefix(prefix) not in tied]
        renamed |= {
            n: torch.empty(base.shape(n), dtype=base.dtype(n), device="meta") for n in extra
        }
        weights = chain(weights, ((n, base.read(n)) for n in extra))
    write_file(folder, renamed, weights)


def write_file(
    folder: Path | None,
    specs: Mapping[str, torch.Tensor],
    weights: Iterable[tuple[str, torch.Tensor]],
) -> None:
    """Write one model.safetensors."""
    path = None if folder is None else folder / "model.safetensors"
    tensors.write(path, {n: (t.dtype, t.shape) for n, t in specs.items()}, weights)


def side_files(settings: LearnerSettings, target: Path) -> list[Path]:
    """Copy the base model's config, with `override_config`, and the run's tokenizer and chat
    template; return the files in `target`.
    """
    source = Path(settings.model_path)
    target.mkdir(parents=True, exist_ok=True)
    for folder, names in (
        (Path(settings.tokenizer_path or source), OF_TOKENIZER),
        (source, OF_MODEL),
    ):
        for path in (p for pattern in names for p in folder.glob(pattern)):
            (into := target / path.relative_to(folder)).parent.mkdir(exist_ok=True)
            shutil.copyfile(path, into)
    if settings.chat_template is not None:
        shutil.rmtree(target / "additional_chat_templates", ignore_errors=True)
        _put(target / "chat_template.jinja", settings.chat_template.encode())
    if settings.override_config:
        config = json.loads((target / "config.json").read_text(encoding="utf-8"))
        _put(
            target / "config.json",
            json.dumps(rotary.replaced(config, settings.override_config), indent=2).encode(),
        )
    return sorted(p for p in target.rglob("*") if p.is_file())


def _put(path: Path, data: bytes) -> str:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return xxhash.xxh3_128_hexdigest(data)

"""What one rank puts into a checkpoint and takes out of it: its rows of weights and optimizer
averages, and a page of JSON.

Knows models and optimizers; not versions, manifests or which step is saved when.
Invariant: `take` fixes what is saved, `write` neither waits for other ranks nor reads the model, so
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

import torch
import xxhash

from rft.errors import CheckpointInvalid
from rft.fault_injection import fault
from rft.trainer import loading, optim, sharding, shards, tensors
from rft.trainer.lora import Adapter
from rft.trainer.manifest import hash_of
from rft.trainer.policy import Policy
from rft.trainer.settings import LearnerSettings
from rft.trainer.tensors import Files, Piece
from rft.types import rotary

STATE = "state.json"
ADAPTERS = "adapters"  # holds a folder, named like the adapter, that peft reads
PRETRAINED = "pretrained"  # config and tokenizer, so that a checkpoint explains itself
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
    """A model with its optimizer.  `prefix` of its files: "" for the policy, "critic_" for the
    critic.
    """

    policy: Policy
    optimizer: torch.optim.Optimizer
    prefix: str = ""


@dataclass(frozen=True)
class CheckpointState:
    """What this rank writes: pieces by kind, whole adapters, and the page."""

    step: int
    pieces: dict[str, list[Piece]]
    adapters: list[tuple[Adapter, dict[str, torch.Tensor]]]
    page: dict[str, Any]


def take(
    parts: Sequence[Trained],
    settings: LearnerSettings,
    step: int,
    *,
    copy: bool,
    kl_coefs: Mapping[str, float],
) -> CheckpointState:
    """The state after `step`.  `copy`: on the host, so that it stays as it is while training goes
    on.

    `kl_coefs`: factors of the KL terms in the next step.
    """
    pieces: dict[str, list[Piece]] = {}
    adapters = []
    for part in parts:
        names = part.policy.trainable()
        adapter = part.policy.adapter
        if "model" in settings.save_contents and adapter is not None:
            # small, so all of it goes into one file, which peft reads
            adapters.append((adapter, adapter.whole()))
        elif (
            "model" in settings.save_contents or part.prefix
        ):  # a Hugging Face folder holds no critic
            pieces[f"{part.prefix}model"] = shards.take(
                {**names, **part.policy.saved_buffers()}, copy=copy
            )
        if "optimizer" in settings.save_contents and (
            averages := optim.moments(part.optimizer, names)
        ):
            pieces[f"{part.prefix}optimizer"] = shards.take(averages, copy=copy)
    numbers = {part.prefix: optim.numbers(part.optimizer) for part in parts}
    page = {
        "step": step,
        "updates": int(numbers[""].get("step", 0)),
        "seed": settings.seed,
        "contents": [c for c in settings.save_contents if c != "hf_model"],
        "optimizer_type": settings.optim.optimizer_type,
        "critic_optimizer_type": settings.critic.optim.optimizer_type,
        "optimizer": {f"{prefix}optimizer": values for prefix, values in numbers.items()},
        "world_size": settings.world_size,
        "kl_coefs": dict(kl_coefs),
        "base_path": settings.model_path,
        "adapter": None if (adapter := parts[0].policy.adapter) is None else adapter.page(),
    }
    return CheckpointState(step, pieces, adapters, page)


def write(
    taken: CheckpointState, folder: Path, settings: LearnerSettings, rank: int
) -> dict[str, str]:
    """Write this rank's files into `folder`; returns their hashes by name inside it."""
    folder.mkdir(parents=True, exist_ok=True)
    written: dict[str, str] = {}
    for kind, pieces in taken.pieces.items():
        written |= shards.write(folder, kind, pieces, step=taken.step)
        fault("checkpoint.files")
    if rank == 0:
        for adapter, values in taken.adapters:
            for path in adapter.write(folder / ADAPTERS / adapter.settings.name, values):
                written[str(path.relative_to(folder))] = hash_of(path)
        written[STATE] = _put(folder / STATE, json.dumps(taken.page, indent=1).encode())
        for path in side_files(settings, folder / PRETRAINED):
            written[str(path.relative_to(folder))] = hash_of(path)
    return written


def read_page(folder: Path) -> dict[str, Any]:
    """What `state.json` says.  Raises CheckpointInvalid naming it where it cannot be read."""
    path = folder / STATE
    try:
        page = json.loads(path.read_text(encoding="utf-8"))
        return dict(page) | {"step": int(page["step"]), "updates": int(page["updates"])}
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise CheckpointInvalid(f"{path}: {e}") from e


def load(parts: Sequence[Trained], settings: LearnerSettings, folder: Path) -> None:
    """Go on from what any number of ranks has written.  Raises CheckpointInvalid naming the file
    that does not fit.
    """
    page = read_page(folder)
    wanted = settings.load_contents or ("model", "optimizer")
    there = shards.kinds(folder)
    for part in parts:
        names = part.policy.trainable()
        if "model" in wanted:
            _load_model(folder, part, names, page, settings)
        kind = f"{part.prefix}optimizer"
        if "optimizer" not in wanted or (kind not in there and settings.load_contents is None):
            continue  # nothing was updated yet, or it was not saved and not asked for
        if kind in there:
            mine = (settings.critic.optim if part.prefix else settings.optim).optimizer_type
            unsaid = mine if part.prefix else None  # older checkpoints do not say the critic's
            written = page.get(f"{part.prefix}optimizer_type", unsaid)
            optim.check_type(written, mine, f"{folder / STATE}{', critic' if part.prefix else ''}")
            values = page.get("optimizer", {}).get(kind, {"step": float(page["updates"])})
            optim.restore(part.optimizer, names, shards.find(folder, kind), values)
        elif page["updates"]:
            raise CheckpointInvalid(
                f"{folder}: holds no optimizer state; take optimizer out of "
                f"trainer.checkpoint.load_contents"
            )


def _load_model(
    folder: Path,
    part: Trained,
    names: Mapping[str, torch.Tensor],
    page: Mapping[str, Any],
    settings: LearnerSettings,
) -> None:
    if (adapter := part.policy.adapter) is not None:
        adapter.check_page(page.get("adapter"), str(folder / STATE))
        adapter.load(folder / ADAPTERS / adapter.settings.name)
        return
    if (there := page.get("adapter")) is not None and not part.prefix:
        raise CheckpointInvalid(
            f"{folder / STATE}: the checkpoint holds the adapter {there.get('name')} of "
            f"{there.get('base_path')}, and no whole model; "
            "write its model.lora_configs"
        )
    exported = folder.parent / "huggingface"
    if f"{part.prefix}model" not in shards.kinds(folder) and not part.prefix and exported.is_dir():
        policy = part.policy
        trust = settings.trust_remote_code
        loading.fill_from(
            policy.lm, names, policy.saved_buffers(), policy.tied(), exported, trust=trust
        )
        return
    if part.prefix and f"{part.prefix}model" not in shards.kinds(folder):
        why = (
            "holds no critic: it was saved without one.  Begin with its exported model "
            "(model.model_path), not with resume_from_path"
        )
        raise CheckpointInvalid(f"{folder}: {why}")
    files = shards.find(folder, f"{part.prefix}model")
    buffers = part.policy.saved_buffers()
    with torch.no_grad():
        tensors.fill(files, {**names, **{n: b for n, b in buffers.items() if n in files}})


def export(
    policy: Policy,
    gathered: Iterable[tuple[str, torch.Tensor]],
    settings: LearnerSettings,
    target: Path,
    rank: int,
) -> None:
    """A Hugging Face folder of all tensors of `policy`, which rank 0 writes: in its base's dtype,
    under the names of checkpoints.
    """
    config = json.loads((Path(settings.model_path) / "config.json").read_text(encoding="utf-8"))
    dtype = sharding.DTYPES.get(
        str(config.get("dtype") or config.get("torch_dtype")), torch.float32
    )
    if rank == 0:
        side_files(settings, target)
    due = {n: torch.empty(p.shape, dtype=dtype, device="meta") for n, p in policy.names().items()}
    due |= {n: torch.empty_like(b, device="meta") for n, b in policy.saved_buffers().items()}
    files = loading.files_of(Path(settings.model_path))
    specs = {n: (t.dtype, t.shape) for n, t in loading.in_base(policy.lm, files, due.items())}
    given = loading.in_base(policy.lm, files, gathered)
    if rank == 0:
        names = untrained(policy.lm, files, specs, policy.tied())
        specs |= {n: (files.dtype(n), torch.Size(files.shape(n))) for n in names}
        given = chain(given, ((n, files.read(n)) for n in names))
    tensors.write(target / "model.safetensors" if rank == 0 else None, specs, given)


def untrained(lm: Any, files: Files, trained: Collection[str], tied: Collection[str]) -> list[str]:
    """What `files` of the base hold beside `trained` and what is `tied` to it: towers for images,
    layers that foretell tokens.

    Nothing where `trained` has other names there.
    """
    known = set(trained) <= set(files)
    prefix = f"{lm.base_model_prefix}."
    return [
        n
        for n in files
        if known and n not in trained and not {n, n.removeprefix(prefix)} & set(tied)
    ]


def side_files(settings: LearnerSettings, target: Path) -> list[Path]:
    """Copy the base model's config, with `override_config`, and the tokenizer and chat template of
    the run; returns what is there now.
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

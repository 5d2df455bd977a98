"""Tensors of all ranks in one folder, one file per rank: `model-00001-of-00002.safetensors`, ...

Knows files and which rank holds what; not models or optimizers.  Nothing is gathered, neither to
write nor to read, and any number of ranks reads what any number wrote.  Invariant: the files of a
kind are those of one step, and together hold every row once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from rft.errors import CheckpointInvalid
from rft.trainer import tensors
from rft.trainer.tensors import Files, Piece

STEP = "rft_step"
_FILE = re.compile(r"(?P<kind>\w+)-(?P<part>\d{5})-of-(?P<count>\d{5})\.safetensors")


def take(given: Mapping[str, torch.Tensor], *, copy: bool) -> list[Piece]:
    """What this rank writes of `given`.  `copy`: on the host, apart from the tensors, which may
    then change.
    """
    found = [tensors.piece(name, t) for name, t in given.items() if tensors.owner(t)]
    return (
        [Piece(p.name, p.shape, p.first, p.data.to("cpu", copy=True)) for p in found]
        if copy
        else found
    )


def write(folder: Path, kind: str, pieces: Sequence[Piece], *, step: int) -> dict[str, str]:
    """Write this rank's file of `kind`; returns {its name: its hash}.  A rank that holds nothing
    writes a file without tensors.
    """
    rank, count = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    name = f"{kind}-{rank + 1:05d}-of-{count:05d}.safetensors"
    return {name: tensors.write_pieces(folder / name, pieces, {STEP: str(step)})}


def kinds(folder: Path) -> set[str]:
    """What kinds of tensors are in `folder`."""
    return {m["kind"] for p in folder.glob("*.safetensors") if (m := _FILE.fullmatch(p.name))}


def find(folder: Path, kind: str) -> Files:
    """The files of `kind`, which must be complete and of one step."""
    found = sorted(
        p
        for p in folder.glob(f"{kind}-*.safetensors")
        if (m := _FILE.fullmatch(p.name)) and m["kind"] == kind
    )
    if not found:
        raise CheckpointInvalid(f"{folder / kind}-*.safetensors: missing")
    match = _FILE.fullmatch(found[0].name)
    assert match is not None
    count = int(match["count"])
    due = [f"{kind}-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    if [p.name for p in found] != due:
        wrong = sorted(set(due) ^ {p.name for p in found})
        raise CheckpointInvalid(
            f"{folder / wrong[0]}: {'missing' if wrong[0] in due else 'is of another set of files'}"
        )
    files = Files(found)
    steps = {path: meta.get(STEP) for path, meta in files.metadata.items()}
    if len(set(steps.values())) > 1:
        path, step = next((p, s) for p, s in steps.items() if s != steps[found[0]])
        raise CheckpointInvalid(
            f"{path}: is of step {step}, {found[0].name} of step {steps[found[0]]}"
        )
    return files

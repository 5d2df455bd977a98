"""Store the tensors of all ranks in one folder, a file per rank:
`model-00001-of-00002.safetensors`, ...

Depends on files and the rank that owns each row, not on models or optimizers.  Nothing is gathered
for writing or reading, and any number of ranks reads files of any other number.  Invariant: the
files of a kind are of one step, and together contain every row once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from rft.errors import CheckpointInvalid
from rft.trainer.model import tensors
from rft.trainer.model.tensors import Files, Piece

STEP = "rft_step"
_FILE = re.compile(r"(?P<kind>\w+)-\d{5}-of-(?P<count>\d{5})\.safetensors")


def local_pieces(named: Mapping[str, torch.Tensor], *, copy: bool) -> list[Piece]:
    """Return this rank's pieces of the tensors; `copy`: independent copies on the host."""
    pieces = [tensors.piece(name, t) for name, t in named.items() if tensors.owner(t)]
    if not copy:
        return pieces
    copies = [replace(p, data=_on_host(p.data)) for p in pieces]
    if any(p.data.device.type == "cuda" for p in pieces):
        torch.cuda.synchronize()  # once, behind all copies
    return copies


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to host memory; from a GPU into pinned memory, behind the work that is queued."""
    if tensor.device.type == "cpu":
        return tensor.clone()
    target = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return target.copy_(tensor, non_blocking=True)


def write(folder: Path, kind: str, pieces: Sequence[Piece], *, step: int) -> dict[str, str]:
    """Write this rank's file of `kind`, possibly without tensors; return {file name: hash}."""
    rank, count = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    name = _file_name(kind, rank, count)
    return {name: tensors.write_pieces(folder / name, pieces, {STEP: str(step)})}


def kinds(folder: Path) -> set[str]:
    """Return the kinds of tensors in `folder`."""
    return {m["kind"] for p in folder.glob("*.safetensors") if (m := _FILE.fullmatch(p.name))}


def find(folder: Path, kind: str) -> Files:
    """Open the files of `kind`; raise CheckpointInvalid unless they are complete and of one step."""
    counts = {
        p.name: int(m["count"])
        for p in folder.glob(f"{kind}-*.safetensors")
        if (m := _FILE.fullmatch(p.name)) and m["kind"] == kind
    }
    if not counts:
        raise CheckpointInvalid(f"{folder / kind}-*.safetensors: missing")
    count = counts[min(counts)]
    complete = [_file_name(kind, rank, count) for rank in range(count)]
    for name in sorted({*complete} ^ {*counts}):
        problem = "missing" if name in complete else "is of another set of files"
        raise CheckpointInvalid(f"{folder / name}: {problem}")
    files = Files(folder / name for name in complete)
    first, *_ = steps = [files.metadata[path].get(STEP) for path in files.paths]
    for path, step in zip(files.paths, steps, strict=True):
        if step != first:
            raise CheckpointInvalid(
                f"{path}: is of step {step}, {files.paths[0].name} of step {first}"
            )
    return files


def _file_name(kind: str, rank: int, count: int) -> str:
    return f"{kind}-{rank + 1:05d}-of-{count:05d}.safetensors"

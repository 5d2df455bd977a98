"""Large sets of tensors as safetensors files, one tensor in memory at a time; sharded parameters filled with their own part only.

Knows the file format, not models.  Invariant: a file written here is fsynced, and readable by any safetensors library.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from rft.errors import CheckpointInvalid

_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64", torch.int64: "I64"}


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor, detached.  A collective where it is sharded."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part, sharing memory with it."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def write(
    path: Path | None,
    specs: Mapping[str, tuple[torch.dtype, Sequence[int]]],
    tensors: Iterable[tuple[str, torch.Tensor]],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write `tensors`, which must come in the order of `specs` (name: dtype, shape), converting each to its dtype.

    `path` None: take the tensors, write nothing (ranks that only help to gather).
    """
    if path is None:
        for _ in tensors:
            pass
        return
    header: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    offset = 0
    for name, (dtype, shape) in specs.items():
        size = torch.Size(shape).numel() * dtype.itemsize
        header[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    with path.open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for (name, (dtype, shape)), (given, tensor) in zip(specs.items(), tensors, strict=True):
            assert given == name and tuple(tensor.shape) == tuple(shape), (
                f"{given} {tuple(tensor.shape)} came where {name} {shape} was due"
            )
            data = tensor.to(device="cpu", dtype=dtype).contiguous()
            file.write(memoryview(data.view(-1).view(torch.uint8).numpy()))
        file.flush()
        os.fsync(file.fileno())


def fill(path: Path, into: Mapping[str, torch.Tensor]) -> None:
    """Copy each named tensor of the file, or this rank's part of it, into `into[name]`.

    Raises CheckpointInvalid, naming file and tensor, where names or shapes differ.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            if missing := sorted(set(into) ^ set(file.keys())):
                raise CheckpointInvalid(f"{path}: holds other tensors than this model, e.g. {missing[0]}; was the model changed?")
            for name, tensor in into.items():
                stored = file.get_slice(name)
                if tuple(stored.get_shape()) != tuple(tensor.shape):
                    raise CheckpointInvalid(f"{path}: {name} is {tuple(stored.get_shape())}, the model has {tuple(tensor.shape)}")
                local(tensor).copy_(stored[_part(tensor)] if tensor.ndim else file.get_tensor(name))
    except (SafetensorError, FileNotFoundError) as e:
        raise CheckpointInvalid(f"{path}: cannot be read as safetensors: {e}") from e


def _part(tensor: torch.Tensor) -> tuple[slice, ...]:
    """Which part of the full tensor this rank holds."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, n) for n in tensor.shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(o, o + n) for n, o in zip(shape, offset, strict=True))

"""Write and read large sets of tensors as safetensors files, in pieces: each rank only its own
rows.

Depends on the file format and how FSDP2 cuts a tensor (by rows), not on models.  A file may contain
some rows of a tensor; its metadata says which, so a set of files is self-describing. Invariant: a
file written here is fsynced and readable by any safetensors library; reading takes one buffer of
CHUNK bytes, no mapping.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from torch.distributed.tensor import DTensor, Shard

from rft.errors import CheckpointInvalid
from rft.types import modelfiles

CHUNK = 8 << 20
# metadata: JSON, tensor -> [first row, rows of the full tensor], for incomplete tensors
ROWS = "rft_rows"
_DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_BY_NAME = {name: dtype for dtype, name in _DTYPES.items()}


def full(
    tensor: torch.Tensor, dtype: torch.dtype | None = None, device: str | None = None
) -> torch.Tensor:
    """Return the full tensor, detached.  Collective if sharded.

    `dtype`, `device`: each rank converts and moves its part first, so that fewer bytes travel, over
    the links of that device.
    """
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor if dtype is None else tensor.to(dtype)
    if dtype is not None:
        tensor = DTensor.from_local(
            tensor.to_local().to(device=device, dtype=dtype),
            tensor.device_mesh,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
    return tensor.full_tensor()


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of `tensor`, sharing its memory."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True)
class Piece:
    """Rows `first` to `first` + len(data) of a tensor of shape `shape`.  A 0-d tensor is one piece."""

    name: str
    shape: tuple[int, ...]
    first: int
    data: torch.Tensor

    @property
    def complete(self) -> bool:
        return tuple(self.data.shape) == self.shape


def piece(name: str, tensor: torch.Tensor) -> Piece:
    """Return this rank's piece of `tensor`, sharing its memory."""
    return Piece(name, tuple(tensor.shape), _first_row(tensor), local(tensor))


def owner(tensor: torch.Tensor) -> bool:
    """Return whether this rank writes its part of `tensor` (copies on other ranks are not written)."""
    if not isinstance(tensor, DTensor):
        return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    at = tensor.device_mesh.get_coordinate()
    assert at is not None
    return (
        all(isinstance(p, Shard) or c == 0 for p, c in zip(tensor.placements, at, strict=True))
        and local(tensor).numel() > 0
    )


def _first_row(tensor: torch.Tensor) -> int:
    if not isinstance(tensor, DTensor) or tensor.ndim == 0:
        return 0
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    assert all(p.is_replicate() or p.is_shard(0) for p in tensor.placements), (
        f"cut by more than rows: {tensor.placements}"
    )
    _, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return int(offset[0])


# ---------------------------------------------------------------- writing


def write(
    path: Path | None,
    specs: Mapping[str, tuple[torch.dtype, Sequence[int]]],
    tensors: Iterable[tuple[str, torch.Tensor]],
    metadata: Mapping[str, str] | None = None,
) -> str:
    """Write `tensors`, in the order of `specs` (name: dtype, shape), converted to those dtypes;
    return the file's hash.

    `path` None: consume the tensors and write nothing (ranks that only take part in gathering).
    """
    if path is None:
        for _ in tensors:
            if torch.accelerator.is_available():
                # a collective's timeout starts when it is enqueued, and rank 0 may write slowly
                torch.accelerator.synchronize()
        return ""
    header: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    offset = 0
    for name, (dtype, shape) in specs.items():
        size = torch.Size(shape).numel() * dtype.itemsize
        header[name] = {
            "dtype": _DTYPES[dtype],
            "shape": list(shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    head = len(head).to_bytes(8, "little") + head
    digest = xxhash.xxh3_128(head)
    with path.open("wb") as file:
        file.write(head)
        for (name, (dtype, shape)), (tensor_name, tensor) in zip(
            specs.items(), tensors, strict=True
        ):
            assert tensor_name == name and tuple(tensor.shape) == tuple(shape), (
                f"{tensor_name} {tuple(tensor.shape)} came where {name} {shape} was due"
            )
            data = (
                tensor.to(device="cpu", dtype=dtype).contiguous().view(-1).view(torch.uint8).numpy()
            )
            digest.update(data)
            file.write(data)
            # start writing to the disk at once
            os.posix_fadvise(
                file.fileno(), file.tell() - len(data), len(data), os.POSIX_FADV_DONTNEED
            )
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def write_pieces(
    path: Path, pieces: Sequence[Piece], metadata: Mapping[str, str] | None = None
) -> str:
    """Write `pieces` to one file, in their own dtypes; return its hash."""
    rows = {p.name: [p.first, p.shape[0]] for p in pieces if not p.complete}
    specs = {p.name: (p.data.dtype, tuple(p.data.shape)) for p in pieces}
    return write(
        path,
        specs,
        ((p.name, p.data) for p in pieces),
        {**(metadata or {}), **({ROWS: json.dumps(rows)} if rows else {})},
    )


# ---------------------------------------------------------------- reading


@dataclass(frozen=True)
class _Extent:
    """Rows of one tensor in a file, starting at byte `at`."""

    path: Path
    at: int
    first: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class Files:
    """Tensors in a set of safetensors files, complete or in pieces.

    The constructor reads headers only; `fill` and `read` read data. Raises CheckpointInvalid,
    naming the file, for invalid safetensors or files that do not fit together.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self.paths = tuple(paths)
        self.metadata: dict[Path, dict[str, str]] = {}
        self._pieces: dict[str, list[_Extent]] = {}
        self._rows: dict[str, int] = {}
        for path in self.paths:
            self._index(path)
        for name, extents in self._pieces.items():
            extents.sort(key=lambda s: s.first)
            self._check_whole(name, extents)

    def _index(self, path: Path) -> None:
        header, base = modelfiles.header(path)
        size = path.stat().st_size
        meta = header.pop("__metadata__", None) or {}
        self.metadata[path] = meta
        try:
            rows = json.loads(meta.get(ROWS, "{}"))
            for name, about in header.items():
                dtype = _BY_NAME[about["dtype"]]
                shape = tuple(int(n) for n in about["shape"])
                begin, end = about["data_offsets"]
                if (
                    end - begin != math.prod(shape) * dtype.itemsize
                    or not 0 <= begin <= end <= size - base
                ):
                    raise ValueError(f"{name} does not have the bytes that its shape needs")
                first, count = rows.get(name, (0, shape[0] if shape else 1))
                if self._rows.setdefault(name, count) != count:
                    raise ValueError(
                        f"{name} has {count} rows here and {self._rows[name]} in another file"
                    )
                self._pieces.setdefault(name, []).append(
                    _Extent(path, base + begin, first, shape, dtype)
                )
        except (KeyError, TypeError, ValueError) as e:
            raise CheckpointInvalid(f"{path}: cannot be read as safetensors: {e}") from e

    def _check_whole(self, name: str, extents: list[_Extent]) -> None:
        due = 0
        for s in extents:
            if s.first != due or s.shape[1:] != extents[0].shape[1:]:
                raise CheckpointInvalid(
                    f"{s.path}: has row {s.first} of {name} where row {due} is due; files of two "
                    f"checkpoints?"
                )
            due += s.shape[0] if s.shape else 1
        if due != self._rows[name]:
            raise CheckpointInvalid(
                f"{extents[-1].path.parent}: {due} of {self._rows[name]} rows of {name}; a file is "
                f"missing"
            )

    def __contains__(self, name: str) -> bool:
        return name in self._pieces

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def shape(self, name: str) -> tuple[int, ...]:
        shape = self._pieces[name][0].shape
        return (self._rows[name], *shape[1:]) if shape else ()

    def dtype(self, name: str) -> torch.dtype:
        return self._pieces[name][0].dtype

    def fill(self, name: str, into: torch.Tensor) -> None:
        """Copy tensor `name`, or this rank's rows of it, into `into`, converting to its dtype."""
        if self.shape(name) != tuple(into.shape):
            path = self._pieces[name][0].path
            raise CheckpointInvalid(
                f"{path}: {name} is {self.shape(name)}, the model has {tuple(into.shape)}"
            )
        part = piece(name, into)
        if part.data.numel():
            self._copy(name, part.first, part.data)

    def read(self, name: str) -> torch.Tensor:
        """Return the full tensor, in its stored dtype."""
        tensor = torch.empty(self.shape(name), dtype=self.dtype(name))
        self._copy(name, 0, tensor)
        return tensor

    def _copy(self, name: str, first: int, into: torch.Tensor) -> None:
        """Copy rows `first`, ... of tensor `name` into `into`, which is contiguous."""
        flat = into.view(-1)
        width = math.prod(into.shape[1:])  # elements of a row
        rows = into.shape[0] if into.ndim else 1
        for s in self._pieces[name]:
            begin = max(first, s.first)
            end = min(first + rows, s.first + (s.shape[0] if s.shape else 1))
            if begin < end:
                _stream(
                    s,
                    (begin - s.first) * width,
                    flat[(begin - first) * width : (end - first) * width],
                )


def _stream(stored: _Extent, start: int, into: torch.Tensor) -> None:
    """Read elements from `start` on into a flat tensor, chunk by chunk."""
    size = stored.dtype.itemsize
    buffer = bytearray(min(CHUNK, into.numel() * size))
    with stored.path.open("rb", buffering=0) as file:
        file.seek(stored.at + start * size)
        for at in range(0, into.numel(), CHUNK // size):
            count = min(CHUNK // size, into.numel() - at)
            view = memoryview(buffer)[: count * size]
            got = 0
            while got < len(view):
                n = file.readinto(view[got:])
                if not n:
                    raise CheckpointInvalid(f"{stored.path}: ends too early")
                got += n
            into[at : at + count].copy_(torch.frombuffer(buffer, dtype=stored.dtype, count=count))


def fill(files: Files, into: Mapping[str, torch.Tensor]) -> None:
    """Copy each named tensor, or this rank's part of it, into `into[name]`.

    Raises CheckpointInvalid, naming a file and a tensor, if names or shapes differ.
    """
    if missing := sorted(set(into) ^ set(files)):
        where = files.paths[0].parent if len(files.paths) > 1 else files.paths[0]
        raise CheckpointInvalid(
            f"{where}: holds other tensors than this model, e.g. {missing[0]}; was the model "
            f"changed?"
        )
    for name, tensor in into.items():
        files.fill(name, tensor)

"""Reading published weights: raw little-endian bytes at the offsets a manifest gives.  Shared by all engines.

Does not know who wrote them or how they travel.  The file is mapped, not read: views cost no copy, and what is changed through a view
never reaches the file.  `verify` needs no torch.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import xxhash

from rft.types.ports import TensorSpec, WeightManifest

if TYPE_CHECKING:
    import torch

THREADS = min(4, os.cpu_count() or 1)
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}


class MappedWeights:
    """A manifest's bytes, mapped privately into this process.  Views keep the mapping alive; there is nothing to close."""

    def __init__(self, manifest: WeightManifest) -> None:
        self.manifest = manifest
        with open(manifest.path, "rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        self._bytes = memoryview(self._map)

    def __len__(self) -> int:
        return len(self._bytes)

    def raw(self, spec: TensorSpec) -> memoryview:
        """The bytes of one tensor, writable without touching the file."""
        return self._bytes[spec.offset : spec.offset + spec.nbytes]

    def tensor(self, spec: TensorSpec) -> torch.Tensor:
        """A view of `spec.shape`; raises ValueError where the manifest does not fit the bytes."""
        if why := _misfit(spec, len(self)):
            raise ValueError(f"tensor {spec.name!r}: {why}")
        import torch

        dtype = _torch_dtype(spec.dtype)
        if spec.nbytes == 0:
            return torch.empty(spec.shape, dtype=dtype)
        return torch.frombuffer(self.raw(spec), dtype=dtype).view(spec.shape)

    def bad(self) -> tuple[str, ...]:
        """Names of the tensors whose bytes are not what the manifest says (xxh3-128, size, place)."""

        def wrong(t: TensorSpec) -> bool:
            return bool(_misfit(t, len(self))) or xxhash.xxh3_128_hexdigest(self.raw(t)) != t.xxh3_128

        with ThreadPoolExecutor(THREADS, thread_name_prefix="verify") as pool:
            return tuple(
                t.name for t, bad in zip(self.manifest.tensors, pool.map(wrong, self.manifest.tensors), strict=True) if bad
            )


def open_weights(manifest: WeightManifest) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, view) of every tensor, in the manifest's order; tied tensors come once.  Does not check hashes, see `verify`."""
    mapped = MappedWeights(manifest)
    for spec in manifest.tensors:
        yield spec.name, mapped.tensor(spec)


def verify(manifest: WeightManifest) -> tuple[str, ...]:
    """Names of the tensors whose bytes do not have the hash the manifest gives; empty = whole."""
    return MappedWeights(manifest).bad()


def _misfit(spec: TensorSpec, size: int) -> str:
    if spec.dtype not in ITEM_BYTES:
        return f"dtype {spec.dtype!r} is none of {', '.join(ITEM_BYTES)}"
    count = 1
    for n in spec.shape:
        count *= n
    if count * ITEM_BYTES[spec.dtype] != spec.nbytes:
        return f"{spec.nbytes} bytes for shape {spec.shape} of {spec.dtype}"
    if spec.offset < 0 or spec.offset + spec.nbytes > size:
        return f"bytes [{spec.offset}, {spec.offset + spec.nbytes}) lie outside the {size} bytes of the file"
    return ""


def _torch_dtype(name: str) -> torch.dtype:
    import torch

    return {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "I64": torch.int64,
        "I32": torch.int32,
        "I16": torch.int16,
        "I8": torch.int8,
        "U8": torch.uint8,
        "BOOL": torch.bool,
    }[name]

"""Read published weights: raw little-endian bytes at the offsets of a manifest.  Shared by all
engines.

Independent of the publisher.  A file is mapped, not read: views are no copies, and changes through
a view never reach the file, except that a GPU's engine shares the trainer's memory.  Broadcast bytes
are received into memory of this process.
"""

from __future__ import annotations

import math
import mmap
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import xxhash
from msgspec.structs import replace

from rft.errors import WeightSyncFailed
from rft.fault_injection import SYNC_POINTS, fault
from rft.plugins import REGISTRY
from rft.types.ids import Version
from rft.types.ports import LoadReport, TensorSpec, WeightManifest

if TYPE_CHECKING:
    import torch

    from rft.collective.broadcast import Bucket, Worker
    from rft.engine.adapter_layers import AdapterLoader

THREADS = min(4, os.cpu_count() or 1)
_PLACES = 3  # of a trainer: without releases three rotate
DTYPES = {  # name in a manifest: (torch's name, bytes)
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}


class Weights:
    """A manifest and its bytes in this process.  Views keep the bytes alive; nothing needs closing."""

    def __init__(self, manifest: WeightManifest, data: memoryview) -> None:
        self.manifest = manifest
        self._bytes = data
        self._flat: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self._bytes)

    def raw(self, spec: TensorSpec) -> memoryview:
        """Return the bytes of one tensor; writes do not reach the file."""
        return self._bytes[spec.offset : spec.offset + spec.nbytes]

    def tensor(self, spec: TensorSpec) -> torch.Tensor:
        """Return a view of `spec.shape`; all tensors share one storage.  Raises ValueError if the
        manifest does not fit the bytes.
        """
        if problem := _misfit(spec, len(self)):
            raise ValueError(f"tensor {spec.name!r}: {problem}")
        import torch

        dtype: torch.dtype = getattr(torch, DTYPES[spec.dtype][0])
        if spec.nbytes == 0:
            return torch.empty(spec.shape, dtype=dtype)
        if self._flat is None:
            self._flat = torch.frombuffer(self._bytes, dtype=torch.uint8)
        return self._flat[spec.offset : spec.offset + spec.nbytes].view(dtype).view(spec.shape)

    def bad(self, tensors: tuple[TensorSpec, ...] | None = None) -> tuple[str, ...]:
        """Return the names of `tensors` (default: all) whose bytes do not match the manifest
        (xxh3-128, size, offset).
        """
        chosen = self.manifest.tensors if tensors is None else tensors

        def wrong(t: TensorSpec) -> bool:
            return (
                bool(_misfit(t, len(self))) or xxhash.xxh3_128_hexdigest(self.raw(t)) != t.xxh3_128
            )

        if len(chosen) == 1:
            return (chosen[0].name,) if wrong(chosen[0]) else ()
        with ThreadPoolExecutor(THREADS, thread_name_prefix="verify") as pool:
            return tuple(
                t.name for t, bad in zip(chosen, pool.map(wrong, chosen), strict=True) if bad
            )


class MappedWeights(Weights):
    """A manifest's bytes, mapped privately into this process."""

    def __init__(self, manifest: WeightManifest) -> None:
        with open(manifest.path, "rb") as file:
            mapped = mmap.mmap(
                file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
            )
        super().__init__(manifest, memoryview(mapped))


class PinnedPlaces:
    """The places of a trainer's versions in memory, each mapped and pinned once, so that a GPU of
    this process copies from them directly.

    A private mapping cannot be pinned without a copy of it, so these bytes are the trainer's own:
    nothing may be written to them.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[str, int, int], torch.Tensor] = {}  # by path, inode and size
        self._refused = False

    def bytes_of(self, path: str) -> memoryview | None:
        """Return the bytes of a place; None in a process without a GPU, or if it refuses."""
        import torch

        from rft.collective import pinned

        if self._refused or not torch.cuda.is_initialized():
            return None
        with open(path, "r+b") as file:
            stat = os.fstat(file.fileno())
            place = (path, stat.st_ino, stat.st_size)
            memory = self._held.pop(place, None)
            if memory is None:
                memory = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
                self._refused = not pinned.pin(memory)
        if self._refused:
            return None
        self._held[place] = memory
        while len(self._held) > _PLACES:
            pinned.unpin(self._held.pop(next(iter(self._held))))
        return memoryview(memory.numpy().data)


@dataclass(frozen=True)
class TakenWeights:
    """A version's bytes, and the report on them before use."""

    weights: Weights
    report: LoadReport  # of a load that has done nothing yet; the load must stop unless `intact`


class WeightIntake:
    """Receives versions for one engine worker; `worker` is its number in its engine."""

    def __init__(self, worker: int = 0) -> None:
        self._worker = worker
        self._places = PinnedPlaces()
        self._member: Worker | None = None  # keeps its process group between broadcasts
        # the last broadcast version, to which later broadcasts may send only changes
        self._buffer: torch.Tensor | None = None
        self._holds = ""  # version in `_buffer`, complete and verified; "" = none

    def take(self, manifest: WeightManifest, *, damage: bool = False) -> TakenWeights:
        """Return the bytes of `manifest` with every hash checked.  `damage` flips a bit (a test
        fault).

        Raises OSError if the path cannot be read.
        """
        nothing = LoadReport(version=manifest.version, num_tensors=0, nbytes=0)
        if manifest.broadcast is not None:
            return self._receive(manifest, nothing, damage)
        began = time.monotonic()
        if ":" in manifest.transport:
            weights, problem = _fetched(manifest)
            if problem:
                return TakenWeights(weights, replace(nothing, failed=problem))
        else:
            # damage must not reach other engines
            memory = manifest.transport == "memory" and not damage
            place = self._places.bytes_of(manifest.path) if memory else None
            weights = MappedWeights(manifest) if place is None else Weights(manifest, place)
        transferred = time.monotonic()
        if damage:
            weights.raw(manifest.tensors[0])[0] ^= 1
        bad = weights.bad()
        times = {"transfer_s": transferred - began, "verify_s": time.monotonic() - transferred}
        return TakenWeights(
            weights, replace(nothing, bad_hash=bad, moved_bytes=manifest.nbytes, **times)
        )

    def _receive(self, manifest: WeightManifest, nothing: LoadReport, damage: bool) -> TakenWeights:
        from rft.collective.broadcast import NONE, Worker

        assert manifest.broadcast is not None
        memory = _room(manifest, self._buffer)
        holds = self._holds if memory is self._buffer else ""
        # no version until all bytes are verified
        self._buffer = memory if manifest.broadcast.changes else None
        self._holds = ""
        weights = Weights(manifest, memoryview(memory.numpy().data))
        self._member = self._member or Worker()
        bad: list[str] = [t.name for t in manifest.tensors if not t.nbytes and weights.bad((t,))]
        verify_s = 0.0

        def arrived(bucket: Bucket) -> None:
            nonlocal verify_s, damage
            fault("sync.received")
            began = time.monotonic()
            if damage:
                weights.raw(bucket.tensors[0])[0] ^= 1
                damage = False
            bad.extend(weights.bad(bucket.tensors))
            verify_s += time.monotonic() - began

        try:
            meeting_s, rest_s, moved = self._member.receive(
                manifest, self._worker, memory, holds or NONE, arrived
            )
        except WeightSyncFailed as e:
            return TakenWeights(weights, replace(nothing, failed=str(e)))
        if not bad:
            self._holds = str(manifest.version.published)
        times = {
            "meeting_s": meeting_s,
            "transfer_s": max(0.0, rest_s - verify_s),
            "verify_s": verify_s,
        }
        return TakenWeights(
            weights, replace(nothing, bad_hash=tuple(bad), moved_bytes=moved, **times)
        )

    def close(self) -> None:
        if self._member is not None:
            self._member.close()


class Loader(ABC):
    """Loads published versions into an existing model, and verifies each load.

    Invariant: weights that are damaged, incomplete or of another model never touch the model.
    """

    def __init__(self, worker: int = 0) -> None:
        self._intake = WeightIntake(worker)

    def load(self, manifest: WeightManifest) -> LoadReport:
        """Receive, verify and load a version, then compare the model with the published tensors."""
        import torch

        start = time.monotonic()
        active = {point for point in SYNC_POINTS if fault(point)}
        with torch.no_grad():
            report = self._load(manifest, active)
        if "sync.wrong_version" in active:
            report = replace(
                report, version=Version(report.version.lineage, report.version.step + 1)
            )
        return replace(report, load_s=time.monotonic() - start)

    def _load(self, manifest: WeightManifest, active: set[str]) -> LoadReport:
        taken = self._intake.take(manifest, damage="sync.corrupt_byte" in active)
        nothing = taken.report
        if not nothing.intact:
            return nothing
        tensors = {t.name: taken.weights.tensor(t) for t in manifest.tensors}
        if "sync.missing_tensor" in active:
            tensors.popitem()
        if manifest.adapter is not None:
            return self.adapter().load(tensors, manifest, active, nothing)
        placed, missing, unexpected = self.place(tensors)
        if missing or unexpected:
            return replace(nothing, missing=missing, unexpected=unexpected)
        complete = replace(nothing, num_tensors=len(tensors), nbytes=manifest.nbytes)
        if "sync.skip" in active:  # the fault also reports successful probes
            return replace(complete, probed_layers=len(tensors))
        self.copy(tensors, placed, stale="sync.stale_head" in active)
        loaded = time.monotonic()
        count, error, where = self.probe(placed, manifest)
        return replace(
            complete,
            probed_layers=count,
            probe_error=error,
            probe_worst=where,
            probe_s=time.monotonic() - loaded,
        )

    @abstractmethod
    def adapter(self) -> AdapterLoader[Any]:
        """Return the model's adapter, the same object at every load."""

    @abstractmethod
    def place(
        self, tensors: dict[str, torch.Tensor]
    ) -> tuple[Any, tuple[str, ...], tuple[str, ...]]:
        """Return (tensors for `probe`, missing names, unexpected names)."""

    @abstractmethod
    def copy(self, tensors: dict[str, torch.Tensor], placed: Any, *, stale: bool) -> None:
        """Overwrite the model's weights; `placed`: result of `place`.

        `stale` (a test fault): leave the output layer's computation unchanged.
        """

    @abstractmethod
    def probe(self, placed: Any, manifest: WeightManifest) -> tuple[int, float, str]:
        """Return (layers probed, largest error relative to the output's scale, layer of that
        error).
        """

    def close(self) -> None:
        self._intake.close()


def in_checkpoints(
    model: Any, tensors: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors of transformers' `model` under checkpoint names; a tensor of all experts of a
    layer becomes one tensor per expert.

    Tensors are views of the same bytes, yielded one by one.  Other programs know only these names.
    """
    from transformers.core_model_loading import revert_weight_conversion

    for name, tensor in tensors:
        yield from revert_weight_conversion(model, {name: tensor}).items()


def saved_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the persistent buffers by name, e.g. correction biases of routers."""
    return {
        f"{prefix}{'.' if prefix else ''}{name}": buffer
        for prefix, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }


def _fetched(manifest: WeightManifest) -> tuple[Weights, str]:
    """Fetch the bytes with a transport plugin; return (weights, error text, empty on success)."""
    try:
        data = memoryview(REGISTRY.get("transport", manifest.transport).obj.fetch(manifest))
    except Exception as e:  # a plugin's error fails only this version, not the engine
        return Weights(
            manifest, memoryview(b"")
        ), f"{manifest.transport} could not fetch {manifest.version}: {type(e).__name__}: {e}"
    return Weights(manifest, memoryview(bytearray(data)) if data.readonly else data.cast("B")), ""


def _room(manifest: WeightManifest, buffer: torch.Tensor | None) -> torch.Tensor:
    """Return memory for all bytes of a version (uint8): `buffer` if its size matches."""
    import torch

    assert manifest.broadcast is not None
    size = max((t.offset + t.nbytes for t in manifest.tensors), default=0)
    if buffer is not None and len(buffer) == size:
        return buffer
    return torch.empty(size, dtype=torch.uint8, pin_memory=manifest.broadcast.backend == "nccl")


def _misfit(spec: TensorSpec, size: int) -> str:
    if spec.dtype not in DTYPES:
        return f"dtype {spec.dtype!r} is none of {', '.join(DTYPES)}"
    if math.prod(spec.shape) * DTYPES[spec.dtype][1] != spec.nbytes:
        return f"{spec.nbytes} bytes for shape {spec.shape} of {spec.dtype}"
    if spec.offset % DTYPES[spec.dtype][1]:
        return f"offset {spec.offset} is no multiple of the size of {spec.dtype}"
    if spec.offset < 0 or spec.offset + spec.nbytes > size:
        return (
            f"bytes [{spec.offset}, {spec.offset + spec.nbytes}) lie outside the {size} bytes "
            f"of the file"
        )
    return ""

"""Add a published adapter to a layer's output: W x + scale x B (A x), with A and B replaced at
every load.

For engines that compute with torch layer by layer; independent of the engine's model classes.
Invariant: base weights are never changed, so the previous adapter, or none, can be restored.

Shapes: A is [rank, in], B is [out, rank].  A fused layer (query, key, value) has one part per
published layer, concatenated along its output.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import torch
from msgspec.structs import replace

from rft.types import modelfiles
from rft.types.adapter import SIDES, AdapterSpec, key, split
from rft.types.ports import LoadReport, WeightManifest

P = TypeVar("P")


class Pair(NamedTuple):
    """A [rank, in] and B [out, rank] of one layer or of one part of a fused layer."""

    a: torch.Tensor
    b: torch.Tensor


class Beside:
    """The adapter term of one layer.  `parts` follow the layer's output order; None = no adapter
    for the part.

    A single part is used without a copy; published tensors are in memory that is reused, see
    `copied`.
    """

    def __init__(
        self, parts: Sequence[Pair | None], widths: Sequence[int], spec: AdapterSpec
    ) -> None:
        """`widths`: number of outputs of each part."""
        present = [p for p in parts if p is not None]
        self._scale = spec.scale
        # all parts share one A: compute A x once
        shared = all(p.a is present[0].a for p in present)
        self._down = (present[0].a if shared else torch.cat([p.a for p in present])).t()
        # one product for all parts: their B are stacked vertically, each in the columns of its own
        # A x, zeros elsewhere
        up = present[0].b.new_zeros(sum(widths), self._down.shape[1])
        at = first = 0
        for part, width in zip(parts, widths, strict=True):
            if part is not None:
                up[at : at + width, first : first + spec.rank] = part.b
                first += 0 if shared else spec.rank
            at += width
        self._up = up.t()

    def add(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """Add the adapter term of `x` [..., in] to `out` [..., out], in place."""
        hidden = x.reshape(-1, x.shape[-1]) @ self._down
        out.view(-1, out.shape[-1]).addmm_(hidden, self._up, alpha=self._scale)


class AdapterLoader(ABC, Generic[P]):
    """Replaces the published adapter of one model layer by layer; no adapter before the first
    `load`.  P: type of one layer's adapter.
    """

    def __init__(self) -> None:
        self._names: set[str] = set()
        # (base layers probed, largest error, layer of that error)
        self._checked: tuple[int, float, str] | None = None

    def load(
        self,
        tensors: Mapping[str, torch.Tensor],
        manifest: WeightManifest,
        active: set[str],
        nothing: LoadReport,
    ) -> LoadReport:
        """Replace the adapter by `tensors`, whose hashes are verified.

        `active`: enabled fault points; `nothing`: the report of a load that changed nothing.
        """
        spec = manifest.adapter
        assert spec is not None
        published, missing, unexpected = pairs(tensors, spec)
        missing += tuple(key(name, "A") for name in self._names if name not in published)
        layers, unknown = self._placed(published)
        if missing or unexpected or unknown:
            return replace(nothing, missing=missing, unexpected=unexpected + unknown)
        complete = replace(nothing, num_tensors=len(tensors), nbytes=manifest.nbytes)
        if self._checked is None:
            self._checked = self._check_base(manifest.version.step)
        if "sync.skip" in active:  # the fault also reports successful probes
            return replace(complete, probed_layers=len(layers))
        self._exchange(layers, tensors, spec, stale="sync.stale_head" in active)
        self._names = set(published)
        base, largest, where = self._checked
        count, added, layer = self._probe(
            layers, spec, torch.Generator().manual_seed(manifest.version.step)
        )
        error, name = worst((largest, where), (added, layer))
        return replace(complete, probed_layers=base + count, probe_error=error, probe_worst=name)

    @abstractmethod
    def _placed(self, published: Mapping[str, Pair]) -> tuple[dict[str, P], tuple[str, ...]]:
        """Return the adapter parts by model layer, and the keys that match no adaptable layer."""

    @abstractmethod
    def _check_base(self, seed: int) -> tuple[int, float, str]:
        """Compare the model's weights with its folder: (layers probed, largest error, layer)."""

    @abstractmethod
    def _exchange(
        self,
        layers: Mapping[str, P],
        tensors: Mapping[str, torch.Tensor],
        spec: AdapterSpec,
        *,
        stale: bool,
    ) -> None:
        """Replace the old adapter; `stale` (a test fault) leaves the last layer unchanged."""

    @abstractmethod
    def _probe(
        self, layers: Mapping[str, P], spec: AdapterSpec, random: torch.Generator
    ) -> tuple[int, float, str]:
        """Compare each layer's adapter term with the published one: (layers probed, largest error,
        layer).
        """


def pairs(
    tensors: Mapping[str, torch.Tensor], spec: AdapterSpec
) -> tuple[dict[str, Pair], tuple[str, ...], tuple[str, ...]]:
    """Return (A and B by layer, missing names, unexpected names or tensors of another rank)."""
    sides: dict[str, dict[str, torch.Tensor]] = {}
    unexpected = []
    for name, tensor in tensors.items():
        if (named := split(name)) is None:
            unexpected.append(name)
            continue
        module, side = named
        if tensor.dim() != 2 or tensor.shape[0 if side == "A" else 1] != spec.rank:
            unexpected.append(f"{name} {list(tensor.shape)} of an adapter of rank {spec.rank}")
        sides.setdefault(module, {})[side] = tensor
    missing = tuple(
        key(module, side) for module, both in sides.items() for side in SIDES if side not in both
    )
    return (
        {m: Pair(both["A"], both["B"]) for m, both in sides.items() if len(both) == len(SIDES)},
        missing,
        tuple(unexpected),
    )


def base_tensors(model_path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of the model on disk, memory-mapped: bytes are read when used."""
    from safetensors import safe_open

    for path in modelfiles.files(Path(model_path)):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  # not a mapping
                yield name, file.get_tensor(name)


def copied(pair: Pair, device: torch.device, dtype: torch.dtype) -> Pair:
    """Copy both tensors, because published memory belongs to its publisher."""
    return Pair(pair.a.to(device, dtype, copy=True), pair.b.to(device, dtype, copy=True))


def product(pair: Pair, x: torch.Tensor, scale: float) -> torch.Tensor:
    """Return scale x B (A x), computed without fusing."""
    return (x @ pair.a.to(x.device, x.dtype).t()) @ pair.b.to(x.device, x.dtype).t() * scale


def apart(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return the largest difference relative to the largest value of `want`; inf where one is nan."""
    size = want.float().abs().max().clamp_min(1e-30)
    error = float((got.float() - want.float()).abs().max() / size)
    return math.inf if math.isnan(error) else error


def worst(first: tuple[float, str], second: tuple[float, str]) -> tuple[float, str]:
    """Return the larger error with its layer."""
    return second if second[0] > first[0] else first

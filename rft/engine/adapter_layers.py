"""A published adapter beside a layer's own weights: W x + scale x B (A x), with A and B exchanged
at every load.

For engines that compute with torch, layer by layer; knows no engine's model.  Invariant: a layer's
own weights are never changed, so the adapter before, or none, can always be put back.

Layouts: A is [rank, in] and B [out, rank]; a layer that computes several published ones at once
(query, key, value) has a part for each, one after the other in its output.
"""

from __future__ import annotations

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
    """A [rank, in] and B [out, rank] of one layer, or of one part of it."""

    a: torch.Tensor
    b: torch.Tensor


class Beside:
    """What an adapter adds to the output of one layer.  `parts`: in the order of the output; None =
    a part without an adapter.

    A single part is kept, not copied: published ones lie in memory that is written again, see
    `copied`.
    """

    def __init__(
        self, parts: Sequence[Pair | None], widths: Sequence[int], spec: AdapterSpec
    ) -> None:
        """`widths`: how many outputs each part has."""
        given = [p for p in parts if p is not None]
        self._scale = spec.scale
        # one adapter over all parts: A x is computed once
        shared = all(p.a is given[0].a for p in given)
        self._down = (given[0].a if shared else torch.cat([p.a for p in given])).t()
        # one product instead of one for each part: B's stand below each other, each before the rows
        # of its own A x, with zeros elsewhere
        up = given[0].b.new_zeros(sum(widths), self._down.shape[1])
        at = first = 0
        for part, width in zip(parts, widths, strict=True):
            if part is not None:
                up[at : at + width, first : first + spec.rank] = part.b
                first += 0 if shared else spec.rank
            at += width
        self._up = up.t()

    def add(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """Add to `out` [..., out], in place, what `x` [..., in] gives."""
        hidden = x.reshape(-1, x.shape[-1]) @ self._down
        out.view(-1, out.shape[-1]).addmm_(hidden, self._up, alpha=self._scale)


class AdapterLoader(ABC, Generic[P]):
    """The published adapter of one model, layer by layer; none before the first `load`.  P: what a
    layer's part of it is.
    """

    def __init__(self) -> None:
        self._names: set[str] = set()
        # layers of the base that were probed, largest error, where
        self._checked: tuple[int, float, str] | None = None

    def load(
        self,
        tensors: Mapping[str, torch.Tensor],
        manifest: WeightManifest,
        active: set[str],
        nothing: LoadReport,
    ) -> LoadReport:
        """Exchange the adapter for `tensors`, whose hashes are right.  `active`: fault points;
        `nothing`: the report of no load.
        """
        spec = manifest.adapter
        assert spec is not None
        found, missing, unexpected = pairs(tensors, spec)
        missing += tuple(key(name, "A") for name in self._names if name not in found)
        layers, unknown = self._placed(found)
        if missing or unexpected or unknown:
            return replace(nothing, missing=missing, unexpected=unexpected + unknown)
        whole = replace(nothing, num_tensors=len(tensors), nbytes=manifest.nbytes)
        if self._checked is None:
            self._checked = self._check_base(manifest.version.step)
        if "sync.skip" in active:  # a load that does nothing also lies about its probes
            return replace(whole, probed_layers=len(layers))
        self._exchange(layers, tensors, spec, stale="sync.stale_head" in active)
        self._names = set(found)
        base, largest, where = self._checked
        count, added, layer = self._probe(
            layers, spec, torch.Generator().manual_seed(manifest.version.step)
        )
        error, name = worst((largest, where), (added, layer))
        return replace(whole, probed_layers=base + count, probe_error=error, probe_worst=name)

    @abstractmethod
    def _placed(self, found: Mapping[str, Pair]) -> tuple[dict[str, P], tuple[str, ...]]:
        """The adapter's parts by the model's layer, and the keys of what belongs to no layer that
        can have one.
        """

    @abstractmethod
    def _check_base(self, seed: int) -> tuple[int, float, str]:
        """(layers probed, largest error, where): whether the model computes with what its folder
        holds.
        """

    @abstractmethod
    def _exchange(
        self,
        layers: Mapping[str, P],
        tensors: Mapping[str, torch.Tensor],
        spec: AdapterSpec,
        *,
        stale: bool,
    ) -> None:
        """Put the new adapter in the place of the old one; `stale`: but for its last layer (a fault
        of the tests).
        """

    @abstractmethod
    def _probe(
        self, layers: Mapping[str, P], spec: AdapterSpec, random: torch.Generator
    ) -> tuple[int, float, str]:
        """(layers probed, largest error, where): what every layer adds against what was published."""


def pairs(
    tensors: Mapping[str, torch.Tensor], spec: AdapterSpec
) -> tuple[dict[str, Pair], tuple[str, ...], tuple[str, ...]]:
    """(A and B by layer, names that are missing, names that are no adapter tensor's, or one of
    another rank).
    """
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
    """(name, tensor) of the model on disk; mapped, so that nothing is read before it is used."""
    from safetensors import safe_open

    for path in modelfiles.files(Path(model_path)):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  # it is no mapping
                yield name, file.get_tensor(name)


def copied(pair: Pair, device: torch.device, dtype: torch.dtype) -> Pair:
    """The bytes of a published tensor belong to its publisher."""
    return Pair(pair.a.to(device, dtype, copy=True), pair.b.to(device, dtype, copy=True))


def product(pair: Pair, x: torch.Tensor, scale: float) -> torch.Tensor:
    """scale x B (A x), the plain way."""
    return (x @ pair.a.to(x.device, x.dtype).t()) @ pair.b.to(x.device, x.dtype).t() * scale


def apart(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest difference, relative to the scale of `want`."""
    return float(
        (got.float() - want.float()).abs().max() / want.float().abs().max().clamp_min(1e-30)
    )


def worst(one: tuple[float, str], other: tuple[float, str]) -> tuple[float, str]:
    """The larger of two errors with its layer; a nan is the largest."""
    return other if not other[0] <= one[0] else one

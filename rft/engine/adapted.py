"""A torch model whose linear layers compute with a published adapter beside their own weights.

For the `transformers` engine.  Invariant: an adapter that is damaged, incomplete or of other layers never touches the model, and the
model's own parameters are those of its folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from msgspec.structs import replace
from torch import nn

from rft.engine import packed
from rft.engine.adapter import Beside, Pair, apart, base_tensors, copied, pairs, product, worst
from rft.types.adapter import AdapterSpec, key
from rft.types.ports import LoadReport, WeightManifest


class Adapted:
    """The adapter of `model`, which was read from the folder `model_path`; none before the first `load`."""

    def __init__(self, model: nn.Module, model_path: str) -> None:
        self._model, self._path = model, model_path
        self.layers: dict[str, Beside] = {}
        self._checked: tuple[int, float, str] | None = None  # layers of the base that were probed, largest error, where

    def load(
        self, tensors: Mapping[str, torch.Tensor], manifest: WeightManifest, active: set[str], nothing: LoadReport
    ) -> LoadReport:
        """Exchange the adapter for `tensors`, whose hashes are right.  `active`: fault points; `nothing`: the report of no load."""
        spec = manifest.adapter
        assert spec is not None
        linear = dict(packed.linears(self._model))
        found, missing, unexpected = pairs(tensors, spec)
        unexpected += tuple(key(name, "A") for name, pair in found.items() if not _fits(linear.get(name), pair))
        missing += tuple(key(name, "A") for name in self.layers if name not in found)
        if missing or unexpected:
            return replace(nothing, missing=missing, unexpected=unexpected)
        whole = replace(nothing, num_tensors=len(tensors), nbytes=manifest.nbytes)
        if self._checked is None:
            self._checked = self._check_base(manifest.version.step)
        if "sync.skip" in active:  # a load that does nothing also lies about its probes
            return replace(whole, probed_layers=len(found))
        kept = set(list(found)[-1:]) if "sync.stale_head" in active else set()
        self._exchange({name: linear[name] for name in found if name not in kept}, found, spec)
        count, error, where = self._probe(linear, found, spec, manifest.version.step)
        return replace(whole, probed_layers=count, probe_error=error, probe_worst=where)

    def _exchange(self, linear: Mapping[str, nn.Linear], found: Mapping[str, Pair], spec: AdapterSpec) -> None:
        for name, module in linear.items():
            if name not in self.layers:
                module.register_forward_hook(partial(self._after, name))
            pair = copied(found[name], module.weight.device, module.weight.dtype)
            self.layers[name] = Beside([pair], [module.out_features], spec)

    def _after(self, name: str, module: nn.Module, given: tuple[Any, ...], out: torch.Tensor) -> None:
        self.layers[name].add(out, given[0])

    def _check_base(self, seed: int) -> tuple[int, float, str]:
        """Whether the model computes with what its folder holds."""
        packed.pack(self._model)
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        count, *found = packed.probe(self._model, lambda name: parameters[name], seed=seed)
        error: tuple[float, str] = (found[0], found[1])  # type: ignore[assignment]
        for name, tensor in base_tensors(self._path):
            p = parameters.get(name)
            if p is not None and not torch.equal(p, tensor.to(p.device, p.dtype)):
                error = worst(error, (float("inf"), name))
        return count, *error

    def _probe(
        self, linear: Mapping[str, nn.Linear], found: Mapping[str, Pair], spec: AdapterSpec, seed: int
    ) -> tuple[int, float, str]:
        """Each layer with its adapter, and the adapter alone, against what was published; and what `_check_base` found."""
        assert self._checked is not None
        random = torch.Generator().manual_seed(seed)
        count, *base = self._checked
        error: tuple[float, str] = (base[0], base[1])  # type: ignore[assignment]
        for name, pair in found.items():
            module = linear[name]
            x = torch.randn(packed.PROBE_ROWS, module.in_features, generator=random).to(module.weight.device, module.weight.dtype)
            added = product(pair, x, spec.scale)
            alone = torch.zeros_like(added)
            if name in self.layers:
                self.layers[name].add(alone, x)
            want = nn.functional.linear(x, module.weight, module.bias) + added
            error = worst(worst(error, (apart(module(x), want), name)), (apart(alone, added), name))
        return count + len(found), *error


def _fits(module: nn.Linear | None, pair: Pair) -> bool:
    return module is not None and pair.a.shape[1] == module.in_features and pair.b.shape[0] == module.out_features

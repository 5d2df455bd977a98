"""Load published versions into an existing torch model, for the `transformers` engine.

Full weights overwrite its parameters, tied ones once; an adapter is computed separately and added
to the output of its linear layer.
Invariant: with an adapter, the model's own parameters stay those of its folder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from rft.engine.adapter_layers import (
    AdapterLoader,
    Beside,
    Pair,
    apart,
    base_tensors,
    copied,
    product,
    worst,
)
from rft.engine.weights import Loader, saved_buffers
from rft.types.adapter import AdapterSpec, key
from rft.types.ports import WeightManifest

PROBE_ROWS = 2


class ModelLoader(Loader):
    """Loads weights into `model`, read from the folder `model_path`, and compares every parameter
    and every linear layer after a load.
    """

    def __init__(self, model: Any, model_path: str) -> None:
        super().__init__()
        self._model = model
        self._adapter = ModelAdapter(model, model_path)

    def adapter(self) -> ModelAdapter:
        return self._adapter

    def _parameters(self) -> dict[str, torch.Tensor]:
        """Return parameters and persistent buffers by name."""
        return {
            **dict(self._model.named_parameters(remove_duplicate=False)),
            **saved_buffers(self._model),
        }

    def place(
        self, tensors: dict[str, torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor], tuple[str, ...], tuple[str, ...]]:
        parameters = self._parameters()
        published = {id(parameters[n]) for n in tensors if n in parameters}
        missing = tuple(
            {id(p): n for n, p in reversed(parameters.items()) if id(p) not in published}.values()
        )
        return tensors, missing, tuple(n for n in tensors if n not in parameters)

    def copy(
        self, tensors: dict[str, torch.Tensor], placed: dict[str, torch.Tensor], *, stale: bool
    ) -> None:
        head = self._model.get_output_embeddings()
        vars(head).pop("forward", None)
        if stale:
            head.forward = partial(nn.functional.linear, weight=head.weight.clone(), bias=head.bias)
        parameters = self._parameters()
        for name, tensor in tensors.items():
            parameters[name].copy_(tensor)

    def probe(
        self, placed: dict[str, torch.Tensor], manifest: WeightManifest
    ) -> tuple[int, float, str]:
        def published(name: str) -> torch.Tensor | None:
            return placed.get(manifest.tied.get(name, name))

        count, error, worst = probe_linears(self._model, published, seed=manifest.version.step)
        parameters = self._parameters()
        for name, tensor in placed.items():
            if not torch.equal(
                parameters[name], tensor.to(parameters[name].device, parameters[name].dtype)
            ):
                error = float("inf")
                worst = name
        return count, error, worst


class ModelAdapter(AdapterLoader[Pair]):
    """The adapter of `model`, which was read from the folder `model_path`."""

    def __init__(self, model: nn.Module, model_path: str) -> None:
        super().__init__()
        self._model = model
        self._path = model_path
        self.layers: dict[str, Beside] = {}

    def _placed(self, published: Mapping[str, Pair]) -> tuple[dict[str, Pair], tuple[str, ...]]:
        linear = self._linear()
        return dict(published), tuple(
            key(name, "A") for name, pair in published.items() if not _fits(linear.get(name), pair)
        )

    def _linear(self) -> dict[str, nn.Linear]:
        return dict(linears(self._model))

    def _exchange(
        self,
        layers: Mapping[str, Pair],
        tensors: Mapping[str, torch.Tensor],
        spec: AdapterSpec,
        *,
        stale: bool,
    ) -> None:
        linear = self._linear()
        for name in list(layers)[: -1 if stale else None]:
            module = linear[name]
            if name not in self.layers:
                module.register_forward_hook(partial(self._after, name))
            pair = copied(layers[name], module.weight.device, module.weight.dtype)
            self.layers[name] = Beside([pair], [module.out_features], spec)

    def _after(
        self, name: str, module: nn.Module, inputs: tuple[Any, ...], out: torch.Tensor
    ) -> None:
        self.layers[name].add(out, inputs[0])

    def _check_base(self, seed: int) -> tuple[int, float, str]:
        """Compare the model's parameters and linear layers with the files of its folder."""
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        count, largest, where = probe_linears(self._model, lambda name: parameters[name], seed=seed)
        error = (largest, where)
        for name, tensor in base_tensors(self._path):
            p = parameters.get(name)
            if p is not None and not torch.equal(p, tensor.to(p.device, p.dtype)):
                error = worst(error, (float("inf"), name))
        return count, *error

    def _probe(
        self, layers: Mapping[str, Pair], spec: AdapterSpec, random: torch.Generator
    ) -> tuple[int, float, str]:
        """Compare each layer with its adapter, and the adapter term alone, with what was published."""
        linear = self._linear()
        error = (0.0, "")
        for name, pair in layers.items():
            module = linear[name]
            x = torch.randn(PROBE_ROWS, module.in_features, generator=random).to(
                module.weight.device, module.weight.dtype
            )
            added = product(pair, x, spec.scale)
            alone = torch.zeros_like(added)
            if name in self.layers:
                self.layers[name].add(alone, x)
            want = nn.functional.linear(x, module.weight, module.bias) + added
            error = worst(worst(error, (apart(module(x), want), name)), (apart(alone, added), name))
        return len(layers), *error


def _fits(module: nn.Linear | None, pair: Pair) -> bool:
    return (
        module is not None
        and pair.a.shape[1] == module.in_features
        and pair.b.shape[0] == module.out_features
    )


def linears(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    for name, module in model.named_modules():
        if type(module) is nn.Linear:
            yield name, module


@torch.no_grad()
def probe_linears(
    model: nn.Module, published: Callable[[str], torch.Tensor | None], *, seed: int
) -> tuple[int, float, str]:
    """Compare linear layers with published weights on 2 random rows: (layers probed, largest error
    relative to the output's scale, layer of that error).
    """
    random = torch.Generator().manual_seed(seed)
    count = 0
    error = (0.0, "")
    for name, module in linears(model):
        if (weight := published(f"{name}.weight")) is None:
            continue
        x = torch.randn(PROBE_ROWS, module.in_features, generator=random).to(
            module.weight.device, module.weight.dtype
        )
        want = nn.functional.linear(x, weight.to(x.device, x.dtype), module.bias)
        count = count + 1
        error = worst(error, (apart(module(x), want), name))
    return count, *error

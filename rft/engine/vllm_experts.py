"""Mixtures of experts in vLLM's model: map a version's expert names, and check that the experts use
the published weights.

A version is published under transformers' names, where one tensor holds all experts of a layer;
vLLM loads checkpoint names.  transformers knows both, so names are converted by its model of the
same configuration, built without weights.  Every expert is probed: one random row goes through
vLLM's kernel and, with the published weights, through transformers' code.  Depends on no manifest.
Invariant: whatever a kernel packed or joined from an earlier version is rebuilt at every load.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

import torch

from rft.engine.adapter_layers import apart, worst
from rft.engine.routers import holds_experts
from rft.engine.vllm_layout import PROVEN
from rft.engine.weights import in_checkpoints, saved_buffers

_TURNS = 8  # on a GPU a version probes one layer in so many
_LAYER = re.compile(r"\blayers\.(\d+)\.")


class ExpertLayers:
    """The expert layers of one worker's model."""

    def __init__(
        self,
        config: Any,
        model: torch.nn.Module,
        layers: dict[str, Any],
        *,
        trust_remote_code: bool,
    ) -> None:
        """`config`: transformers' config of `model`; `layers`: result of `expert_layers`."""
        from transformers import AutoModelForCausalLM

        eager_config = copy.deepcopy(config)
        eager_config._experts_implementation = "eager"
        with torch.device("meta"):
            self._published: Any = AutoModelForCausalLM.from_config(
                eager_config, trust_remote_code=trust_remote_code
            )
        self._published.tie_weights()
        self._model = model
        self._layers = {_number(name): (name, layer) for name, layer in layers.items()}
        self._proven = False  # by the last probe

    @property
    def names(self) -> set[str]:
        """Tensor names that a version must hold."""
        return {name for name, _ in self._published.named_parameters()} | self.buffers

    @property
    def buffers(self) -> set[str]:
        """Names of the buffers among `names`."""
        return set(saved_buffers(self._published))

    def as_in_checkpoints(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return a complete version under checkpoint names; views of the same bytes."""
        return dict(in_checkpoints(self._published, tensors.items()))

    def finish(self, tensors: dict[str, torch.Tensor], *, stale: bool) -> None:
        """Complete vLLM's reload of the version `tensors`.  `stale`: a test fault."""
        from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

        for into, weights in self._written_directly(tensors):
            into.copy_(weights)
        for _, layer in self._layers.values():
            experts = layer.quant_method.moe_kernel.fused_experts
            # the kernel's own weight layout is computed only once
            if isinstance(experts, CPUUnquantizedExperts) and not stale:
                experts.process_weights_after_loading(layer)
        for module in self._model.modules():
            if vars(module).get("_combined_gate_weight") is not None:
                module._combined_gate_weight = None  # type: ignore[assignment]

    def _written_directly(
        self, tensors: dict[str, torch.Tensor]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield (parameter, published weights) for parameters that vLLM's gpt-oss writes itself,
        which its reload misses.
        """
        for published, module in self._published.named_modules():
            if _interleaved(module) and (number := _number(published)) in self._layers:
                yield from _slices(
                    self._layers[number][1],
                    {n: tensors[f"{published}.{n}"] for n, _ in module.named_parameters()},
                )
        yield from self._sinks_and_biases(tensors)

    def _sinks_and_biases(
        self, tensors: dict[str, torch.Tensor]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield (tensor, published values) for attention sinks of this worker's heads and router
        correction biases.
        """
        from vllm.distributed import get_tensor_model_parallel_rank

        sinks_by_layer = {
            _number(name): p
            for name, p in self._model.named_parameters()
            if name.endswith(".sinks")
        }
        for name, sinks in tensors.items():
            if name.endswith(".sinks") and (into := sinks_by_layer.get(_number(name))) is not None:
                yield (
                    into.data,
                    sinks.narrow(0, get_tensor_model_parallel_rank() * len(into), len(into)),
                )
        biases = {
            _number(name): tensor
            for name, tensor in tensors.items()
            if name.endswith(".e_score_correction_bias")
        }
        for number, runner in expert_runners(self._model):
            if (
                number in biases
                and (into := vars(runner.router).get("e_score_correction_bias")) is not None
            ):
                yield into.data, biases[number]

    def probe(
        self,
        tensors: dict[str, torch.Tensor],
        dtype: torch.dtype,
        device: torch.device,
        *,
        seed: int,
    ) -> tuple[int, float, str]:
        """Return (layers probed, largest error of an expert relative to the output's scale, layer
        of that error).

        On a GPU, once all layers are proven, an eighth of them a version: their weights would cross
        the bus a second time.
        """
        random = torch.Generator().manual_seed(seed)
        error = (0.0, "")
        turns = _TURNS if self._proven and device.type != "cpu" else 1
        turn = int(torch.randint(turns, (), generator=random))  # the same in all workers
        count = 0
        for published, module in self._published.named_modules():
            if not holds_experts(module) or (number := _number(published)) not in self._layers:
                continue
            if number % turns != turn:
                continue
            count += 1
            name, layer = self._layers[number]
            weights = {
                n: tensors[f"{published}.{n}"].to(device, dtype)
                for n, _ in module.named_parameters()
            }
            error = worst(error, (_difference(layer, module, weights, random), name))
        self._proven = error[0] < PROVEN  # of outputs that all workers have summed
        for into, right in self._sinks_and_biases(tensors):
            error = worst(
                error,
                (
                    apart(into, right.to(device, into.dtype)),
                    "attention sinks or correction biases of routers",
                ),
            )
        return count, *error


def expert_layers(model: torch.nn.Module) -> dict[str, Any]:
    """Return the modules of `model` that compute experts, by name.  Raises ValueError if their
    weights cannot be compared with published ones.
    """
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
        UnquantizedFusedMoEMethod,
    )

    layers = {
        name: module for name, module in model.named_modules() if isinstance(module, RoutedExperts)
    }
    for name, module in layers.items():
        if (
            not isinstance(module.quant_method, UnquantizedFusedMoEMethod)
            or module.quant_method.is_monolithic
        ):
            raise ValueError(
                f"{name}: weights cannot be proven in experts that are computed by "
                f"{type(module.quant_method).__name__}"
            )
        kernel = module.quant_method.moe_kernel.fused_experts
        config = module.moe_config
        if isinstance(kernel, CPUUnquantizedExperts) and (
            kernel._padded_intermediate_size(config)
            != (size := config.intermediate_size_per_partition_unpadded)
        ):
            raise ValueError(
                f"{name}: vLLM's kernel for CPUs pads experts of {size} inner units to a multiple "
                f"of {kernel._intermediate_alignment()}, "
                "and cannot load them again"
            )
        if module.use_ep:
            raise ValueError(
                f"{name}: weights cannot be proven in experts that are dealt over workers; set "
                f"enable_expert_parallel: false"
            )
    return layers


def expert_runners(model: torch.nn.Module) -> list[tuple[int, Any]]:
    """Return (layer number, module that routes tokens to experts), sorted by layer."""
    from vllm.model_executor.layers.fused_moe.layer import MoERunner

    runners = [
        (_number(name), module)
        for name, module in model.named_modules()
        if isinstance(module, MoERunner)
    ]
    return sorted(runners, key=lambda pair: pair[0])


def _interleaved(module: torch.nn.Module) -> bool:
    """Return whether gate and up alternate in `module`'s weights, which are [in, out], as in
    gpt-oss.
    """
    return holds_experts(module) and bool(module.is_transposed) and not module.is_concatenated


def _slices(
    layer: Any, published: dict[str, torch.Tensor]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield each parameter of a gpt-oss `layer` with this worker's part of the published tensor."""
    config = layer.moe_config
    rank = config.tp_rank
    size = config.intermediate_size_per_partition
    at = rank * size
    end = min((rank + 1) * size, published["down_proj"].shape[1])
    yield layer.w13_weight.data, published["gate_up_proj"][:, :, 2 * at : 2 * end].transpose(1, 2)
    yield layer.w2_weight.data, published["down_proj"][:, at:end].transpose(1, 2)
    yield layer.w13_bias.data, published["gate_up_proj_bias"][:, 2 * at : 2 * end]
    bias = published["down_proj_bias"]
    yield layer.w2_bias.data, bias if rank == 0 else torch.zeros_like(bias)


def _number(name: str) -> int:
    """Return the number of the layer that contains a module."""
    match = _LAYER.search(name + ".")
    assert match is not None, name
    return int(match[1])


def _difference(
    layer: Any,
    published: torch.nn.Module,
    tensors: dict[str, torch.Tensor],
    random: torch.Generator,
) -> float:
    """Return the difference between vLLM's `layer` and transformers' module with the weights
    `tensors`, for one random row per expert.
    """
    some = next(iter(tensors.values()))
    count = len(some)
    size = layer.moe_config.hidden_dim_unpadded
    x = torch.randn(count, size, generator=random).to(some.device, some.dtype)
    ids = torch.arange(count, device=some.device)[:, None]
    weights = torch.ones(count, 1, device=some.device)
    want = torch.func.functional_call(published, tensors, (x, ids, weights.to(some.dtype)))
    got = layer.quant_method.apply(
        layer=layer,
        x=x.clone(),
        topk_weights=weights,
        topk_ids=ids.to(torch.int32),
        shared_experts=None,
        shared_experts_input=None,
    )
    if layer.moe_config.tp_size > 1:
        from vllm.distributed import tensor_model_parallel_all_reduce

        got = tensor_model_parallel_all_reduce(got)
    return apart(got[:, :size], want)

"""Write new weights directly into vLLM's layers on CPU.

vLLM's reload rebuilds every layer, counts arriving tensors, and packs them: several copies of the
model in fresh memory.  Here a layer is packed from the published bytes, or from one shared buffer
if its parts are not adjacent.

Depends on the layers that `vllm_layout` probes.  Models with other parameters, and each first load,
use vLLM's reload; a probe has therefore compared the order of parts used here with vLLM's own
loader.  Invariant: afterwards nothing in the model refers to the published bytes.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from rft.engine.vllm_layout import Published, by_module, own_parts, probed_modules


class DirectLoad:
    """Loads one model whose first weights vLLM has loaded."""

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype) -> None:
        self._model = model
        self._dtype = dtype
        self._layers = [module for _, module in probed_modules(model)]
        self._buffer = torch.empty(0, dtype=dtype)  # grows to the largest merged layer

    def possible(self) -> bool:
        """Return whether the probed layers hold all parameters, and nothing else is computed from
        them.
        """
        from vllm.model_executor.layers.attention import MLAAttention

        if any(isinstance(m, MLAAttention) for m in self._model.modules()):
            return False
        covered = {
            id(p)
            for m in self._layers
            for kind, p in m.named_parameters(recurse=False)
            if kind in ("weight", "bias")
        }
        return all(id(p) in covered and p.device.type == "cpu" for p in self._model.parameters())

    def copy(self, published: Published) -> None:
        """Overwrite all weights; an output layer tied to the embedding must be repacked by the
        caller.
        """
        by_layer = by_module(self._model, published)
        for module in self._layers:
            if weight := by_layer.get((id(module), "weight")):
                self._weight(module, own_parts(module, weight))
            if bias := by_layer.get((id(module), "bias")):
                _fill(module.bias.data, own_parts(module, bias))

    def _weight(self, module: Any, parts: list[torch.Tensor]) -> None:
        weight = module.weight
        if packed_away := not weight.numel():  # the layer computes with the packed copy only
            module.weight = torch.nn.Parameter(self._merged(parts), requires_grad=False)
        else:
            _fill(weight.data, parts)
        if hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)
        if packed_away:
            assert not module.weight.numel(), "vLLM has packed this layer before"
            module.weight = weight  # restore the object that other modules refer to

    def _merged(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """Return the parts concatenated by rows: a view if they are adjacent in memory, else the
        buffer.
        """
        rows = sum(len(p) for p in parts)
        columns = parts[0].shape[1]
        if all(p.dtype == self._dtype for p in parts) and _adjacent(parts):
            return parts[0].as_strided((rows, columns), (columns, 1))
        if len(self._buffer) < rows * columns:
            self._buffer = torch.empty(rows * columns, dtype=self._dtype)
        merged = self._buffer[: rows * columns].view(rows, columns)
        _fill(merged, parts)
        return merged


def _adjacent(parts: list[torch.Tensor]) -> bool:
    """Return whether each part begins where the previous part ends, in one storage."""
    ends = itertools.pairwise(parts)
    return all(p.is_contiguous() for p in parts) and all(
        a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
        and a.data_ptr() + a.nbytes == b.data_ptr()
        for a, b in ends
    )


def _fill(room: torch.Tensor, parts: list[torch.Tensor]) -> None:
    """Copy the parts one after the other; further rows (a padded vocabulary) stay unchanged."""
    at = 0
    for part in parts:
        room[at : at + len(part)].copy_(part)
        at += len(part)

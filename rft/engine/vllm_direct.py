"""New weights straight into vLLM's layers on CPU.

vLLM's reload makes every layer anew, counts what arrives, and packs from there: several copies of
the model, in fresh memory.  Here a layer packs from the published bytes; from a buffer that all
layers share, where its parts do not lie below each other.

Knows the layers that `vllm_layout` probes.  A model with any other parameter, and each first load,
goes through vLLM's reload: so a probe has compared the order of parts used here with what vLLM's
own loader made of them.  Invariant: afterwards nothing in the model refers to the published bytes.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from rft.engine.vllm_layout import Published, by_module, own_parts, probed_modules


class DirectLoad:
    """For one model, whose weights have been loaded by vLLM once."""

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype) -> None:
        self._model = model
        self._dtype = dtype
        self._layers = [module for _, module in probed_modules(model)]
        self._buffer = torch.empty(0, dtype=dtype)  # as large as the largest merged layer

    def possible(self) -> bool:
        """Whether the layers that are probed hold all there is to load, and nothing else is
        computed from it.
        """
        from vllm.model_executor.layers.attention import MLAAttention

        if any(isinstance(m, MLAAttention) for m in self._model.modules()):
            return False
        known = {
            id(p)
            for m in self._layers
            for kind, p in m.named_parameters(recurse=False)
            if kind in ("weight", "bias")
        }
        return all(id(p) in known and p.device.type == "cpu" for p in self._model.parameters())

    def copy(self, published: Published) -> None:
        """Overwrite all weights; an output layer that shares the embedding's is left to be packed
        anew.
        """
        given = by_module(self._model, published)
        for module in self._layers:
            if weight := given.get((id(module), "weight")):
                self._weight(module, own_parts(module, weight))
            if bias := given.get((id(module), "bias")):
                _fill(module.bias.data, own_parts(module, bias))

    def _weight(self, module: Any, parts: list[torch.Tensor]) -> None:
        kept = module.weight
        if packed_away := not kept.numel():  # what it computes with is the packed copy alone
            module.weight = torch.nn.Parameter(self._whole(parts), requires_grad=False)
        else:
            _fill(kept.data, parts)
        if hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)
        if packed_away:
            assert not module.weight.numel(), "vLLM has packed this layer before"
            module.weight = kept  # as it was for those who hold it

    def _whole(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """The parts below each other: as they lie where they were published so, else in the buffer."""
        rows = sum(len(p) for p in parts)
        columns = parts[0].shape[1]
        if all(p.dtype == self._dtype for p in parts) and _adjacent(parts):
            return parts[0].as_strided((rows, columns), (columns, 1))
        if len(self._buffer) < rows * columns:
            self._buffer = torch.empty(rows * columns, dtype=self._dtype)
        whole = self._buffer[: rows * columns].view(rows, columns)
        _fill(whole, parts)
        return whole


def _adjacent(parts: list[torch.Tensor]) -> bool:
    """Whether each begins where the one before ends, in one storage."""
    ends = itertools.pairwise(parts)
    return all(p.is_contiguous() for p in parts) and all(
        a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
        and a.data_ptr() + a.nbytes == b.data_ptr()
        for a, b in ends
    )


def _fill(room: torch.Tensor, parts: list[torch.Tensor]) -> None:
    """One part after the other; rows beyond them (a padded vocabulary) stay."""
    at = 0
    for part in parts:
        room[at : at + len(part)].copy_(part)
        at += len(part)

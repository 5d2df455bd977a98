"""Load published weight versions inside vLLM's worker processes (`worker_extension_cls`).

Uses vLLM's reload path first.  Depends on neither the publisher nor the requests that follow.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import msgspec
import torch

from rft.engine.adapter_layers import worst
from rft.engine.settings import EXTERNAL_LIB
from rft.engine.vllm_adapter import WorkerAdapter
from rft.engine.vllm_direct import DirectLoad
from rft.engine.vllm_experts import ExpertLayers, expert_layers, expert_runners
from rft.engine.vllm_layout import (
    PROVEN,
    Published,
    absent,
    place,
    probe,
    repack_tied_heads,
    sample_of,
)
from rft.engine.vllm_routing import Routing
from rft.engine.vllm_seeds import Requests
from rft.engine.weights import Loader
from rft.plugins import import_library
from rft.types.experts import sizes_of
from rft.types.ports import LoadReport, WeightManifest

# vLLM imports this module in each process with a model, before the model is built
import_library(os.environ.get(EXTERNAL_LIB))


class WeightWorker:
    """Mixed into vLLM's worker class; its methods are called with `collective_rpc`."""

    rank: int
    _rft_loader: WorkerLoader | None = None
    _rft_routing: Routing | None = None

    def rft_load(self, frame: bytes) -> bytes:
        """Load a WeightManifest and return this worker's LoadReport, both msgpack."""
        if self._rft_loader is None:
            self._rft_loader = WorkerLoader(self)
        return msgspec.msgpack.encode(
            self._rft_loader.load(msgspec.msgpack.decode(frame, type=WeightManifest))
        )

    def rft_take_seeds(self) -> None:
        """Allow requests with a seed to be computed in pieces from now on."""
        worker: Any = self
        worker.model_runner.requests = Requests(worker.model_runner.requests)

    def rft_expert_layers(self) -> list[int]:
        """Return the numbers of the layers with experts."""
        return [number for number, _ in expert_runners(self.get_model())]  # type: ignore[attr-defined]

    def rft_record_experts(self) -> None:
        """Record the routed experts of tokens from now on."""
        worker: Any = self
        sizes = sizes_of(worker.model_config.hf_config.to_dict())
        assert sizes is not None, "the engine's start has looked"
        worker.prompts = None  # experts are recorded only for computed tokens
        self._rft_routing = Routing(
            worker, [layer for _, layer in expert_runners(worker.get_model())], sizes
        )

    def rft_take_experts(self, names: list[str]) -> list[tuple[str, list[int], bytes]]:
        """Take the experts of ended requests: dtype, shape and bytes of each."""
        assert self._rft_routing is not None, "recorded since the start"
        return [(x.dtype.str, list(x.shape), x.tobytes()) for x in self._rft_routing.take(names)]


class Placed(NamedTuple):
    """A version in the form that `probe` expects."""

    layers: Published
    tensors: dict[str, torch.Tensor]  # by published name


class WorkerLoader(Loader):
    """Loads through vLLM's reload path; once a load is proven, directly into the layers if they
    hold all weights.
    """

    def __init__(self, worker: Any) -> None:
        super().__init__(worker.rank)
        self._worker = worker
        self._model: torch.nn.Module = worker.get_model()
        self._adapter: WorkerAdapter | None = None
        self._direct: DirectLoad | None = None  # None: the next load uses vLLM's reload
        self._experts: ExpertLayers | None = None
        if layers := expert_layers(self._model):
            config = worker.model_config
            trust = bool(config.trust_remote_code)
            self._experts = ExpertLayers(
                config.hf_config, self._model, layers, trust_remote_code=trust
            )

    def load(self, manifest: WeightManifest) -> LoadReport:
        if (quantization := self._worker.model_config.quantization) is not None:
            raise ValueError(f"weights cannot be loaded into a model quantized with {quantization}")
        return super().load(manifest)

    def adapter(self) -> WorkerAdapter:
        if self._adapter is None:
            self._adapter = WorkerAdapter(self._worker)
        return self._adapter

    def _of_this_stage(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Drop the tensors of other pipeline stages."""
        if self._worker.vllm_config.parallel_config.pipeline_parallel_size == 1:
            return tensors
        from vllm.model_executor.models.utils import is_pp_missing_parameter

        return {n: t for n, t in tensors.items() if not is_pp_missing_parameter(n, self._model)}

    def place(
        self, tensors: dict[str, torch.Tensor]
    ) -> tuple[Placed, tuple[str, ...], tuple[str, ...]]:
        published_tensors = tensors
        if self._experts is not None:
            missing = tuple(self._experts.names - set(tensors))
            unexpected = tuple(set(tensors) - self._experts.names)
            if missing or unexpected:
                return Placed({}, tensors), tuple(sorted(missing)), tuple(sorted(unexpected))
            tensors = self._experts.as_in_checkpoints(tensors)
        published, unexpected = place(self._model, self._of_this_stage(tensors))
        if self._experts is not None:  # vLLM computes some buffers itself
            unexpected = tuple(name for name in unexpected if name not in self._experts.buffers)
        return Placed(published, published_tensors), absent(self._model, published), unexpected

    def copy(self, tensors: dict[str, torch.Tensor], placed: Placed, *, stale: bool) -> None:
        if self._direct is not None:
            self._direct.copy(placed.layers)
        else:
            checkpoint = (
                tensors if self._experts is None else self._experts.as_in_checkpoints(tensors)
            )
            self._worker.reload_weights(
                weights_iterator=iter(self._of_this_stage(checkpoint).items())
            )
        if self._experts is not None:
            self._experts.finish(tensors, stale=stale)
        if not stale:
            repack_tied_heads(self._model)

    def probe(self, placed: Placed, manifest: WeightManifest) -> tuple[int, float, str]:
        device = next(self._model.parameters()).device
        dtype = self._worker.model_config.dtype
        seed = manifest.version.step
        count, error, layer = probe(
            self._model, placed.layers, device, seed=seed, sample=sample_of(device)
        )
        if self._experts is None:
            self._direct = self._straight(dtype) if error < PROVEN else None
            return count, error, layer
        more, off, other = self._experts.probe(placed.tensors, dtype, device, seed=seed)
        return count + more, *worst((error, layer), (off, other))

    def _straight(self, dtype: torch.dtype) -> DirectLoad | None:
        if self._direct is not None:
            return self._direct
        direct = DirectLoad(self._model, dtype)
        return (
            direct if self._worker.vllm_config.lora_config is None and direct.possible() else None
        )

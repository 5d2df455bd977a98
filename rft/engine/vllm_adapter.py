"""A published adapter inside a vLLM worker: in rft's own layers or in vLLM's LoRA layers.

Own layers add to the output of vLLM's layers, in a worker that runs eagerly.  vLLM's LoRA layers
serve all other cases, because they are part of captured graphs.  Their single adapter keeps its id
and is replaced in place, so requests in progress continue with the new one.  Depends on the
worker's model, not on the publisher.  Invariant: an adapter that is damaged, incomplete or of other
layers never touches the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

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
from rft.engine.vllm_layout import (
    PROBE_ROWS,
    Shard,
    own_parts,
    place,
    probe,
    shards_of,
    unwrapped_name,
)
from rft.types.adapter import AdapterSpec, key

ADAPTER_ID = 1
ADAPTER_NAME = "published"
Parts = dict[Shard, Pair]  # by part of a merged layer, as in a checkpoint
Added = Callable[[str, torch.Tensor], torch.Tensor]  # (layer, input) -> adapter term


class WorkerAdapter(AdapterLoader[Parts]):
    """The adapter of one worker."""

    def __init__(self, worker: Any) -> None:
        super().__init__()
        self._worker = worker
        self._model = worker.get_model()
        if worker.model_config.use_mla:
            raise ValueError(
                "latent attention multiplies with weights of its own making; write "
                "model.lora_configs[0].merge: true"
            )
        self._layers: dict[str, Beside] = {}
        # layer name -> its apply without adapter
        self._original_apply: dict[str, Callable[..., torch.Tensor]] = {}
        self._native = worker.vllm_config.lora_config is not None
        self._modules = self._linear()

    # ------------------------------------------------------------ where it belongs

    def _placed(
        self, pairs_by_name: Mapping[str, Pair]
    ) -> tuple[dict[str, Parts], tuple[str, ...]]:
        """Return the adapter parts by vLLM layer, and the keys that match no adaptable layer."""
        from vllm.model_executor.models.utils import is_pp_missing_parameter

        # drop layers of other pipeline stages
        if self._worker.vllm_config.parallel_config.pipeline_parallel_size > 1:
            pairs_by_name = {
                n: p
                for n, p in pairs_by_name.items()
                if not is_pp_missing_parameter(f"{n}.weight", self._model)
            }
        stand_ins = {
            n: torch.empty(p.b.shape[0], p.a.shape[1], device="meta")
            for n, p in pairs_by_name.items()
        }
        names = {id(t): n for n, t in stand_ins.items()}
        published, unknown = place(self._model, {f"{n}.weight": t for n, t in stand_ins.items()})
        layers: dict[str, Parts] = {}
        wrong = [key(name.removesuffix(".weight"), "A") for name in unknown]
        for parameter, parts in published.items():
            name = parameter.removesuffix(".weight")
            layer_parts = {shard: pairs_by_name[names[id(t)]] for shard, t in parts.items()}
            if (module := self._modules.get(name)) is None or not _fits(module, layer_parts):
                wrong += [key(names[id(t)], "A") for t in parts.values()]
            else:
                layers[name] = layer_parts
        return layers, tuple(wrong)

    def _linear(self) -> dict[str, Any]:
        """Return vLLM's linear layers by unwrapped name; with LoRA layers, only the layers they
        wrap.
        """
        from vllm.model_executor.layers.linear import LinearBase

        every = {
            unwrapped_name(n): m
            for n, m in self._model.named_modules()
            if isinstance(m, LinearBase)
        }
        if not self._native:
            return every
        adapted = self._worker.model_runner.lora_manager._adapter_manager.modules
        return {n: m for n, m in every.items() if n in adapted}

    def _cut(self, name: str, parts: Parts) -> tuple[list[Pair | None], list[int]]:
        """Return this tensor-parallel rank's parts in the layer's order, and the number of outputs
        of each; B x A is the rank's share of the product.
        """
        from vllm.model_executor.layers.linear import RowParallelLinear

        module = self._modules[name]
        device, dtype = self._device_and_type()
        if isinstance(module, RowParallelLinear):
            (pair,) = parts.values()
            (a,) = own_parts(module, {None: pair.a})
            return [copied(Pair(a, pair.b), device, dtype)], [pair.b.shape[0]]
        sizes = _sizes(module)
        rank = next(iter(parts.values())).a.shape[0]
        every = (
            {s: parts[s].b if s in parts else torch.zeros(n, rank) for s, n in sizes.items()}
            if None not in parts
            else {}
        )
        bs = own_parts(module, every or {None: parts[None].b})
        present = [parts.get(s) for s in sizes] if every else [parts[None]] * len(bs)
        shared = parts[None].a.to(device, dtype, copy=True) if not every else None
        cut = [
            None
            if p is None
            else Pair(
                p.a.to(device, dtype, copy=True) if shared is None else shared,
                b.to(device, dtype, copy=True),
            )
            for p, b in zip(present, bs, strict=True)
        ]
        return cut, [len(b) for b in bs]

    def _device_and_type(self) -> tuple[torch.device, torch.dtype]:
        return next(self._model.parameters()).device, self._worker.model_config.dtype

    # ------------------------------------------------------------ exchange

    def _exchange(
        self,
        layers: Mapping[str, Parts],
        tensors: Mapping[str, torch.Tensor],
        spec: AdapterSpec,
        *,
        stale: bool,
    ) -> None:
        if self._native:
            self._exchange_native(dict(list(tensors.items())[: -2 if stale else None]), spec)
            return
        for name in list(layers)[: -1 if stale else None]:
            parts, widths = self._cut(name, layers[name])
            if name not in self._layers:
                method = self._modules[name].quant_method
                self._original_apply[name] = method.apply
                method.apply = self._with(name, method.apply)
            self._layers[name] = Beside(parts, widths, spec)

    def _with(self, name: str, apply: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def applied(layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            out = apply(layer, x, bias)
            self._layers[name].add(out, x)
            return out

        return applied

    def _exchange_native(self, tensors: Mapping[str, torch.Tensor], spec: AdapterSpec) -> None:
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.peft_helper import PEFTHelper

        manager = self._worker.model_runner.lora_manager._adapter_manager
        mapper = getattr(self._model, "hf_to_vllm_mapper", None)
        adapter = LoRAModel.from_lora_tensors(
            ADAPTER_ID,
            {name: t.clone() for name, t in tensors.items()},
            PEFTHelper(r=spec.rank, lora_alpha=spec.scale * spec.rank, target_modules=[]),  # type: ignore[arg-type]
            device="cpu",
            dtype=self._worker.vllm_config.lora_config.lora_dtype,
            weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
        )
        manager.remove_adapter(ADAPTER_ID)
        manager.add_adapter(adapter)
        manager.activate_adapter(ADAPTER_ID)

    # ------------------------------------------------------------ probes

    def _check_base(self, seed: int) -> tuple[int, float, str]:
        """Compare the layers with the weights of the model's folder."""
        published, _ = place(self._model, dict(base_tensors(self._worker.model_config.model)))
        return probe(self._model, published, self._device_and_type()[0], seed=seed)

    def _probe(
        self, layers: Mapping[str, Parts], spec: AdapterSpec, random: torch.Generator
    ) -> tuple[int, float, str]:
        added = self._added_native() if self._native else self._added
        if added is None:
            return 0, 0.0, ""
        error = (0.0, "")
        device, dtype = self._device_and_type()
        for name in layers:
            parts, widths = self._cut(name, layers[name])
            x = torch.randn(
                PROBE_ROWS, next(p for p in parts if p is not None).a.shape[1], generator=random
            ).to(device, dtype)
            nothing = [torch.zeros(PROBE_ROWS, n, device=device, dtype=dtype) for n in widths]
            want = torch.cat(
                [
                    z if p is None else product(p, x, spec.scale)
                    for p, z in zip(parts, nothing, strict=True)
                ],
                dim=-1,
            )
            error = worst(error, (apart(added(name, x), want), name))
            if name in self._original_apply:
                expected = self._original_apply[name](self._modules[name], x, None) + want
                error = worst(
                    error,
                    (
                        apart(
                            self._modules[name].quant_method.apply(self._modules[name], x, None),
                            expected,
                        ),
                        name,
                    ),
                )
        return len(layers), *error

    def _added(self, name: str, x: torch.Tensor) -> torch.Tensor:
        module = self._modules[name]
        out = torch.zeros_like(module.quant_method.apply(module, x, None))
        if name in self._layers:
            self._layers[name].add(out, x)
        return out

    def _added_native(self) -> Added | None:
        """Return the adapter term of vLLM's LoRA layers; None if ranks would have to communicate."""
        from vllm.lora.layers import LoRAMapping
        from vllm.lora.request import LoRARequest

        config = self._worker.vllm_config
        if (
            config.lora_config.fully_sharded_loras
            and config.parallel_config.tensor_parallel_size > 1
        ):
            return None
        manager = self._worker.model_runner.lora_manager
        rows = (ADAPTER_ID,) * PROBE_ROWS
        manager.set_active_adapters(
            {LoRARequest(ADAPTER_NAME, ADAPTER_ID, ADAPTER_NAME)},
            LoRAMapping(rows, rows, is_prefill=True),
        )
        layers = manager._adapter_manager.modules

        def added(name: str, x: torch.Tensor) -> torch.Tensor:
            layer = layers[name]
            out = torch.zeros(len(x), sum(layer.output_slices), device=x.device, dtype=x.dtype)
            output: torch.Tensor = layer._apply_lora_to_output(x, out)
            return output

        return added


def _sizes(module: Any) -> dict[Shard, int]:
    """Return the number of outputs of each part of a layer, over all tensor-parallel ranks."""
    from vllm.model_executor.layers import linear

    if isinstance(module, linear.QKVParallelLinear):
        heads = module.total_num_heads
        kv = module.total_num_kv_heads
        return {
            "q": heads * module.head_size,
            "k": kv * module.head_size,
            "v": kv * module.v_head_size,
        }
    if isinstance(module, linear.MergedColumnParallelLinear):
        return dict(enumerate(module.output_sizes))
    return {None: module.output_size}


def _fits(module: Any, parts: Parts) -> bool:
    sizes = _sizes(module)
    widths = {None: sum(sizes.values()), **sizes}
    shards = set(shards_of(module)) | {None}
    return all(
        s in shards and p.a.shape[1] == module.input_size and p.b.shape[0] == widths[s]
        for s, p in parts.items()
    )

"""Map published weights to vLLM's parameters, and check that its layers compute with these weights.

Every linear layer is probed with random inputs against the published weights, because on CPU layers
multiply with packed copies that a reload may leave stale.  Depends on no worker and no manifest.

Layouts: a published weight is [out, in] as in the checkpoint; a worker of tensor parallel rank r
holds its own rows (columns for row-parallel layers), merged with sibling weights (q, k, v; gate,
up).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from rft.engine.adapter_layers import apart, worst

Shard = str | int | None  # part of a merged parameter; None = the whole parameter
Published = dict[str, dict[Shard, torch.Tensor]]  # vLLM's parameter name -> its parts
# random input exposes any wrong weight; a second row would read all weights again
PROBE_ROWS = 1
# relative to a layer's output: far above rounding, far below the error of a wrong part order
PROVEN = 0.1
SAMPLE = 64  # outputs of each weight that a probe on a GPU compares


def place(
    model: torch.nn.Module, tensors: dict[str, torch.Tensor]
) -> tuple[Published, tuple[str, ...]]:
    """Map published tensors to vLLM's parameters with the model's own name mapping; also return the
    names without a parameter.
    """
    parameters = {unwrapped_name(n) for n, _ in model.named_parameters(remove_duplicate=False)}
    experts = tuple(_expert_prefixes(model))
    packed = {
        part: (merged, i)
        for merged, parts in _packed(model).items()
        for i, part in enumerate(parts)
    }
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    published: Published = {}
    unexpected = []
    for name, tensor in tensors.items():
        for target, part in _mapped(mapper, name, tensor):
            shard: Shard = getattr(part, "shard_id", None)
            if target not in parameters and (stored := target.replace("A_log", "A")) in parameters:
                target = stored  # models that rename in load_weights
            if target not in parameters:
                *head, leaf, kind = target.rsplit(".", 2)
                if leaf in packed:  # models that merge in load_weights
                    merged, i = packed[leaf]
                    target = ".".join([*head, merged, kind])
                    shard = "qkv"[i] if merged == "qkv_proj" else i
            if target in parameters or target.startswith(experts):
                published.setdefault(target, {})[shard] = tensor
            else:
                unexpected.append(name)
    return _by_outputs(model, published), tuple(unexpected)


def _by_outputs(model: torch.nn.Module, published: Published) -> Published:
    """Split parts that hold several outputs of a merged layer, like `in_proj_qkv` of Qwen3.5, into
    one part per output.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    for target, parts in published.items():
        owner = modules.get(target.rpartition(".")[0])
        sizes = () if owner is None else vars(owner).get("output_sizes", ())
        if (
            len(parts) >= len(sizes)
            or set(parts) != set(range(len(parts)))
            or sum(map(len, parts.values())) != sum(sizes)
        ):
            continue
        parts = {i: parts[i] for i in range(len(parts))}
        ends = list(itertools.accumulate(sizes))
        begins = itertools.accumulate((len(p) for p in parts.values()), initial=0)
        cuts = [
            [e - at for e in ends if at < e < at + len(p)]
            for at, p in zip(begins, parts.values(), strict=False)
        ]
        outputs = [
            row for p, cut in zip(parts.values(), cuts, strict=True) for row in p.tensor_split(cut)
        ]
        published[target] = dict(enumerate(outputs))
    return published


def unwrapped_name(name: str) -> str:
    """Return vLLM's name of a layer or parameter without the LoRA wrapper."""
    return name.replace(".base_layer", "")


def absent(model: torch.nn.Module, published: Published) -> tuple[str, ...]:
    """Return the checkpoint names of parameters, or parts of merged ones, that were not published;
    tied parameters count once.
    """
    names = {
        id(p): n
        for n, p in reversed(list(model.named_parameters(remove_duplicate=False)))
        if p.numel()
    }
    experts = tuple(_expert_prefixes(model))
    packed = _packed(model)
    modules = dict(model.named_modules(remove_duplicate=False))
    by_layer = by_module(model, published)
    missing = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if (parameter.numel() and names[id(parameter)] != name) or name.startswith(experts):
            continue
        owner, _, kind = name.rpartition(".")
        shards = by_layer.get((id(modules[owner]), kind), {})
        if None in shards:
            continue
        for i, shard in enumerate(shards_of(modules[owner])):
            if shard not in shards:
                head, _, leaf = owner.rpartition(".")
                parts = packed.get(leaf, [leaf])
                missing.append(
                    ".".join(filter(None, [head, parts[i] if i < len(parts) else leaf, kind]))
                )
    return tuple(missing)


def by_module(
    model: torch.nn.Module, published: Published
) -> dict[tuple[int, str], dict[Shard, torch.Tensor]]:
    """Return published parts by (module id, parameter): a module may have two names, of which a
    version uses one.
    """
    # the modules inside LoRA layers
    modules = {unwrapped_name(n): m for n, m in model.named_modules(remove_duplicate=False)}
    split = ((name.rpartition("."), shards) for name, shards in published.items())
    return {
        (id(modules[owner]), kind): shards for (owner, _, kind), shards in split if owner in modules
    }


def repack_tied_heads(model: torch.nn.Module) -> None:
    """Repack an output layer from the embedding it shares.

    vLLM's reload packs a layer when its weights arrive; a tied head receives none, so on CPU it
    would keep multiplying with the packed copy of the old weights.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        VocabParallelEmbedding,
    )

    embeddings = [
        m
        for m in model.modules()
        if isinstance(m, VocabParallelEmbedding) and not isinstance(m, ParallelLMHead)
    ]
    for head in model.modules():
        if isinstance(head, ParallelLMHead) and any(head.weight is e.weight for e in embeddings):
            head.quant_method.process_weights_after_loading(head)


def probed_modules(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the layers whose arithmetic is known exactly: unquantized linear layers, heads,
    embeddings and norms.
    """
    from vllm.model_executor.layers import linear
    from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        UnquantizedEmbeddingMethod,
        VocabParallelEmbedding,
    )

    linears = {
        linear.ReplicatedLinear,
        linear.ColumnParallelLinear,
        linear.MergedColumnParallelLinear,
        linear.QKVParallelLinear,
        linear.RowParallelLinear,
        GateLinear,
    }
    for name, module in model.named_modules():
        plain_linear = type(module) in linears and isinstance(
            module.quant_method, linear.UnquantizedLinearMethod
        )
        plain_table = type(module) in {ParallelLMHead, VocabParallelEmbedding} and isinstance(
            module.quant_method, UnquantizedEmbeddingMethod
        )
        if (
            plain_linear
            or plain_table
            or (type(module) is RMSNorm and getattr(module, "weight", None) is not None)
        ):
            yield name, module


def sample_of(device: torch.device) -> int | None:
    """Return how many outputs of each weight a probe on `device` compares; None: all.

    For all of them every published weight would cross the bus to a GPU a second time.
    """
    return None if device.type == "cpu" else SAMPLE


def probe(
    model: torch.nn.Module,
    published: Published,
    device: torch.device,
    *,
    seed: int,
    sample: int | None = None,
) -> tuple[int, float, str]:
    """Return (layers probed, largest error relative to the output's scale, layer of that error).

    `sample`: see `sample_of`; the outputs are others for each `seed`.
    """
    random = torch.Generator().manual_seed(seed)
    count = 0
    error = (0.0, "")
    tied = {
        id(p): unwrapped_name(n)
        for n, p in reversed(list(model.named_parameters(remove_duplicate=False)))
        if p.numel()
    }
    by_layer = by_module(model, published)
    for name, module in probed_modules(model):
        parts = by_layer.get((id(module), "weight")) or published.get(
            tied.get(id(module.weight), "")
        )
        if parts is None:
            continue
        biases = by_layer.get((id(module), "bias"))
        got, want = _compare(module, parts, biases, device, random, sample)
        count += 1
        error = worst(error, (apart(got, want), name))
    return count, *error


def _compare(
    module: Any,
    parts: dict[Shard, torch.Tensor],
    biases: dict[Shard, torch.Tensor] | None,
    device: torch.device,
    random: torch.Generator,
    sample: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the layer's output and the output expected from the published weights, of all outputs
    or of a random `sample` of each part.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    local_parts = own_parts(module, parts)
    if not hasattr(module, "quant_method"):  # a norm
        return module.weight, local_parts[0].to(device)
    # an embedding: compare some rows
    if not hasattr(module, "input_size") and not isinstance(module, ParallelLMHead):
        rows = torch.randint(len(local_parts[0]), (64,), generator=random)
        return module.weight[rows.to(device)], local_parts[0][rows].to(device)
    dtype = module.params_dtype  # routers may be float32 in a bfloat16 model
    if local_parts[0].dim() > 2:  # a convolution kernel
        want = torch.cat(local_parts).to(device, dtype)
        return vars(module).get("_cpu_unpacked_conv_weight", module.weight).reshape(
            want.shape
        ), want
    sizes = [len(w) for w in local_parts]
    chosen = [
        torch.arange(n)
        if sample is None or n <= sample
        else torch.randint(n, (sample,), generator=random)
        for n in sizes
    ]
    x = torch.randn(PROBE_ROWS, local_parts[0].shape[1], generator=random).to(device, dtype)
    want = torch.cat(
        [x @ _taken(w, i).to(device, dtype).T for w, i in zip(local_parts, chosen, strict=True)],
        dim=-1,
    )
    bias = getattr(module, "bias", None) if biases else None
    if biases and bias is not None:
        local = zip(own_parts(module, biases), chosen, strict=True)
        want = want + torch.cat([_taken(b, i).to(device, dtype) for b, i in local])
    begins = [sum(sizes[:i]) for i in range(len(sizes))]
    outputs = torch.cat([at + i for at, i in zip(begins, chosen, strict=True)])
    return module.quant_method.apply(module, x, bias)[:, outputs.to(device)], want


def _taken(weight: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return weight if len(rows) == len(weight) else weight[rows]


def own_parts(module: Any, parts: dict[Shard, torch.Tensor]) -> list[torch.Tensor]:
    """Cut the published tensors ([out, in] or bias [out]) down to this tensor-parallel rank's part,
    in the layer's own order.
    """
    from vllm.model_executor.layers import linear

    if hasattr(module, "shard_indices"):  # rows of the vocabulary
        index = module.shard_indices
        return [parts[None][index.org_vocab_start_index : index.org_vocab_end_index]]
    if not isinstance(module, linear.LinearBase):
        return [parts[None]]
    rank = module.tp_rank
    ranks = module.tp_size
    if isinstance(module, linear.RowParallelLinear):
        weight = parts[None]
        return [weight.chunk(ranks, dim=1)[rank] if weight.dim() == 2 else weight]
    if isinstance(module, linear.QKVParallelLinear):
        heads = module.num_heads * module.head_size
        kv = module.num_kv_heads
        kv_rank = rank // module.num_kv_head_replicas
        kv_total = module.total_num_kv_heads
        totals = (
            module.total_num_heads * module.head_size,
            kv_total * module.head_size,
            kv_total * module.v_head_size,
        )
        cuts = [(rank * heads, heads)] + [
            (kv_rank * kv * size, kv * size) for size in (module.head_size, module.v_head_size)
        ]
        return [
            w.narrow(0, at, n)
            for w, (at, n) in zip(_split(parts, ("q", "k", "v"), totals), cuts, strict=True)
        ]
    if isinstance(module, linear.MergedColumnParallelLinear):
        sizes = tuple(module.output_sizes)
        return [w.chunk(ranks)[rank] for w in _split(parts, tuple(range(len(sizes))), sizes)]
    return [
        parts[None].chunk(ranks)[rank]
        if isinstance(module, linear.ColumnParallelLinear)
        else parts[None]
    ]


def _split(
    parts: dict[Shard, torch.Tensor], names: tuple[Shard, ...], sizes: tuple[int, ...]
) -> list[torch.Tensor]:
    """Return the parts of a merged layer, even if the checkpoint stores them merged."""
    return list(parts[None].split(sizes)) if None in parts else [parts[n] for n in names]


def shards_of(module: Any) -> tuple[Shard, ...]:
    from vllm.model_executor.layers import linear

    if isinstance(module, linear.QKVParallelLinear):
        return ("q", "k", "v")
    if isinstance(module, linear.MergedColumnParallelLinear):
        return tuple(range(len(module.output_sizes)))
    return (None,)


def _mapped(mapper: Any, name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    # a fresh view, because the mapper marks the tensor object with its shard
    return (
        [(name, tensor)]
        if mapper is None
        else list(mapper.apply([(name, tensor.view(tensor.shape))]))
    )


def _packed(model: torch.nn.Module) -> dict[str, list[str]]:
    mapping: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    return mapping


def _expert_prefixes(model: torch.nn.Module) -> Iterator[str]:
    """Yield the name prefixes of expert layers, which `place` and `absent` skip;
    `rft.engine.vllm_experts` verifies their tensors.
    """
    for name, _ in model.named_parameters():
        if name.endswith(("w13_weight", "w2_weight")):
            yield name.rpartition(".")[0].removesuffix(".routed_experts") + "."

"""vLLM's CPU worker with less work: lazily allocated KV cache, cheaper sampling, fused
normalization.

vLLM zeroes the whole cache at start: half a second per GiB, two seconds on a virtual machine whose
host allocates memory lazily.  New memory from the kernel is already zero, and comes in huge pages
where available, so that first use costs few page faults.

vLLM draws a random number per vocabulary token (Gumbel-max); one number per row gives the same
distribution.

vLLM normalizes with a dozen torch operations although it has a kernel for CPUs.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.cpu_worker import CPUWorker

from rft.engine.sampling import pick
from rft.engine.vllm_prompts import SharedPrompts

_LARGE = 1 << 20  # bytes


class CacheWorker(CPUWorker):
    prompts: SharedPrompts | None  # None: each request computes its whole prompt

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        with _NewMemory():
            super().initialize_from_config(kv_cache_config)
        self.prompts = SharedPrompts.for_worker(self, kv_cache_config)
        sampler = self.model_runner.sampler
        sampler.gather_logprobs = _gather_logprobs
        sampler.topk_topp_sampler.forward = partial(
            _sample, sampler.topk_topp_sampler.logprobs_mode
        )

    def load_model(self, **kwargs: Any) -> None:
        super().load_model(**kwargs)
        kind = self.model_config
        # in shorter dtypes the kernel would round in another order
        if kind.enforce_eager and kind.dtype == torch.float32:
            for layer in self.get_model().modules():
                if type(layer) is RMSNorm and layer.pass_weight:
                    layer._forward_method = partial(_normalized, layer)

    def execute_model(self, scheduler_output: Any) -> Any:
        if self.prompts is not None:
            scheduler_output = self.prompts.shorten(scheduler_output)
        return super().execute_model(scheduler_output)


def _normalized(
    layer: RMSNorm, x: torch.Tensor, residual: torch.Tensor | None = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return RMSNorm of `x` [N, H] with vLLM's kernel; with a residual [N, H], normalize the sum in
    place.
    """
    x = x.contiguous()
    if residual is None:
        out = torch.empty_like(x)
        torch.ops._C.rms_norm(out, x, layer.weight, layer.variance_epsilon)
        return out
    torch.ops._C.fused_add_rms_norm(x, residual, layer.weight, layer.variance_epsilon)
    return x, residual


def _sample(
    mode: str,
    logits: torch.Tensor,
    generators: dict[int, torch.Generator],
    k: torch.Tensor | None,
    p: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return tokens [N] from logits [N, V], and the logits or log-probs that vLLM expects in this
    mode.
    """
    logits = apply_top_k_top_p(logits, k, p)
    logprobs = logits.log_softmax(-1, dtype=torch.float32)
    uniform = torch.rand(len(logits), dtype=torch.float64)
    for row, generator in generators.items():
        uniform[row] = torch.rand((), generator=generator, dtype=torch.float64)
    return pick(logprobs, uniform), {
        "processed_logits": logits,
        "processed_logprobs": logprobs,
    }.get(mode)


def _gather_logprobs(
    logprobs: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor
) -> LogprobsTensors:
    """Return the log-probs float32 [N, 1] of tokens [N] from [N, V].

    vLLM's version also computes the rank of each token, which is not used.
    """
    if num_logprobs:
        return Sampler.gather_logprobs(logprobs, num_logprobs, token_ids)
    ids = token_ids.unsqueeze(-1)
    return LogprobsTensors(
        ids.to(torch.int32), logprobs.gather(-1, ids), torch.zeros_like(token_ids)
    )


class _NewMemory(TorchFunctionMode):
    """Replaces large `torch.zeros` by fresh memory of the kernel."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (
            func is torch.zeros
            and kwargs.get("dtype") is torch.int8
            and isinstance(args[0], int)
            and args[0] >= _LARGE
        ):
            memory = mmap.mmap(-1, args[0], flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with suppress(OSError):  # the kernel may have no huge pages
                memory.madvise(mmap.MADV_HUGEPAGE)
            return torch.frombuffer(memory, dtype=torch.int8)
        return func(*args, **kwargs)

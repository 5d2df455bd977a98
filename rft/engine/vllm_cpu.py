"""vLLM's worker on CPUs, whose cache for keys and values takes memory where it is used first, and
which does less work.

vLLM writes zeros over the whole cache when it starts: half a second for each GiB, two on a virtual
machine whose host gives it memory late. New memory from the kernel is zero as well.  It comes in
huge pages where the kernel has them, so that the first use costs few page faults.

vLLM draws a random number for each token of the vocabulary (Gumbel-max); one for each row gives the
same distribution.

vLLM normalizes with a dozen operations of torch where it has a kernel for CPUs as well.
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
    prompts: SharedPrompts | None  # None: each request computes all of its own

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        with _NewMemory():
            super().initialize_from_config(kv_cache_config)
        self.prompts = SharedPrompts.of(self, kv_cache_config)
        sampler = self.model_runner.sampler
        sampler.gather_logprobs = _gathered
        sampler.topk_topp_sampler.forward = partial(_drawn, sampler.topk_topp_sampler.logprobs_mode)

    def load_model(self, **kwargs: Any) -> None:
        super().load_model(**kwargs)
        kind = self.model_config
        # shorter types would be rounded in another order
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
    """[N, H] times weights / root mean square, with vLLM's kernel; with a residual [N, H] of their
    sum, in place.
    """
    x = x.contiguous()
    if residual is None:
        out = torch.empty_like(x)
        torch.ops._C.rms_norm(out, x, layer.weight, layer.variance_epsilon)
        return out
    torch.ops._C.fused_add_rms_norm(x, residual, layer.weight, layer.variance_epsilon)
    return x, residual


def _drawn(
    mode: str,
    logits: torch.Tensor,
    generators: dict[int, torch.Generator],
    k: torch.Tensor | None,
    p: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Tokens [N] from logits [N, V], and what vLLM wants beside them in this mode of log-probs."""
    logits = apply_top_k_top_p(logits, k, p)
    logprobs = logits.log_softmax(-1, dtype=torch.float32)
    uniform = torch.rand(len(logits), dtype=torch.float64)
    for row, generator in generators.items():
        uniform[row] = torch.rand((), generator=generator, dtype=torch.float64)
    return pick(logprobs, uniform), {
        "processed_logits": logits,
        "processed_logprobs": logprobs,
    }.get(mode)


def _gathered(
    logprobs: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor
) -> LogprobsTensors:
    """float32 [N, 1] of tokens [N] from [N, V].  vLLM's own also counts the more probable tokens,
    which nobody reads.
    """
    if num_logprobs:
        return Sampler.gather_logprobs(logprobs, num_logprobs, token_ids)
    ids = token_ids.unsqueeze(-1)
    return LogprobsTensors(
        ids.to(torch.int32), logprobs.gather(-1, ids), torch.zeros_like(token_ids)
    )


class _NewMemory(TorchFunctionMode):
    """`torch.zeros` for many bytes is memory that nobody has touched."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (
            func is torch.zeros
            and kwargs.get("dtype") is torch.int8
            and isinstance(args[0], int)
            and args[0] >= _LARGE
        ):
            memory = mmap.mmap(-1, args[0], flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with suppress(OSError):  # a kernel without huge pages
                memory.madvise(mmap.MADV_HUGEPAGE)
            return torch.frombuffer(memory, dtype=torch.int8)
        return func(*args, **kwargs)

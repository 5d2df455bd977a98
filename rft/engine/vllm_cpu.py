"""vLLM's worker on CPUs, whose cache for keys and values takes memory where it is used first, and which ranks no token.

vLLM writes zeros over the whole cache when it starts: half a second for each GiB, two on a virtual machine whose host gives it memory late.
New memory from the kernel is zero as well.  It comes in huge pages where the kernel has them, so that the first use costs few page faults.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.cpu_worker import CPUWorker

_LARGE = 1 << 20  # bytes


class CacheWorker(CPUWorker):
    def initialize_from_config(self, kv_cache_config: Any) -> None:
        with _NewMemory():
            super().initialize_from_config(kv_cache_config)
        self.model_runner.sampler.gather_logprobs = _gathered


def _gathered(logprobs: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor) -> LogprobsTensors:
    """float32 [N, 1] of tokens [N] from [N, V].  vLLM's own also counts the more probable tokens, which nobody reads."""
    if num_logprobs:
        return Sampler.gather_logprobs(logprobs, num_logprobs, token_ids)
    ids = token_ids.unsqueeze(-1)
    return LogprobsTensors(ids.to(torch.int32), logprobs.gather(-1, ids), torch.zeros_like(token_ids))


class _NewMemory(TorchFunctionMode):
    """`torch.zeros` for many bytes is memory that nobody has touched."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.zeros and kwargs.get("dtype") is torch.int8 and isinstance(args[0], int) and args[0] >= _LARGE:
            memory = mmap.mmap(-1, args[0], flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with suppress(OSError):  # a kernel without huge pages
                memory.madvise(mmap.MADV_HUGEPAGE)
            return torch.frombuffer(memory, dtype=torch.int8)
        return func(*args, **kwargs)

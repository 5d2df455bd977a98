"""vLLM's worker on CPUs, whose cache for keys and values takes memory where it is used first.

vLLM writes zeros over the whole cache when it starts: half a second for each GiB, two on a virtual machine whose host gives it memory late.
New memory from the kernel is zero as well.
"""

from __future__ import annotations

import mmap
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from vllm.v1.worker.cpu_worker import CPUWorker

_LARGE = 1 << 20  # bytes


class CacheWorker(CPUWorker):
    def initialize_from_config(self, kv_cache_config: Any) -> None:
        with _NewMemory():
            super().initialize_from_config(kv_cache_config)


class _NewMemory(TorchFunctionMode):
    """`torch.zeros` for many bytes is memory that nobody has touched."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.zeros and kwargs.get("dtype") is torch.int8 and isinstance(args[0], int) and args[0] >= _LARGE:
            return torch.frombuffer(mmap.mmap(-1, args[0], flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.int8)
        return func(*args, **kwargs)

"""Eight GPUs of one generation, as far as vLLM asks before it computes."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

MEMORY = 80 << 30
UNITS = 132  # that compute


def install(capability: tuple[int, int]) -> None:
    """Let vLLM and torch see GPUs of `capability`; call it before anything else of vLLM."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    import vllm.platforms as platforms
    from vllm.platforms import cuda
    from vllm.platforms.interface import DeviceCapability

    answers: dict[str, Any] = {
        "get_device_capability": DeviceCapability(*capability),
        "get_device_name": "NVIDIA H100 80GB HBM3",
        "get_device_total_memory": MEMORY,
        "get_device_uuid": "GPU-0",
        "device_count": 8,
        "is_fully_connected": True,
        "log_warnings": None,
        "set_device": None,
        "num_compute_units": UNITS,
    }
    methods = {
        name: classmethod(lambda cls, *_, answer=answer, **__: answer)  # type: ignore[misc]
        for name, answer in answers.items()
    }
    platforms._current_platform = type("FakeGpus", (cuda.NonNvmlCudaPlatform,), methods)()
    properties = SimpleNamespace(
        name=answers["get_device_name"],
        major=capability[0],
        minor=capability[1],
        total_memory=MEMORY,
        multi_processor_count=UNITS,
        shared_memory_per_block_optin=232448,
        L2_cache_size=50 << 20,
        warp_size=32,
    )
    for module, name, answer in (
        (torch.cuda, "get_device_capability", capability),
        (torch.cuda, "device_count", 8),
        (torch.cuda, "is_available", True),
        (torch.cuda, "get_device_properties", properties),
        (torch.cuda, "current_device", 0),
        (torch.accelerator, "device_count", 8),
        (torch.accelerator, "current_device_index", 0),
    ):
        setattr(module, name, lambda *_, answer=answer, **__: answer)

    from vllm.model_executor.models import registry

    # otherwise each model class is looked at in a process of its own, which imports vLLM
    registry._run_in_subprocess = lambda look: look()

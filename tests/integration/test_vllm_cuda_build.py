"""vLLM's CUDA build takes the settings of engines, on faked GPUs of three generations.

`make test-cuda-build` installs it beside .venv; elsewhere these tests are skipped by name.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import cuda_build
from tests.helpers.model_sizes import MODELS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not cuda_build.PYTHON, reason="needs make test-cuda-build"),
    pytest.mark.skipif(cuda_build.COMPILER is None, reason="needs gcc or clang"),
]
MODEL = {
    **MODELS["qwen3-8b"],
    "architectures": ["Qwen3ForCausalLM"],
    "torch_dtype": "bfloat16",
}
# settings, and what they change in vLLM's configuration
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "default": ({}, {"graphs": True}),
    "four ranks": ({"tensor_parallel_size": 4}, {"ranks": [4, 1]}),
    "two stages": ({"pipeline_parallel_size": 2}, {"ranks": [1, 2]}),
    "sleep level 2": ({"sleep_level": 2}, {"sleep": True}),
    "sleep level 1, adapter": ({"sleep_level": 1, "lora_rank": 16}, {"sleep": True}),
    "adapter": ({"lora_rank": 16}, {"lora": [16, False]}),
    "sharded adapter": (
        {"lora_rank": 16, "fully_sharded_loras": True, "tensor_parallel_size": 2},
        {"lora": [16, True], "ranks": [2, 1]},
    ),
    "eager": ({"enforce_eager": True}, {"graphs": False}),
    "whole prompts": ({"enable_chunked_prefill": False}, {}),
    "float32": ({"dtype": "float32"}, {"dtype": "float32"}),
    "float16": ({"dtype": "float16"}, {"dtype": "float16"}),
    "blocks of 32": ({"block_size": 32}, {}),
    "bytes of cache": ({"kv_cache_bytes": 64 << 20}, {"cache": 64 << 20}),
    "no prefix cache": ({"enable_prefix_caching": False}, {}),
}
AS_WRITTEN = {
    "runner": "V2",
    "ranks": [1, 1],
    "async": True,
    "sleep": False,
    "dtype": "bfloat16",
    "cache": None,
}


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cuda_build.driver(tmp_path_factory.mktemp("driver"))


@pytest.mark.parametrize("generation", cuda_build.GENERATIONS)
def test_every_setting_reaches_the_cuda_build(
    generation: str, driver: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    common = {
        "engine_type": "vllm",
        "model_path": str(tmp_path),
        "device": "cuda",
        "dtype": "bfloat16",
        "max_model_len": 9216,
        "enforce_eager": False,
    }
    lines = [json.dumps(common | settings) for settings, _ in SETTINGS.values()]
    capability = cuda_build.GENERATIONS[generation]
    found = cuda_build.play("engine_settings", driver, [capability], lines)
    wrong = [
        f"{name}: {made.get('error') or f'{key} is {made[key]}, not {value}'}"
        for (name, (_, changed)), made in zip(SETTINGS.items(), found, strict=True)
        for key, value in (AS_WRITTEN | changed).items()
        if "error" in made or made[key] != value
    ]
    assert not wrong, "\n".join(dict.fromkeys(wrong))

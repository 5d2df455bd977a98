"""vLLM's CUDA build, on faked GPUs: settings of engines, weights of many families, the sampler of
Model Runner V2; and the trainer's tests with its Python and torch.

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


# in bfloat16; those with experts in float32, the type in which Triton's interpreter is right
DENSE = (
    "llama qwen2 qwen3 phi3 olmo2 granite glm4 smollm3 stablelm nemotron gemma gpt_neox starcoder2 "
    "seed_oss opt ernie4_5 hunyuan_v1_dense mistral ministral olmo3 exaone4 cohere cohere2 gemma2 "
    "gemma3_text"
).split()
EXPERTS = ("qwen3_moe", "mixtral", "olmoe", "gpt_oss")
LIMITS = {"bfloat16": 5e-2, "float32": 1e-5}  # of a probe, relative to a layer's output


@pytest.fixture(scope="module")
def loads(driver: Path) -> dict[str, dict[str, Any]]:
    """What `weight_loads` says of each family, and of one with a tensor that no version holds."""
    asked: dict[str, dict[str, Any]] = {
        **{name: {"family": name, "dtype": "bfloat16"} for name in DENSE},
        **{name: {"family": name, "dtype": "float32"} for name in EXPERTS},
        "forgotten": {"family": "qwen3", "dtype": "bfloat16", "forgotten": True},
    }
    found = cuda_build.play("weight_loads", driver, ["9.0"], map(json.dumps, asked.values()))
    return {name: {**asked[name], **made} for name, made in zip(asked, found, strict=True)}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", [*DENSE, *EXPERTS])
def test_weights_are_in_their_place_after_a_sleep_that_dropped_them(
    family: str, loads: dict[str, dict[str, Any]]
) -> None:
    """Every tensor of the model is, bit for bit, what vLLM itself loads from a checkpoint."""
    made = loads[family]
    assert "error" not in made, made
    for whole, layers, error in made["reports"]:
        assert whole and layers > 4 and error < LIMITS[made["dtype"]], made
    assert made["dropped"] == [] and made["other"] == [], made
    assert made["kernels"] == ["TritonExperts"] * (family in EXPERTS)


def test_a_tensor_that_no_version_restores_is_found(loads: dict[str, dict[str, Any]]) -> None:
    assert loads["forgotten"]["dropped"] == [".scale"]


SAMPLINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.7},
    {"temperature": 1.3},
    {"temperature": 0.0},
    {"top_k": 5},
    {"top_p": 0.8, "temperature": 0.9},
    {"min_p": 0.1},
    {"top_k": 7, "top_p": 0.9, "temperature": 1.2},
    {"presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"repetition_penalty": 1.3, "temperature": 0.8, "top_p": 0.95},
)
CHANCE = 26.1  # chi-squared with 8 degrees of freedom: 1 of 1,000 right samplers is above


def rows_of(sampling: dict[str, Any], seed: int) -> dict[str, Any]:
    prompt = [(7 * seed + i) % 9 for i in range(4)]
    return {"sampling": {**sampling, "seed": seed}, "prompt": prompt, "written": [1, 3, 3]}


def test_the_second_model_runner_draws_from_what_the_trainer_computes(driver: Path) -> None:
    """Its Triton kernels, interpreted: in steps with requests of every kind, and in many draws from
    one distribution.
    """
    rows = [rows_of(sampling, seed) for seed in range(7) for sampling in SAMPLINGS]
    many = [rows_of({"temperature": 0.7, "top_p": 0.99}, seed) for seed in range(400)]
    few = len(rows) // 2  # up to 64 rows have kernels of their own for top_p
    asked: list[dict[str, Any]] = [
        {"rows": rows[:few], "size": 640},
        {"rows": rows, "size": 640},
        {"rows": many, "size": 9, "alike": True},
    ]
    first, second, alike = cuda_build.play("sampler", driver, ["9.0"], map(json.dumps, asked))
    for made in (first, second):
        for got, right, row in zip(made["logprobs"], made["right"], rows, strict=False):
            assert got == pytest.approx(right, abs=1e-5), row
    assert first["tokens"] == second["tokens"][:few], "a seed decides, not the rest of a step"
    counted = [alike["tokens"].count(token) for token in range(9)]
    expected = [p * len(many) for p in alike["probabilities"]]
    assert all(n == 0 for n, e in zip(counted, expected, strict=True) if e == 0)
    apart = sum((n - e) ** 2 / e for n, e in zip(counted, expected, strict=True) if e)
    assert apart < CHANCE, (counted, expected)


@pytest.mark.timeout(5400)
@pytest.mark.parametrize("folder", ["golden", "unit/trainer", "unit/sync", "unit/engine"])
def test_other_tests_pass_with_this_torch(folder: str, driver: Path) -> None:
    command = ["-m", "pytest", "-q", "-n", "0", "-m", "not slow and not e2e", f"tests/{folder}"]
    run = cuda_build.run(command, driver)
    assert run.returncode == 0, run.stdout[-6000:]

"""Families in real engines, as `rft doctor --model` and scripts/model_table.py try them; and what a
trainer exports, served by vLLM.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from rft.engine.built_in import make
from rft.engine.environment import cpu_environment
from rft.engine.settings import EngineSettings
from rft.engine.vllm import VllmEngine
from rft.engine.vllm_args import engine_args
from rft.extras.doctor import model_check
from rft.testing.engine_contract import ask
from rft.trainer.loop.learner import Learner
from rft.trainer.settings import LearnerSettings
from tests.helpers import families

# vLLM's imports are full of other people's deprecations
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("family", ["olmoe", pytest.param("gemma3_text", marks=pytest.mark.slow)])
def test_a_family_is_served_through_a_weight_sync(family: str, tmp_path: Path) -> None:
    """Two versions of a trainer: hashes, layer probes and canary of each, and tokens against plain
    rows of transformers.
    """
    folder = families.make(family, tmp_path / "m", words=True)
    report = model_check.compare(
        folder, "cpu", engines=("transformers", "vllm"), layouts=(), objectives=()
    )
    assert [(line.what, line.verdict) for line in report.lines] == [
        ("transformers engine", "exact"),
        ("vllm engine", "exact"),
    ]
    assert all(line.logprobs is not None and 0 < line.logprobs < 1e-4 for line in report.lines)


async def test_an_exported_mixture_of_experts_is_served_as_it_is(
    tmp_path: Path, environment: pytest.MonkeyPatch
) -> None:
    base = families.make("qwen3_moe", tmp_path / "base", words=True)
    learner = Learner(LearnerSettings(model_path=str(base), row_layout="padded"))
    with torch.no_grad():
        for parameter in learner.policy.names().values():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    out = tmp_path / "out"
    out.mkdir()
    learner.export(str(out))
    settings = EngineSettings(
        model_path=str(out),
        max_model_len=100,
        max_num_seqs=4,
        kv_cache_bytes=1 << 26,
        fixed_weights=True,
    )
    for name, value in cpu_environment(settings).items():
        environment.setenv(name, value)
    engine = await VllmEngine.start(settings)
    try:
        (c,) = await engine.generate(ask(max_tokens=24, ignore_eos=True))
    finally:
        await engine.close()
    ids = torch.from_numpy(np.concatenate([c.prompt_tokens, c.tokens]).astype(np.int64))[None]
    with torch.no_grad():
        logits = learner.policy.lm(ids, use_cache=False).logits[0, len(c.prompt_tokens) - 1 : -1]
    want = logits.log_softmax(-1).gather(1, ids[0, len(c.prompt_tokens) :, None])[:, 0].numpy()
    assert np.abs(want - c.logprobs).max() < 1e-4


async def test_a_library_of_the_users_registers_the_models_classes(
    tmp_path: Path, environment: pytest.MonkeyPatch
) -> None:
    """In this process and in vLLM's own, where the classes of `config` alone would be there and not
    be registered.
    """
    folder, library = families.with_own_class(tmp_path, vllm=True)
    environment.syspath_prepend(str(tmp_path))
    sizes = {"max_model_len": 100, "max_num_seqs": 4, "kv_cache_bytes": 1 << 26}
    settings = EngineSettings(
        model_path=str(folder), external_lib=library, fixed_weights=True, **sizes
    )
    for name, value in cpu_environment(settings).items():
        environment.setenv(name, value)
    engine = await make(settings)
    try:
        (c,) = await engine.generate(ask(max_tokens=4, ignore_eos=True))
    finally:
        await engine.close()
    assert len(c.tokens) == 4


@pytest.mark.parametrize(
    ("config", "dtype", "chosen"),
    [
        ({"kv_lora_rank": 512}, "float32", "CPU_MLA"),
        ({"kv_lora_rank": 512}, "bfloat16", None),
        ({}, "float32", None),
    ],
)
def test_latent_attention_in_float32_is_not_left_to_amx(
    config: dict[str, int], dtype: str, chosen: str | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = engine_args(EngineSettings(model_path=str(tmp_path), dtype=dtype)).attention_backend
    assert (found if found is None else getattr(found, "name", found)) == chosen


def test_the_language_model_of_a_whole_is_served_alone(tmp_path: Path) -> None:
    """Where it is trained: its weights come with the first version.  A model that stays as it is,
    is served whole.
    """
    folder = str(families.with_tower("qwen3_5", tmp_path / "m"))
    more = {"hf_overrides": {"max_position_embeddings": 64}}
    args = engine_args(EngineSettings(model_path=folder, extra_engine_args=more))
    assert args.load_format == "dummy"
    assert args.hf_overrides["architectures"] == ["Qwen3_5ForCausalLM"] and "64" in str(
        args.hf_overrides
    )
    chosen = engine_args(
        EngineSettings(
            model_path=folder, extra_engine_args={"hf_overrides": {"architectures": ["Own"]}}
        )
    )
    assert chosen.load_format == "auto" and chosen.hf_overrides == {"architectures": ["Own"]}
    whole = engine_args(EngineSettings(model_path=folder, fixed_weights=True))
    assert whole.load_format == "auto" and not whole.hf_overrides

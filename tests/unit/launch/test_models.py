"""Auxiliary models as the explorer gets them: every name, each model once, clients of servers
closed again; the policy's vocabulary.
"""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from rft.config.load import from_dict
from rft.config.plan import Facts
from rft.config.resolve import resolve
from rft.engine.pool import EnginePool
from rft.engine.scripted import ScriptedEngine
from rft.errors import ConfigError, EngineFailed
from rft.launch.parts import _models
from rft.launch.start import probe_prompts
from rft.testing.engine_contract import ask
from rft.trainer.rows.prefix import shared_length
from rft.types.modelfiles import vocab_size


async def test_names_and_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("URL", "http://127.0.0.1:9/v1")
    external = {"base_url_env": "URL", "max_retries": 0}
    config: dict[str, Any] = {
        "model": {"model_path": "m", "max_prompt_tokens": 9, "max_response_tokens": 9},
        "buffer": {
            "total_steps": 1,
            "explorer_input": {"default_workflow_type": "w", "taskset": {"path": "x.jsonl"}},
        },
        "explorer": {
            "auxiliary_models": [
                {
                    "name": "a",
                    "model_path": "J",
                    "engine_type": "scripted",
                    "engine_num": 2,
                    "max_concurrent": 3,
                },
                {
                    "name": "b",
                    "model_path": "J",
                    "engine_type": "scripted",
                    "engine_num": 2,
                    "max_concurrent": 3,
                },
                {
                    "name": "api",
                    "model_path": "gpt",
                    "engine_type": "external",
                    "external_model_config": external,
                },
            ]
        },
    }
    plan = resolve(from_dict(config), Facts(cpus=2, gpus=0))
    async with AsyncExitStack() as clients:
        models: dict[str, Any] = await _models(
            plan, [[ScriptedEngine("one"), ScriptedEngine("two")], []], clients
        )
        assert list(models) == ["a", "b", "api"] and models["a"] is models["b"]
        assert (await models["a"].generate(ask()))[0].text in ("one", "two")
        (client,) = models["api"].engines
        assert isinstance(models["api"], EnginePool) and client.settings.name == "aux-api-0"
        with pytest.raises(EngineFailed, match="no answer after 1 requests"):
            await models["api"].generate(ask())
    with pytest.raises(EngineFailed, match="closed"):
        await client.health()


def test_how_many_tokens_a_model_knows(tmp_path: Path) -> None:
    """Configurations of models that also take images leave out what is their family's default, as
    Gemma 3's.
    """
    save_file(
        {"language_model.model.embed_tokens.weight": np.zeros((12, 4), np.float32)},
        tmp_path / "model.safetensors",
    )
    for config, size in (
        ({"vocab_size": 9}, 9),
        ({"text_config": {"vocab_size": 7}}, 7),
        ({"text_config": {"hidden_size": 4}}, 12),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert vocab_size(tmp_path) == size
    save_file({"x": np.zeros(1, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="does not give its vocab_size"):
        vocab_size(tmp_path)


def test_four_probes_in_a_row_share_their_prompt(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 400}))
    prompts = probe_prompts(str(tmp_path), 9, 0)
    assert [prompts.index(p) for p in prompts] == [0, 0, 0, 0, 4, 4, 4, 4, 8]
    assert all(len(p) == 8 and {*p} <= {*range(100, 300)} for p in prompts)
    rows = [np.array([*p, *range(i * 7, i * 7 + 7)], np.int32) for i, p in enumerate(prompts[:8])]
    assert shared_length(rows) == 2 * 8 + 8 * 7, "what docs/decisions/0004-canary.md says"

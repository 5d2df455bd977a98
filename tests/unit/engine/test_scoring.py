"""Log-probs of given tokens, and the numbers of models with a classification head."""

from __future__ import annotations

import asyncio
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rft.engine import rowbatch as engine_module
from rft.engine.base import PromptTooLong
from rft.engine.built_in import make
from rft.engine.scripted import ScriptedEngine
from rft.engine.settings import EngineSettings
from rft.errors import ConfigError, EngineFailed, SetupError
from rft.testing import tiny
from rft.testing.engine_contract import ask
from rft.types.ports import ScoreRow


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(tmp_path_factory.mktemp("scorer") / "rm", labels=2)


def settings(folder: Path, **more: Any) -> EngineSettings:
    given: dict[str, Any] = {
        "engine_type": "transformers",
        "name": "aux-t-0",
        "max_model_len": 200,
        "fixed_weights": True,
    }
    return EngineSettings(model_path=str(folder), **{**given, **more})


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_transformers_scores_given_tokens(
    tiny_model: Path, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(engine_module, "SCORE_BYTES", 4 * 259 * 7)  # seven positions at a time
    engine = await make(settings(tiny_model))
    (c,) = await engine.generate(ask(max_tokens=30, temperature=temperature))
    row = ScoreRow(
        tokens=np.concatenate([c.prompt_tokens, c.tokens]),
        prompt_length=len(c.prompt_tokens),
        temperature=temperature,
    )
    got = (await engine.score(row)).logprobs
    assert got.dtype == np.float32 and got.shape == c.logprobs.shape
    assert np.abs(got - c.logprobs).max() < 1e-4
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    ids = torch.from_numpy(row.tokens.astype(np.int64))[None]
    with torch.no_grad():
        want = (model(ids).logits[0, row.prompt_length - 1 : -1] / temperature).log_softmax(-1)
    assert (
        np.abs(got - want.gather(1, ids[0, row.prompt_length :, None])[:, 0].numpy()).max() < 1e-4
    )
    with pytest.raises(ValueError, match="prompt_length 0"):
        await engine.score(ScoreRow(tokens=row.tokens, prompt_length=0))
    with pytest.raises(ValueError, match="raise its max_model_len"):
        await engine.score(ScoreRow(tokens=np.zeros(201, np.int32), prompt_length=3))
    with pytest.raises(ValueError, match="task: score"):
        await engine.classify([{"role": "user", "content": "hi"}])
    await engine.close()


async def test_scripted_scores_as_it_would_have_written() -> None:
    engine = ScriptedEngine("hello there")
    (c,) = await engine.generate(ask(max_tokens=30))
    row = ScoreRow(
        tokens=np.concatenate([c.prompt_tokens, c.tokens]), prompt_length=len(c.prompt_tokens)
    )
    assert ((await engine.score(row)).logprobs == c.logprobs).all()


def chats() -> list[list[dict[str, str]]]:
    rng = random.Random(3)
    words = lambda: "".join(rng.choices("abcdef ", k=rng.randint(1, 60)))  # noqa: E731
    return [
        [{"role": "user", "content": words()}, {"role": "assistant", "content": words()}]
        for _ in range(24)
    ]


@pytest.mark.parametrize("pad", [True, False], ids=["padded", "one by one"])
async def test_scores_are_the_models_logits(scorer: Path, pad: bool) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    engine: Any = await make(settings(scorer, task="score", max_num_seqs=6))
    if not pad:
        engine._pad = None
    got = await asyncio.gather(*(engine.classify(c) for c in chats()))
    model: Any = AutoModelForSequenceClassification.from_pretrained(scorer, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(scorer)
    for scores, chat in zip(got, chats(), strict=True):
        ids = tokenizer.apply_chat_template(
            chat, tokenize=True, return_dict=False, return_tensors="pt"
        )
        with torch.no_grad():
            want = model(ids).logits[0]
        assert len(scores) == 2
        assert np.abs(np.array(scores) - want.numpy()).max() < 1e-4
    counted = {m.name: m.value for m in await engine.metrics()}
    assert (
        counted["engine/batches"] == (24 if not pad else counted["engine/batches"])
        and counted["engine/requests"] == 24
    )
    assert not pad or counted["engine/batches"] <= 8
    with pytest.raises(PromptTooLong):
        await engine.classify([{"role": "user", "content": "x" * 300}])
    with pytest.raises(ValueError, match="no answers"):
        await engine.generate(ask())
    await engine.close()
    with pytest.raises(EngineFailed, match="closed"):
        await engine.classify(chats()[0])


async def test_a_model_without_a_head_is_refused(tiny_model: Path, scorer: Path) -> None:
    with pytest.raises(SetupError, match="needs one with a classification head"):
        await make(settings(tiny_model, task="score"))
    with pytest.raises(ConfigError, match="gives no scores"):
        await make(replace(settings(scorer, task="score"), engine_type="scripted"))


async def test_weights_that_are_not_there_are_not_made_up(
    tiny_model: Path, scorer: Path, tmp_path: Path
) -> None:
    """A head with two layers, as some reward models have it, or none: transformers would draw one."""
    from safetensors.numpy import load_file, save_file

    for kind, whole, task in (("rm", scorer, "score"), ("lm", tiny_model, "generate")):
        folder = shutil.copytree(whole, tmp_path / kind)
        weights = load_file(folder / "model.safetensors")
        lost = "score.weight" if task == "score" else "model.layers.1.mlp.up_proj.weight"
        weights[f"{lost}.0"] = weights.pop(lost)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(SetupError, match=f"has no weights for {lost}"):
            await make(settings(folder, task=task))

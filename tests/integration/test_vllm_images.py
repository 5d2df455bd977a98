"""vLLM's answers to prompts with images have the log-probs that transformers gives."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path

import numpy as np
import pytest

from rft.engine.built_in import make
from rft.engine.chat import load_images
from rft.engine.environment import cpu_environment
from rft.engine.settings import EngineSettings
from rft.engine.vllm_args import engine_args
from rft.monitor.read import read, series
from rft.testing import tiny_vision
from rft.types.images import Image
from rft.types.ports import GenerateRequest, ScoreRow
from rft.types.task import SamplingArgs
from tests.helpers import runs

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]
PICTURES = (
    Image.of(tiny_vision.picture((220, 30, 30), size=(32, 16))),
    Image.of(tiny_vision.picture((40, 60, 220), size=(16, 24))),
)


def ask(*images: Image) -> GenerateRequest:
    content = [*(x.part for x in images), {"type": "text", "text": "hi"}]
    return GenerateRequest(
        messages=({"role": "user", "content": content},),
        images=images,
        sampling=SamplingArgs(max_tokens=6, seed=1),
    )


def test_pixel_values_are_not_normalized_again(tmp_path: Path) -> None:
    settings = EngineSettings(model_path=str(tmp_path))
    assert engine_args(settings, images=True).mm_device_do_normalize is False


@pytest.mark.slow  # an engine for each family
@pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None, reason="vLLM's Qwen towers import torchvision"
)
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
async def test_images_have_the_log_probs_of_transformers(
    family: str, tmp_path: Path, environment: pytest.MonkeyPatch
) -> None:
    import torch
    from transformers import AutoModelForImageTextToText

    settings = EngineSettings(
        model_path=str(tiny_vision.make(tmp_path / "model", family)),
        max_model_len=200,
        max_num_seqs=8,
        kv_cache_bytes=1 << 26,
        fixed_weights=True,
    )
    for name, value in cpu_environment(settings).items():
        environment.setenv(name, value)
    shown = [PICTURES[:1], PICTURES[1:], PICTURES, ()]
    engine = await make(settings)
    try:
        answers = await asyncio.gather(*(engine.generate(ask(*images)) for images in shown))
        scores = [
            await engine.score(
                ScoreRow(
                    tokens=np.concatenate([answer.prompt_tokens, answer.tokens]),
                    prompt_length=len(answer.prompt_tokens),
                    places=answer.images,
                    images=images,
                )
            )
            for images, (answer,) in zip(shown, answers, strict=True)
        ]
    finally:
        await engine.close()
    processor = load_images(settings)
    assert processor is not None
    seen = {x.sha256: processor.process(x.data) for x in PICTURES}
    model = AutoModelForImageTextToText.from_pretrained(settings.model_path).eval()
    for images, (answer,), score in zip(shown, answers, scores, strict=True):
        ids = torch.tensor([[*answer.prompt_tokens, *answer.tokens]])
        types = torch.zeros_like(ids)
        for place in answer.images:
            types[0, place.start : place.start + place.length] = 1
        inputs = {}
        if images:
            pixels = np.concatenate([seen[x.sha256].pixel_values for x in images])
            inputs = {
                "pixel_values": torch.from_numpy(pixels),
                "image_grid_thw": torch.tensor([seen[x.sha256].grid for x in images]),
                "mm_token_type_ids": types,
            }
        with torch.no_grad():
            logits = model(input_ids=ids, **inputs).logits[0, len(answer.prompt_tokens) - 1 : -1]
        wanted = logits.log_softmax(-1).gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
        assert len(answer.images) == len(images)
        for given in (answer.logprobs, score.logprobs):
            assert np.abs(wanted.numpy() - given).max() <= 1e-5


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None, reason="vLLM's Qwen towers import torchvision"
)
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_a_run_on_pictures_trains_and_loads(family: str, launch, tmp_path: Path) -> None:
    arguments = (
        *runs.arguments(tiny_vision.make(tmp_path / "model", family), tmp_path, *runs.SMALL),
        runs.parity(tmp_path),
        "buffer.explorer_input.eval_tasksets=[]",
        "buffer.explorer_input.taskset.path=rft.testing.tiny_vision:colour_tasks",
        "buffer.explorer_input.taskset.format.image_key=images",
        "explorer.rollout_model.engine_type=vllm",
        "trainer.total_steps=3",
    )
    run = launch(*arguments)
    assert run.end(300) == 0, run.output
    records = read(runs.folder(tmp_path) / "metrics.jsonl")
    for name in ("mismatch/abs_diff_max", "sync/canary_max_abs"):
        points = series(records, name)
        assert len(points) >= 2 and max(value for _, value in points) <= 1e-5

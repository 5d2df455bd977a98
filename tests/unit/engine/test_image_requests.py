"""Requests with images: what the `transformers` engine computes is what transformers computes."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from rft.engine.settings import EngineSettings
from rft.engine.transformers import TransformersEngine
from rft.testing import tiny_vision
from rft.types.completion import Completion
from rft.types.images import Image
from rft.types.ports import GenerateRequest, ScoreRow
from rft.types.task import SamplingArgs

RED = Image.of(tiny_vision.picture((220, 30, 30), size=(32, 16)))
BLUE = Image.of(tiny_vision.picture((40, 60, 220), size=(16, 24)))


def ask(*images: Image, text: str = "hi", **more: object) -> GenerateRequest:
    content = [*(x.part for x in images), {"type": "text", "text": text}]
    files = tuple({x.sha256: x for x in images}.values())
    request = GenerateRequest(
        messages=({"role": "user", "content": content},),
        images=files,
        sampling=SamplingArgs(max_tokens=6, seed=1),
    )
    return msgspec.structs.replace(request, **more)


@pytest.fixture(scope="module", params=tiny_vision.FAMILIES)
def folder(request, tmp_path_factory):
    return tiny_vision.make(tmp_path_factory.mktemp("vision") / "model", request.param)


@pytest.fixture
async def engine(folder):
    engine = await TransformersEngine.start(
        EngineSettings(
            engine_type="transformers",
            model_path=str(folder),
            max_model_len=200,
            fixed_weights=True,
        )
    )
    yield engine
    await engine.close()


def reference(model: torch.nn.Module, engine: TransformersEngine, c: Completion, images):
    """Log-probs of the answer by one forward of transformers over the whole sequence."""
    ids = torch.tensor([[*c.prompt_tokens, *c.tokens]])
    types = torch.zeros_like(ids)
    for place in c.images:
        types[0, place.start : place.start + place.length] = 1
    more = {}
    if prepared := [engine._chat.images.process(x.data) for x in images]:
        values = np.concatenate([p.pixel_values for p in prepared])
        more = {"pixel_values": torch.from_numpy(values.copy())}
        if grid := [p.grid for p in prepared if p.grid]:
            more |= {"image_grid_thw": torch.tensor(grid), "mm_token_type_ids": types}
        else:
            more |= {"token_type_ids": types}
    with torch.no_grad():
        logits = model(input_ids=ids, **more).logits[0, len(c.prompt_tokens) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(c.tokens.astype(np.int64))[:, None])[:, 0]


async def test_answers_to_images_have_the_log_probs_of_transformers(engine, folder):
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    shown = [[RED], [BLUE], [RED, BLUE], [RED, RED], []]
    texts = ["hi", "hi", "a longer text", "twice", "no image"]
    requests = [ask(*x, text=t, n=2) for x, t in zip(shown, texts, strict=True)]
    answers = await asyncio.gather(*map(engine.generate, requests))
    for images, completions in zip(shown, answers, strict=True):
        for c in completions:
            expected = reference(model, engine, c, images).numpy()
            assert np.abs(expected - c.logprobs).max() < 1e-5
            assert [p.sha256 for p in c.images] == [x.sha256 for x in images]
            row = ScoreRow(
                tokens=np.concatenate([c.prompt_tokens, c.tokens]),
                prompt_length=len(c.prompt_tokens),
                places=c.images,
                images=tuple({x.sha256: x for x in images}.values()),
            )
            assert np.abs((await engine.score(row)).logprobs - expected).max() < 1e-5


async def test_equal_tokens_of_different_images_are_computed_apart(engine, folder):
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    green = Image.of(tiny_vision.picture((30, 180, 60), size=(32, 16)))
    (a,), (b,) = await asyncio.gather(*(engine.generate(ask(x)) for x in (RED, green)))
    assert np.array_equal(a.prompt_tokens, b.prompt_tokens)
    assert a.images[0].pixels != b.images[0].pixels
    for c, image in ((a, RED), (b, green)):
        assert np.abs(reference(model, engine, c, [image]).numpy() - c.logprobs).max() < 1e-5


async def test_a_later_turn_keeps_the_tokens_and_adds_its_images(engine, folder):
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    (first,) = await engine.generate(ask(RED))
    messages = (
        *ask(RED).messages,
        first.message,
        {"role": "user", "content": [{"type": "text", "text": "and"}, BLUE.part, RED.part]},
    )
    request = ask(RED, BLUE, messages=messages)
    (second,) = await engine.generate(
        msgspec.structs.replace(
            request,
            prefix_tokens=np.concatenate([first.prompt_tokens, first.tokens]),
            prefix_places=first.images,
            prefix_messages=2,
        )
    )
    before = len(first.prompt_tokens) + len(first.tokens)
    assert np.array_equal(second.prompt_tokens[: len(first.prompt_tokens)], first.prompt_tokens)
    assert second.images[0] == first.images[0]
    assert [p.sha256 for p in second.images] == [x.sha256 for x in (RED, BLUE, RED)]
    assert second.images[1].start > before
    expected = reference(model, engine, second, [RED, BLUE, RED]).numpy()
    if engine._chat.images.image_token_id not in first.tokens:
        assert np.abs(expected - second.logprobs).max() < 1e-5


async def test_wrong_requests_are_refused_before_anything_is_computed(engine):
    token = engine._chat.images.family.placeholder
    for request, reason in (
        (ask(RED, text=f"a {token}"), "has 2 placeholders"),
        (ask(text=f"a {engine._chat.images.family.token}"), "placeholder tokens of images"),
        (ask(RED, prompt_truncation="left", text="x" * 300), "the engine takes at most"),
        (ask(Image.of(b"no image")), "not a readable image"),
    ):
        with pytest.raises(ValueError, match=reason):
            await engine.generate(request)
    assert engine.running == 0


async def test_a_model_of_texts_refuses_images(tiny_model):
    settings = EngineSettings(
        engine_type="transformers", model_path=str(tiny_model), fixed_weights=True
    )
    engine = await TransformersEngine.start(replace(settings, max_model_len=200))
    with pytest.raises(
        ValueError, match=r"the messages show 1 images, and .* is no model of a fam"
    ):
        await engine.generate(ask(RED))
    await engine.close()

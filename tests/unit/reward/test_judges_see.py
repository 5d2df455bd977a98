"""Judges and rewards see the images of the question: names in prompts, files at servers and engines."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from rft.engine.external import ExternalEngine
from rft.engine.settings import EngineSettings, ExternalModelConfig
from rft.engine.transformers import TransformersEngine
from rft.errors import ConfigError
from rft.images import data_url
from rft.images.decode import decode
from rft.plugins import load_all
from rft.reward import exchanges
from rft.reward.base import reward, score, score_each
from rft.reward.build_reward import build
from rft.testing import tiny_vision
from rft.testing.judge import FakeJudge, make_transcript
from rft.types.completion import Transcript
from rft.types.images import Image
from rft.types.task import Task
from tests.helpers.judge_server import JudgeServer

load_all()
RED = Image.of(tiny_vision.picture((220, 30, 30), size=(32, 16)))
BLUE = Image.of(tiny_vision.picture((40, 60, 220), size=(16, 24)))
SHOWN = (
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "Is "},
            RED.part,
            {"type": "text", "text": " as "},
            BLUE.part,
        ],
    },
)
TASK = Task(
    taskset="t", index=0, messages=SHOWN, images=(RED, BLUE), workflow="w", truth="no", reward="r"
)


def transcript(answer: str = "no") -> Transcript:
    made = make_transcript(answer)
    (turn,) = made.turns
    turn = msgspec.structs.replace(turn, messages=SHOWN, images=(RED, BLUE))
    return msgspec.structs.replace(made, turns=(turn,))


def made(judge: str, **args: Any) -> Any:
    return build(judge, {"cache": "off", **args})


async def asked(judge: Any, model: Any, *answers: str) -> Any:
    await judge.prepare({"judge": model})
    try:
        transcripts = [transcript(a) for a in answers]
        return await score_each(judge, TASK, transcripts)
    finally:
        await judge.close()


@pytest.mark.parametrize(
    ("judge", "verdict", "args"),
    [
        ("rubric_judge", 7, {}),
        ("reference_judge", "yes", {}),
        ("pairwise_judge", "first", {"against": "group"}),
        ("ruler_judge", 1, {}),
        ("either_or_judge", 0.8, {"question": "Right?", "show_question": True}),
    ],
)
async def test_the_images_of_the_question_stand_behind_it(
    judge: str, verdict: Any, args: dict[str, Any]
) -> None:
    model = FakeJudge(verdict)
    with exchanges.noted() as notes:
        scores = await asked(made(judge, **args), model, "no", "yes")
    assert all(s.value is not None for s in scores), scores
    for call in model.calls:
        *_, last = call.messages
        text, *images = last["content"]
        assert images == [RED.part, BLUE.part] and call.images == (RED, BLUE)
        assert "Is [image 1] as [image 2]" in text["text"]
    assert "[image 1][image 2]" in notes[0]["question"][-1]["content"]
    hidden = FakeJudge(verdict)
    await asked(made(judge, show_images=False, **args), hidden, "no", "yes")
    assert not any(call.images for call in hidden.calls)
    assert isinstance(hidden.calls[0].messages[-1]["content"], str)


async def test_a_judge_of_the_answer_alone_sees_no_images() -> None:
    model = FakeJudge(0.8)
    await asked(made("either_or_judge", question="Polite?"), model, "no")
    assert not model.calls[0].images


async def test_another_image_is_another_question_for_the_cache(tmp_path: Path) -> None:
    model = FakeJudge(7)
    judge = build("rubric_judge", {"cache": str(tmp_path / "cache.db")})
    await judge.prepare({"judge": model})
    blue = msgspec.structs.replace(
        TASK, messages=({"role": "user", "content": [BLUE.part]},), images=(BLUE,)
    )
    red = msgspec.structs.replace(
        TASK, messages=({"role": "user", "content": [RED.part]},), images=(RED,)
    )
    for task in (red, blue, red):
        (turn,) = transcript().turns
        turn = msgspec.structs.replace(turn, messages=task.messages, images=task.images)
        await score(judge, task, Transcript(turns=(turn,)))
    await judge.close()
    assert [call.images for call in model.calls] == [(RED,), (BLUE,)]


async def test_an_image_that_was_not_stored_is_an_error() -> None:
    lost = msgspec.structs.replace(TASK, images=())
    (turn,) = transcript().turns
    run = Transcript(turns=(msgspec.structs.replace(turn, images=()),))
    judge = made("rubric_judge")
    await judge.prepare({"judge": FakeJudge(7)})
    with pytest.raises(ValueError, match="which is not stored with it"):
        await score(judge, lost, run)
    await judge.close()


async def test_a_server_gets_the_bytes_of_the_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with JudgeServer(FakeJudge(7)) as server:
        external = ExternalModelConfig(model_name="judge-1", base_url=server.url)
        settings = EngineSettings(
            engine_type="external", name="aux-judge-0", external=external, request_timeout_s=20
        )
        engine = await ExternalEngine.start(settings)
        (found,) = await asked(made("rubric_judge"), engine, "no")
        await engine.close()
    assert found.value == 0.7
    (body,) = server.asked
    text, *images = body["messages"][-1]["content"]
    assert text["type"] == "text" and [part["type"] for part in images] == ["image_url"] * 2
    files = [data_url.read(part["image_url"]["url"]) for part in images]
    assert files == [RED.data, BLUE.data]
    assert isinstance(body["messages"][0]["content"], str)


@pytest.mark.e2e
async def test_an_engine_of_a_family_that_sees_judges_what_it_sees(tmp_path: Path) -> None:
    folder = tiny_vision.make(tmp_path / "model")
    engine = await TransformersEngine.start(
        EngineSettings(
            engine_type="transformers",
            model_path=str(folder),
            max_model_len=500,
            fixed_weights=True,
        )
    )
    values = []
    judge = made("either_or_judge", question="Right?", show_question=True)
    for show_images in (True, False, True):
        judge.args = judge.args.model_copy(update={"show_images": show_images})
        (found,) = await asked(judge, engine, "no")
        assert found.value is not None, found.reason
        values.append(found.value)
    await engine.close()
    assert values[0] == values[2] != values[1]


async def test_a_reward_of_ones_own_gets_pictures() -> None:
    @reward("test_reddest")
    def reddest(task: Task, run: Transcript) -> float:
        sizes = [decode(image.data).size for image in run.images]
        assert sizes == [(32, 16), (16, 24)] and task.images == (RED, BLUE)
        red = [np.asarray(decode(image.data))[..., 0].mean() for image in run.images]
        return float(np.argmax(red) == 0)

    (found,) = await score_each(build("test_reddest", {}), TASK, [transcript()])
    assert found.value == 1.0


@pytest.mark.extra("migrate")
async def test_a_function_of_trl_gets_its_column_of_images_as_pictures() -> None:
    seen: list[Any] = []

    @reward("test_trl_images")
    def of_trl(completions: list[Any], images: list[Any], **columns: Any) -> list[float]:
        seen.extend(images)
        return [1.0] * len(completions)

    row = {"images": [RED.sha256, BLUE.sha256]}
    task = msgspec.structs.replace(TASK, row=row)
    await score_each(build("test_trl_images", {}), task, [transcript(), transcript()])
    assert [[picture.size for picture in pictures] for pictures in seen] == [
        [(32, 16), (16, 24)]
    ] * 2


async def test_a_reward_model_refuses_images() -> None:
    judge = build("reward_model", {})
    with pytest.raises(ConfigError, match="does not read"):
        judge.check_task(TASK, transcript())
    await judge.prepare({"rm": FakeJudge(1)})
    with pytest.raises(ValueError, match="does not read images"):
        await score(judge, TASK, transcript())


def test_the_cost_of_images_is_reserved(tmp_path: Path) -> None:
    prices = {"price_per_1k_prompt_tokens": 1.0, "max_cost_usd": 20.0, "over_budget": "unscored"}
    judge = build("rubric_judge", {"cache": str(tmp_path / "c.db"), **prices})
    (found,) = asyncio.run(asked(judge, FakeJudge(7), "no"))
    assert found.value is None and "budget is used up" in found.reason
    judge = build("rubric_judge", {"cache": str(tmp_path / "d.db"), "show_images": False, **prices})
    (found,) = asyncio.run(asked(judge, FakeJudge(7), "no"))
    assert found.value == 0.7

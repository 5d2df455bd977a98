"""A cassette plays what a model said, for equal requests and for nothing else."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rft.testing import (
    CassetteMiss,
    RecordedModel,
    ScriptedModel,
    WorkflowResult,
    run_workflow,
    run_workflow_async,
    task_of,
    tool_call,
)
from rft.types.completion import Score, Transcript
from rft.types.ports import GenerateRequest, ScoreRow
from rft.types.task import SamplingArgs, Task
from rft.workflow.base import RunContext

ROW = {"prompt": "Guess.", "truth": "7"}
ASKED = GenerateRequest(messages=({"role": "user", "content": "?"},), n=2, request_id="a")


class Twice:
    async def run(self, task: Task, ctx: RunContext) -> Transcript:
        messages = task.chat()
        said = await ctx.chat(messages)
        messages += [said.message, {"role": "user", "content": "sure?"}]
        return ctx.transcript(
            score=Score(value=float((await ctx.chat(messages)).text == task.truth))
        )


def test_it_plays_what_was_recorded_to_the_bit(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "c.json"
    first = run_workflow(
        Twice, ROW, RecordedModel(path, ScriptedModel("7", tool_call("é", x=1), "7", "8")), n=2
    )
    written = path.read_bytes()
    model = RecordedModel(path, record="none")
    again = run_workflow(Twice, ROW, model, n=2)
    assert model.unused == 0 and path.read_bytes() == written
    for a, b in zip(first.experiences, again.experiences, strict=True):
        assert (
            a.id == b.id
            and a.messages == b.messages
            and a.reward == b.reward
            and a.version_spans == b.version_spans
        )
        for name in ("tokens", "loss_mask", "logprobs"):
            one = getattr(a, name)
            other = getattr(b, name)
            assert one.dtype == other.dtype and np.array_equal(one, other)


def test_another_request_is_a_miss_that_shows_the_difference(tmp_path: Path) -> None:
    run_workflow(Twice, ROW, RecordedModel(tmp_path / "c.json", ScriptedModel("1", "7")))
    with pytest.raises(CassetteMiss, match=r"(?s)nearest.*-.*Guess\.\"\n.*\+.*Guess!\"") as caught:
        run_workflow(Twice, {"prompt": "Guess!", "truth": "7"}, RecordedModel(tmp_path / "c.json"))
    assert "c.json has no answer for this generate request" in str(caught.value)
    with pytest.raises(CassetteMiss, match=r"recorded 1 time\(s\) and is asked again"):
        run_workflow(Twice, ROW, RecordedModel(tmp_path / "c.json"), n=2)


async def test_modes(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    with pytest.raises(FileNotFoundError, match='record="once"'):
        RecordedModel(path, record="none")
    with pytest.raises(ValueError, match="there is no model to ask"):
        RecordedModel(path)
    with pytest.raises(ValueError, match="write once, none or all"):
        RecordedModel(path, record="new")  # type: ignore[arg-type]

    async def start() -> Any:
        return ScriptedModel("a", "b")

    assert [c.text for c in await RecordedModel(path, start).generate(ASKED)] == ["a", "b"]
    silent = ScriptedModel()
    assert [c.text for c in await RecordedModel(path, silent).generate(ASKED)] == [
        "a",
        "b",
    ] and not silent.calls
    anew = RecordedModel(path, ScriptedModel("c", "d"), record="all")
    assert [c.text for c in await anew.generate(ASKED)] == ["c", "d"]
    assert [c.text for c in await RecordedModel(path).generate(ASKED)] == ["c", "d"]


async def test_log_probs_and_scores(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    row = ScoreRow(tokens=np.arange(5, dtype=np.int32), prompt_length=2)
    recorded = RecordedModel(path, ScriptedModel(scores=[0.25, -1.0]))
    messages = [{"role": "user", "content": "hi"}]
    given = await recorded.score(row), await recorded.classify(messages)
    played = RecordedModel(path)
    assert np.array_equal(given[0].logprobs, (await played.score(row)).logprobs)
    assert await played.classify(messages) == given[1] == [0.25, -1.0]


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"format": 1}', '{"format": 9, "calls": []}', '{"format": 1, "calls": [{}]}'],
)
def test_what_is_no_cassette_is_said(text: str, tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(ValueError, match="is not a cassette"):
        RecordedModel(tmp_path / "c.json")


async def test_it_can_be_read(tmp_path: Path) -> None:
    await RecordedModel(tmp_path / "c.json", ScriptedModel("grün", "b")).generate(ASKED)
    text = (tmp_path / "c.json").read_text(encoding="utf-8")
    assert '"text": "grün"' in text and max(map(len, text.splitlines())) < 300
    assert json.loads(text)["calls"][0]["request"]["request_id"] == ""


def test_a_real_engine_is_started_to_record_and_not_to_play(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Two turns under a chat template: the recorded run and the played one give the same
    experience.
    """
    from rft.engine.settings import EngineSettings
    from rft.engine.transformers import TransformersEngine

    started: list[TransformersEngine] = []

    async def start() -> TransformersEngine:
        settings = EngineSettings(
            engine_type="transformers",
            model_path=str(tiny_model),
            max_model_len=200,
            fixed_weights=True,
        )
        started.append(await TransformersEngine.start(settings))
        return started[0]

    task = task_of(ROW, sampling=SamplingArgs(max_tokens=4))

    async def play() -> WorkflowResult:
        try:
            return await run_workflow_async(
                Twice, task, RecordedModel(tmp_path / "c.json", start), n=2
            )
        finally:
            for engine in started:
                await engine.close()

    recorded = asyncio.run(play())
    played = run_workflow(Twice, task, RecordedModel(tmp_path / "c.json", start), n=2)
    assert len(started) == 1 and recorded.experience.num_response_tokens > 2
    for a, b in zip(recorded.experiences, played.experiences, strict=True):
        assert (
            np.array_equal(a.tokens, b.tokens)
            and np.array_equal(a.logprobs, b.logprobs)
            and a.version_spans == b.version_spans
        )

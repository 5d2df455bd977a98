"""Shipped workflows whose teacher is the policy, told more than the policy was."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rft.engine.scripted import ScriptedEngine, conversation, encode
from rft.engine.scripted import logprobs as scripted_logprobs
from rft.plugins import load_all
from rft.reward.base import reward
from rft.types.completion import Score, TokenScores
from rft.types.experience import Experience
from rft.types.ids import GroupId
from rft.types.ports import GenerateRequest, ScoreRow
from rft.types.task import Task
from rft.workflow.group import run_group
from rft.workflow.play_run import RunLimits
from rft.workflow.recipes import Recipes

ID = GroupId(1, 0, 3, 5)
REASON = "4 was expected"


class Listening(ScriptedEngine):
    """Keeps the last message of each prompt that it scored; None: of a call's own prompt."""

    def __init__(self, *texts: str) -> None:
        super().__init__(*texts)
        self.heard: list[str | None] = []

    async def score(self, row: ScoreRow) -> TokenScores:
        last = None if row.prompt is None else row.prompt.messages[-1]["content"]
        if last is not None and "(unreadable)" in last:
            raise ValueError("the teacher cannot read this")
        self.heard.append(last)
        return await super().score(row)


@pytest.fixture(scope="module", autouse=True)
def plugins() -> None:
    load_all()

    @reward("test_reasoned")
    def reasoned(task: Task, transcript: Any) -> Score:
        if transcript.answer == "?":
            raise ValueError("no verdict")
        right = transcript.answer == task.truth
        return Score(value=float(right), reason="" if right else f"{REASON}: {transcript.answer}")

    @reward("test_silent")
    def silent(task: Task, transcript: Any) -> float:
        return float(transcript.answer == task.truth)


async def rows(engine: ScriptedEngine, workflow: str, **changes: Any) -> list[Experience]:
    fields: dict[str, Any] = {"taskset": "t", "index": 0, "prompt": "2+2?", "truth": "4"}
    task = Task(**{**fields, "workflow": workflow, **changes})
    recipes = Recipes()
    recipes.find(task)
    limits = RunLimits(max_timeout_s=20.0)
    return (await run_group(task, await recipes.get(task), engine, ID, limits=limits)).rows


@pytest.mark.parametrize(
    ("workflow", "args", "told"),
    [
        ("opsd_workflow", {}, "2+2?\n\nHere is the reference answer:\n4\n\n"),
        ("sdft_workflow", {"truth_key": "shown"}, "to the question:\ntwo and two\n\n"),
        ("opsd_workflow", {"told": "{truth} {{}} {prompt}"}, "4 {} 2+2?"),
    ],
)
async def test_the_teacher_is_told(workflow: str, args: dict[str, str], told: str) -> None:
    engine = Listening("5")
    row = {"prompt": "2+2?", "shown": "two and two"}
    (x,) = await rows(engine, workflow, workflow_args=args, row=row)
    assert x.trainable and x.reward == 0.0, "no reward is needed"
    (heard,) = engine.heard
    assert heard is not None and told in heard
    prompt = conversation(GenerateRequest(messages=({"role": "user", "content": heard},)))
    assert x.teacher_logprobs is not None
    assert np.array_equal(
        x.teacher_logprobs[x.loss_mask],
        scripted_logprobs(prompt, x.tokens[x.loss_mask], engine._key),
    )
    assert np.array_equal(x.tokens[: -x.num_response_tokens], encode(x.messages[:1]))


async def test_nothing_to_tell_fails_the_run() -> None:
    (x,) = await rows(Listening("5"), "opsd_workflow", truth=None)
    assert "task 0 has no gold answer to tell the teacher" in x.reason
    (x,) = await rows(Listening("5"), "sdft_workflow", workflow_args={"truth_key": "shown"})
    assert "task 0 has no shown to tell the teacher" in x.reason


async def test_feedback_and_a_right_answer_of_another_run_are_told() -> None:
    engine = Listening("5", "4", "?", "(unreadable)", "4")
    kind = {"reward": "test_reasoned", "num_runs": 5}
    found = await rows(engine, "sdpo_workflow", **kind)
    assert [x.reward for x in found] == [0.0, 1.0, None, None, 1.0]
    assert ["reason" if x.reason else "" for x in found] == ["", "", "reason", "reason", ""]
    assert "no verdict" in found[2].reason and "cannot read this" in found[3].reason
    wrong = next(m for m in engine.heard if m is not None and REASON in m)
    assert f"Correct solution:\n\n4\n\nFeedback on an unsuccessful attempt:\n\n{REASON}: 5" in wrong
    rights = [m for m in engine.heard if m is not None and "Feedback on" not in m]
    assert len(rights) == 3, "runs 1, 4 and 2, which had no verdict, hear of another's answer"
    assert found[0].info["reward_reason"] == f"{REASON}: 5"
    assert [x.metrics["untaught"] for x in found if not x.reason] == [0.0] * 3


async def test_without_anything_to_tell_the_advantage_is_zero() -> None:
    engine = Listening("5", "6")
    found = await rows(engine, "sdpo_workflow", reward="test_silent", num_runs=2)
    assert engine.heard == [None, None], "their own prompts"
    for x in found:
        assert x.teacher_logprobs is not None and np.array_equal(x.teacher_logprobs, x.logprobs)
        assert x.metrics["untaught"] == 1.0


async def test_an_evaluation_asks_no_teacher() -> None:
    for workflow in ("opsd_workflow", "sdpo_workflow"):
        engine = Listening("4")
        (x,) = await rows(engine, workflow, reward="test_silent", is_eval=True)
        assert x.reward == 1.0 and not engine.heard and x.teacher_logprobs is None


async def test_feedback_needs_a_reward_of_single_runs() -> None:
    (x,) = await rows(Listening("4"), "sdpo_workflow")
    assert "asks for the reward of its run, and taskset t names no reward" in x.reason

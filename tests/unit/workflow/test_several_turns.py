"""Runs of several turns: counted turns and tokens, rows of steps, what the model is shown, states
for GiGPO.
"""

from __future__ import annotations

import asyncio
from typing import ClassVar

import numpy as np
import pytest

from rft.algorithm.gigpo import GigpoArgs
from rft.engine.base import PromptTooLong
from rft.engine.scripted import ScriptedEngine
from rft.engine.settings import EngineSettings
from rft.errors import ConfigError
from rft.testing import ScriptedModel, run_workflow, tiny_vision
from rft.types.images import Image
from rft.types.task import SamplingArgs, Task
from rft.workflow.turns import (
    EnvWorkflow,
    MultiTurnWorkflow,
    Reply,
    RewardPropagationWorkflow,
    Step,
    StepWiseWorkflow,
    TurnArgs,
)

LONG = SamplingArgs(max_tokens=4000)


def task(**changes):
    return Task(
        **{
            "taskset": "walk",
            "index": 3,
            "prompt": "walk",
            "truth": "3",
            "workflow": "x",
            "sampling": LONG,
            **changes,
        }
    )


class Stairs(EnvWorkflow):
    """Three stairs; "up" and "down", 0.5 for each stair, over at the top."""

    closed: ClassVar[list[bool]] = []

    def instruction(self, task):
        return "Climb."

    def reset(self, task):
        self.at = 0
        self.top = int(task.truth)
        return "stair 0"

    def step(self, action):
        self.at = max(0, self.at + (1 if action == "up" else -1))
        top = self.at == self.top
        return Step(
            f"stair {self.at}",
            reward=0.5 if action == "up" else 0.0,
            done=top,
            info={"success": top},
        )

    def close(self):
        self.closed.append(True)


def test_one_row_for_the_run_with_the_sum_of_rewards():
    Stairs.closed.clear()
    model = ScriptedModel("up", "down", "up", "up", "up")
    result = run_workflow(Stairs, task(), model)
    (row,) = result.group.rows
    assert (row.reward, row.reward_parts, row.status) == (2.0, {"success": 1.0}, "complete")
    assert (
        row.metrics == {"turns": 5.0, "finished": 1.0, "over_limit": 0.0}
        and row.info["success"] is True
    )
    assert [m["content"] for m in model.calls[2].messages] == [
        "Climb.",
        "stair 0",
        "up",
        "stair 1",
        "down",
        "stair 0",
    ]
    assert row.num_response_tokens == sum(len(a) + 1 for a in ("up", "down", "up", "up", "up")), (
        "answers and their ends alone"
    )
    assert Stairs.closed == [True]


@pytest.mark.parametrize("args", [{}, {"layout": "steps"}, {"layout": "steps", "credit": "step"}])
def test_ten_tenths_are_a_whole_reward(args):
    """They were 0.9999999999999999: no pass in pass@k; and the same rewards in another order were
    another reward.
    """

    class Tenths(EnvWorkflow):
        def reset(self, task):
            return "go"

        def step(self, action):
            return Step("on", reward=0.1)

    assert run_workflow(
        Tenths, task(), ScriptedModel(*["up"] * 10), workflow_args=args
    ).group.rewards == [1.0]


def test_an_environment_gets_the_action_behind_the_thought():
    """Finding G2."""
    said = ["<think>down?</think>up", "<think>up", "<think>up</think>down", "up"]
    (row,) = run_workflow(
        Stairs, task(), ScriptedModel(*said, answer=lambda m: "up"), workflow_args={"max_turns": 4}
    ).group.rows
    assert [m["content"] for m in row.messages if m["role"] == "user"][1:] == [
        "stair 1",
        "stair 0",
        "stair 0",
    ]


def test_turns_run_out():
    (row,) = run_workflow(
        Stairs, task(), ScriptedModel(answer=lambda m: "up"), workflow_args={"max_turns": 2}
    ).group.rows
    assert (row.reward, row.status, row.metrics["finished"]) == (1.0, "complete", 0.0)


@pytest.mark.parametrize(
    ("credit", "rewards"), [("step", [0.5, 0.0, 0.5]), ("run", [1.0, 1.0, 1.0])]
)
def test_a_row_for_each_step(credit: str, rewards: list[float]) -> None:
    args = {"layout": "steps", "credit": credit, "max_turns": 3}
    result = run_workflow(Stairs, task(), ScriptedModel("up", "down", "up"), workflow_args=args)
    rows = result.group.rows
    assert [r.reward for r in rows] == rewards and [r.info["step_reward"] for r in rows] == [
        0.5,
        0.0,
        0.5,
    ]
    states = [r.info[GigpoArgs().env_state_hash_key] for r in rows]
    assert states[0] == states[2] != states[1], (
        "the state in which the step began: stair 0, stair 1, stair 0"
    )
    assert result.runs[0].reward == 1.0, "the return, either way"


@pytest.mark.parametrize(
    ("history", "shown"),
    [
        (0, ["Climb.", "stair 2"]),
        (1, ["Climb.", "stair 1", "up", "stair 2"]),
        (9, ["Climb.", "stair 0", "up", "stair 1", "up", "stair 2"]),
    ],
)
def test_a_short_memory(history: int, shown: list[str]) -> None:
    model = ScriptedModel("up", "up", "up")
    run_workflow(Stairs, task(), model, workflow_args={"layout": "steps", "history": history})
    assert [m["content"] for m in model.calls[-1].messages] == shown


@pytest.mark.parametrize(
    ("history", "shown"), [(0, ["stair 2"]), (1, ["stair 1", "up", "stair 2"])]
)
def test_an_environment_that_tells_nothing_first_shows_its_last_turns_alone(
    history: int, shown: list[str]
) -> None:
    class Silent(Stairs):
        def instruction(self, task):
            return ""

    model = ScriptedModel("up", "up", "up")
    run_workflow(Silent, task(), model, workflow_args={"layout": "steps", "history": history})
    assert [m["content"] for m in model.calls[-1].messages] == shown


def test_a_conversation_with_a_short_memory_keeps_its_question():
    model = ScriptedModel("1", "2", "3")
    args = {"layout": "steps", "credit": "run", "history": 0}
    run_workflow(
        Talk,
        task(system_prompt="Count.", reward="exact_answer"),
        model,
        reward="exact_answer",
        workflow_args=args,
    )
    assert [m["content"] for m in model.calls[-1].messages] == ["Count.", "walk", "again"]


def test_a_joined_run_has_one_reward_and_its_whole_history():
    for args in ({"credit": "step"}, {"history": 1}):
        with pytest.raises(ConfigError, match="need layout: steps"):
            run_workflow(Stairs, task(), ScriptedModel("up"), workflow_args=args)


def test_max_response_tokens_count_all_turns():
    short = task(sampling=SamplingArgs(max_tokens=60), truth="99")
    model = ScriptedModel(answer=lambda m: "up")
    (row,) = run_workflow(Stairs, short, model, workflow_args={"max_turns": 50}).group.rows
    opening = len(row.tokens) - 60
    assert (
        row.status == "truncated"
        and row.metrics["over_limit"] == 1.0
        and 2 <= row.metrics["turns"] < 10
    )
    asked = [c.sampling.max_tokens for c in model.calls]
    assert asked[0] == 60 and asked == sorted(asked, reverse=True), (
        "each call may take what is left"
    )
    assert opening >= 0 and asked[-1] < 40


def test_each_answer_has_a_limit_of_its_own():
    model = ScriptedModel(answer=lambda m: "up and up and up")
    (row,) = run_workflow(
        Stairs, task(), model, workflow_args={"max_turns": 2, "max_turn_tokens": 4}
    ).group.rows
    assert {c.sampling.max_tokens for c in model.calls} == {4} and row.num_response_tokens == 8


def test_the_least_length_of_an_answer_ends_no_run_that_may_write_less():
    short = task(sampling=SamplingArgs(max_tokens=60, min_tokens=10), truth="99")
    model = ScriptedModel(answer=lambda m: "up and up and up")
    (row,) = run_workflow(Stairs, short, model, workflow_args={"max_turns": 50}).group.rows
    assert row.status == "truncated" and row.metrics["over_limit"] == 1.0
    assert (
        model.calls[0].sampling.min_tokens
        == 10
        > model.calls[-1].sampling.max_tokens
        == model.calls[-1].sampling.min_tokens
    )


def test_a_conversation_may_use_the_whole_context_and_no_more():
    """max_prompt_tokens is about openings; where the context is full the run is over, and
    truncated.
    """
    settings = EngineSettings(
        engine_type="scripted", name="s", max_model_len=120, max_prompt_tokens=60
    )
    result = run_workflow(
        Stairs, task(truth="99"), ScriptedEngine(answer=lambda m: "up", settings=settings)
    )
    (row,) = result.group.rows
    assert row.status == "truncated" and 60 < len(row.tokens) <= 120
    with pytest.raises(PromptTooLong):
        long = task(prompt="x" * 300)
        run_workflow(
            "simple_workflow", long, ScriptedEngine("a", settings=settings), reward="exact_answer"
        )


class Talk(MultiTurnWorkflow):
    """Async methods, no rewards: the taskset's reward scores the last answer."""

    async def react(self, answer):
        await asyncio.sleep(0)
        return Reply.say("again") if answer.text != "3" else Reply(done=True)


def test_without_rewards_the_tasksets_reward_scores():
    result = run_workflow(Talk, task(), ScriptedModel("1", "2", "3"), reward="exact_answer")
    assert result.runs[0].reward == 1.0 and result.group.rows[0].metrics["turns"] == 3.0


class Steps(StepWiseWorkflow):
    def react(self, answer):
        return Reply.say("next", reward=float(answer.text), done=answer.text == "3")


class Spread(RewardPropagationWorkflow):
    react = Steps.react


def test_step_wise_and_propagated():
    for cls, rewards in ((Steps, [1.0, 3.0]), (Spread, [4.0, 4.0])):
        rows = run_workflow(cls, task(), ScriptedModel("1", "3")).group.rows
        assert [r.reward for r in rows] == rewards
        assert np.array_equal(rows[1].tokens[: len(rows[0].tokens)], rows[0].tokens), (
            "the history is not tokenised again"
        )


class Hurt(Stairs):
    blocking = True

    def step(self, action):
        raise OSError("the world is gone")


def test_a_broken_world_is_closed_and_told():
    Stairs.closed.clear()
    result = run_workflow(Hurt, task(), ScriptedModel("up"), may_fail=True)
    assert (
        result.runs[0].failed
        and "the world is gone" in result.runs[0].reason
        and Stairs.closed == [True]
    )


class Silly(MultiTurnWorkflow):
    def react(self, answer):
        return "more"


def test_what_react_returns_is_checked():
    result = run_workflow(Silly, task(), ScriptedModel("up"), may_fail=True)
    assert "react returned str; it must return a Reply" in result.runs[0].reason
    assert (
        "must have a method react"
        in run_workflow(MultiTurnWorkflow, task(), ScriptedModel("a"), may_fail=True).runs[0].reason
    )


def test_defaults_say_what_they_are():
    assert all(f.description for f in TurnArgs.model_fields.values())


class Silent(EnvWorkflow):
    """Two steps, of which none, or the second, has a reward."""

    last: ClassVar[float | None] = None

    def reset(self, task):
        self.at = 0
        return "Go."

    def step(self, action):
        self.at += 1
        return Step("on", reward=self.last if self.at == 2 else None, done=self.at == 2)


def says_b(task, transcript):
    return 0.25 if transcript.answer == "b" else 0.0


@pytest.mark.parametrize("layout", ["joined", "steps"])
def test_steps_without_a_reward_leave_the_score_to_the_taskset(layout):
    result = run_workflow(
        Silent, task(), ScriptedModel("a", "b"), reward=says_b, workflow_args={"layout": layout}
    )
    assert {row.reward for row in result.group.rows} == {0.25}


def test_a_step_with_a_reward_scores_the_run(monkeypatch):
    monkeypatch.setattr(Silent, "last", 1.0)
    assert run_workflow(Silent, task(), ScriptedModel("a", "b"), reward=says_b).reward == 1.0
    monkeypatch.setattr(Silent, "last", None)
    assert run_workflow(Silent, task(), ScriptedModel("a", "b")).reward == 0.0, (
        "no other reward is named"
    )


class Gallery(EnvWorkflow):
    """Shows two pictures, the second one perhaps damaged."""

    cut = 0

    def reset(self, task):
        return ["See ", tiny_vision.picture((220, 30, 30)), " and go."]

    def step(self, action):
        file = tiny_vision.picture((40, 60, 220))
        return Step([file[: len(file) - self.cut]], reward=1.0, done=action == "stop")


def test_an_observation_shows_images():
    model = ScriptedModel("go", "stop")
    result = run_workflow(Gallery, task(), model, workflow_args={"layout": "steps"})
    red, blue = (Image.of(tiny_vision.picture(c)) for c in ((220, 30, 30), (40, 60, 220)))
    text = [{"type": "text", "text": t} for t in ("See ", " and go.")]
    first, second = model.calls
    assert first.messages[-1]["content"] == [text[0], red.part, text[1]]
    assert second.messages[-1]["content"] == [blue.part]
    assert second.images == (red, blue) and second.prefix_messages == 2
    states = [row.info["env_state_hash"] for row in result.group.rows]
    assert len(set(states)) == 2


def test_a_damaged_image_of_an_observation_fails_its_run_with_the_reason(monkeypatch):
    monkeypatch.setattr(Gallery, "cut", 30)
    result = run_workflow(Gallery, task(), ScriptedModel("go", "stop"), may_fail=True)
    (row,) = result.group.rows
    assert row.status == "failed" and "a damaged PNG image" in row.reason

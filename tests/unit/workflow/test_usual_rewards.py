"""A workflow brings the reward that it goes with; one that the taskset names wins."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rft.plugins import REGISTRY, load_all
from rft.reward.base import FunctionReward
from rft.reward.judges import RubricJudge, RulerJudge
from rft.testing import FakeJudge, ScriptedModel, run_workflow
from rft.types.ids import GroupId
from rft.types.task import Task
from rft.worker import job_pool
from rft.workflow.base import workflow
from rft.workflow.group import run_group
from rft.workflow.play_run import RunLimits
from rft.workflow.recipes import Recipes, workflow_class
from rft.workflow.turns import EnvWorkflow, Step


@pytest.fixture(scope="module", autouse=True)
def plugins() -> Iterator[None]:
    load_all()
    yield
    job_pool.close_all()


def reward_of(workflow: str, **fields: object) -> object:
    task = Task(taskset="t", index=0, prompt="1+1?", truth="2", workflow=workflow, **fields)  # type: ignore[arg-type]
    return Recipes().find(task).reward


def test_every_usual_reward_is_one() -> None:
    found = {
        name: workflow_class(REGISTRY.get("workflow", name)).usual_reward
        for name in REGISTRY.names("workflow")
    }
    assert found["math_workflow"] == "math_reward" and found["simple_workflow"] is None
    assert {r for r in found.values() if r} <= set(REGISTRY.names("reward"))


def test_what_the_taskset_names_wins() -> None:
    assert isinstance(reward_of("math_ruler_workflow"), RulerJudge)
    assert isinstance(reward_of("async_math_ruler_workflow"), RulerJudge)
    assert isinstance(reward_of("math_ruler_workflow", reward="exact_answer"), FunctionReward)
    assert reward_of("simple_workflow") is None


def test_the_rows_own_criteria_are_judged() -> None:
    judge = reward_of("rubric_judge_workflow", reward_args={"max_tokens": 64})
    assert isinstance(judge, RubricJudge) and (judge.args.rubric_key, judge.args.max_tokens) == (
        "rubric",
        64,
    )
    row = {"prompt": "Why?", "rubric": [{"description": "is short", "weight": 2}]}
    asked = FakeJudge(7)
    result = run_workflow(
        "rubric_judge_workflow", row, ScriptedModel("so"), reward=judge, models={"judge": asked}
    )
    assert (
        result.reward == pytest.approx(0.7) and "is short" in asked.calls[0].messages[-1]["content"]
    )


async def test_an_environment_that_rewards_no_step_is_scored_by_it() -> None:
    """Every run had a reward of 0."""

    @workflow("test_tells")
    class Tells(EnvWorkflow):
        usual_reward = "exact_answer"

        def reset(self, task: Task) -> str:
            return "1+1?"

        def step(self, action: str) -> Step:
            return Step("over", done=True)

    task = Task(taskset="t", index=0, prompt="1+1?", truth="2", workflow="test_tells")
    limits = RunLimits(max_timeout_s=20)
    assert (
        await run_group(
            task, Recipes().find(task), ScriptedModel("2"), GroupId(1, 0, 0, 0), limits=limits
        )
    ).rewards == [1.0]

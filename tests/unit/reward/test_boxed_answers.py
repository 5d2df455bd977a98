"""Boxed answers with a thought, and the prompts that ask for them."""

from __future__ import annotations

import pytest

from rft.testing import ScriptedModel, run_workflow
from rft.types.task import SamplingArgs, Task

LONG = SamplingArgs(max_tokens=4000)


@pytest.mark.parametrize(
    ("answer", "reward"), [("<think>a</think> \\boxed{4}", 1.0), ("\\boxed{4}", 0.8), ("4", -0.2)]
)
def test_boxed_answers_with_a_thought(answer: str, reward: float) -> None:
    task = Task(
        taskset="m",
        index=0,
        prompt="2+2?",
        truth="4",
        workflow="math_boxed_workflow",
        sampling=LONG,
    )
    args = {"with_think": True, "format_score_coef": 0.2}
    model = ScriptedModel(answer)
    result = run_workflow(
        None,
        task,
        model,
        reward="math_boxed_reward",
        reward_args=args,
        workflow_args={"with_think": True},
    )
    assert (
        result.runs[0].reward == pytest.approx(reward)
        and "<think>" in model.calls[0].messages[0]["content"]
    )


def test_the_base_models_prompt_and_the_evaluations() -> None:
    task = Task(
        taskset="m",
        index=0,
        prompt="2+2?",
        truth="4",
        workflow="math_boxed_workflow",
        sampling=LONG,
    )
    bare = ScriptedModel("\\boxed{4}")
    asked = ScriptedModel("\\boxed{4}")
    run_workflow(
        "math_boxed_workflow",
        task,
        bare,
        reward="math_boxed_reward",
        workflow_args={"use_base": True},
    )
    run_workflow("math_eval_workflow", task, asked, reward="math_boxed_reward")
    assert [m["role"] for m in bare.calls[0].messages] == ["user"] and "\\boxed{}" in asked.calls[
        0
    ].messages[0]["content"]

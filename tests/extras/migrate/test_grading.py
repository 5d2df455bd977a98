"""What reward files of Trinity-RFT import to compare answers, and MathBoxedWorkflow with a reward
of the file's own.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rft.engine.scripted import ScriptedEngine
from rft.extras.migrate.compat import (
    MathBoxedRewardFn,
    MathBoxedWorkflow,
    RewardFn,
    fix_fracs,
    grade_answer,
    match_answer,
    math_equal,
    remove_right_units,
    timeout_limit,
    validate_think_pattern,
)
from rft.plugins import load_all
from rft.types.ids import GroupId
from rft.types.task import Task
from rft.worker import job_pool
from rft.workflow.group import PlayedGroup, run_group
from rft.workflow.play_run import RunLimits
from rft.workflow.recipes import Recipes


@pytest.fixture(scope="module", autouse=True)
def workers() -> Iterator[None]:
    load_all()
    yield
    job_pool.close_all()


def test_answers_are_found_and_compared() -> None:
    assert match_answer(r"<think>\boxed{1}</think> so \boxed{\frac{1}{2}}") == (
        True,
        r"\frac{1}{2}",
    )
    assert match_answer("<think>no</think> 7") == (False, " 7")
    assert grade_answer(r"\frac{1}{2}", "0.5") == (True, r"\frac{1}{2}") and grade_answer(
        None, "1"
    ) == (False, "")
    assert (
        math_equal("2", "2.0")
        and not math_equal("2", "3")
        and not math_equal("", "3")
        and math_equal("x", "x", True, pi=3.14)
    )


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (r"\frac12", r"\frac{1}{2}"),
        (r"\frac{1}{2}", r"\frac{1}{2}"),
        (r"\frac1{72}", r"\frac{1}{72}"),
        (r"3\frac 34x", r"3\frac{3}{4}x"),
        ("x", "x"),
    ],
)
def test_fractions(given: str, expected: str) -> None:
    assert fix_fracs(given) == expected


def test_texts() -> None:
    assert remove_right_units(r"5\text{ apples}") == "5" and remove_right_units("5") == "5"
    assert validate_think_pattern("<think>a</think>b")
    assert not any(
        map(validate_think_pattern, ("a", "</think><think>", "<think></think><think></think>"))
    )
    with timeout_limit(seconds=60):
        pass
    with pytest.raises(TimeoutError, match="took longer than -1 s"), timeout_limit(seconds=-1):
        pass


class Length(RewardFn):
    def __init__(self, **args: float) -> None: ...

    def __call__(
        self,
        response: str,
        with_think: bool,
        format_score_coef: float,
        response_token: object,
        **more: object,
    ) -> dict[str, float]:
        return {
            "length": float(len(response)),
            "with_think": float(with_think),
            "coef": format_score_coef,
        }


class Own(MathBoxedWorkflow):
    def reset(self, task: object) -> None:
        super().reset(task)  # type: ignore[arg-type]
        self.reward_fn = Length(**self.reward_fn_args)


async def play(cls: type, engine: ScriptedEngine, **of_task: object) -> PlayedGroup:
    fields: dict[str, object] = {
        "taskset": "t",
        "index": 0,
        "prompt": "1+1?",
        "truth": "2",
        "num_runs": 2,
    }
    task = Task(**{**fields, "workflow": f"{__name__}:{cls.__name__}", **of_task})  # type: ignore[arg-type]
    recipes = Recipes()
    try:
        return await run_group(
            task,
            await recipes.get(task),
            engine,
            GroupId(1, 0, 0, 0),
            limits=RunLimits(max_timeout_s=20),
        )
    finally:
        await recipes.close()


async def test_a_files_own_reward_is_called_as_there() -> None:
    engine = ScriptedEngine("abc", "abcdef")
    group = await play(Own, engine, workflow_args={"with_think": True, "format_score_coef": 0.5})
    assert group.rewards == [4.5, 7.5] and "\\boxed{}" in engine.calls[0].messages[0]["content"]
    assert group.rows[0].metrics["with_think"] == 1.0


class Unnumbered(MathBoxedWorkflow):
    def run(self) -> list:  # type: ignore[type-arg]
        answers = self.model.chat(self.format_messages(), **self.rollout_args)
        for answer in answers:
            answer.reward = float(answer.response_text)
        return answers


async def test_answers_without_numbers_of_runs_belong_to_them_in_order() -> None:
    group = await play(Unnumbered, ScriptedEngine("1", "2"))
    assert group.rewards == [1.0, 2.0] and [r.id.run for r in group.rows] == [0, 1]


async def test_a_chat_in_the_prompts_column_is_the_task() -> None:
    from rft.extras.migrate.compat import trinity_task

    chat = ({"role": "user", "content": "hi"},)
    made = trinity_task.of(
        Task(taskset="t", index=0, messages=chat, row={"messages": list(chat)}, workflow="w"),
        Own,
        None,
    )
    assert made.task_desc == list(chat) and made.format_args.prompt_key == "messages"


def test_the_boxed_reward_takes_answer_and_truth_in_order():
    assert MathBoxedRewardFn()("so \\boxed{4}", "4", with_think=True) == {
        "accuracy": 1.0,
        "format_score": -0.1,
    }
    thought = "Sure. <think>two and two</think> \\boxed{4}"
    assert MathBoxedRewardFn()(thought, "4", with_think=True) == {
        "accuracy": 1.0,
        "format_score": 0.0,
    }

"""The judges that are shipped: rubric, reference, pairwise, group-relative."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from rft.errors import ConfigError
from rft.plugins import load_all
from rft.reward import judge_metrics
from rft.reward.base import score
from rft.reward.build_reward import build
from rft.testing.judge import FakeJudge, judged, make_transcript, score_with
from rft.types.task import Task

load_all()
TASK = Task(
    taskset="t",
    index=0,
    prompt="Why is the sky blue?",
    truth={"target": "scattering"},
    workflow="w",
)
BLOCK = re.compile(r"^<<<([\w ]+) \w+>>>\n(.*?)\n<<<end \w+>>>$", re.MULTILINE | re.DOTALL)


def made(judge: str, **args: Any) -> Any:
    return build(judge, {"cache": "off", **args})


def shown(model: FakeJudge) -> list[tuple[str, str]]:
    return BLOCK.findall(str(model.calls[-1].messages[-1]["content"]))


def test_rubric_weighs_criteria() -> None:
    model = FakeJudge({"correct": 10, "clear": 4})
    found = judged(
        made(
            "rubric_judge", criteria={"correct": 2, "clear": 1}, describe={"clear": "for a child"}
        ),
        model,
        "It scatters.",
    )
    assert found.value == pytest.approx(0.8) and found.parts == {"correct": 1.0, "clear": 0.4}
    assert shown(model) == [("question", "?"), ("answer", "It scatters.")]
    assert "- clear: for a child" in str(model.calls[0].messages[-1]["content"])
    assert judged(made("rubric_judge"), FakeJudge(1), "It scatters.").value == 0.1
    for wrong in ({}, {"key": 1}, {"a": 0}, {"a": -1, "b": 2}):
        with pytest.raises(ConfigError):
            made("rubric_judge", criteria=wrong)


def test_rubric_of_each_row() -> None:
    row = {
        "rubric": [
            {"criterion": "names Rayleigh", "points": 3},
            {"description": "is short", "weight": 1},
        ]
    }
    model = FakeJudge({"criterion 1": 10, "criterion 2": 2})
    found = judged(made("rubric_judge", rubric_key="rubric"), model, "Rayleigh did it.", row=row)
    assert found.value == pytest.approx((3 * 1.0 + 0.2) / 4)
    with pytest.raises(ValueError, match="no list of criteria in column 'rubric'"):
        judged(made("rubric_judge", rubric_key="rubric"), model, "Rayleigh did it.")


def test_negative_points_are_faults() -> None:
    row = {
        "rubric": [
            {"criterion": "is right", "points": 3},
            {"criterion": "invents a source", "points": -5},
        ]
    }

    def value(right: int, invents: int) -> float | None:
        model = FakeJudge({"criterion 1": right, "criterion 2": invents})
        return judged(
            made("rubric_judge", rubric_key="rubric"), model, "Rayleigh did it.", row=row
        ).value

    assert value(10, 1) == 1.0 and value(4, 1) == pytest.approx(0.4), (
        "a fault that is not there costs nothing"
    )
    assert value(10, 4) == pytest.approx((3 - 5 / 3) / 3)
    assert [value(10, 10), value(1, 1), value(1, 10)] == pytest.approx([0.1] * 3), (
        "never below an answer that says nothing"
    )
    model = FakeJudge(1)
    judged(made("rubric_judge", rubric_key="rubric"), model, "Rayleigh did it.", row=row)
    asked = str(model.calls[0].messages[-1]["content"])
    assert "- criterion 1: is right\n- criterion 2 (a fault: 1 if" in asked


@pytest.mark.parametrize("points", [[-5], [0], [0, -1]])
def test_a_row_without_positive_points_is_unscored(points: list[float]) -> None:
    model = FakeJudge(10)
    row = {"rubric": [{"criterion": "x", "points": p} for p in points]}
    found = judged(made("rubric_judge", rubric_key="rubric"), model, "Rayleigh did it.", row=row)
    assert (
        found.value is None
        and found.reason == "no criterion of row 0 has positive points"
        and not model.calls
    )


@pytest.mark.parametrize(
    "criterion",
    ["is right", {"criterion": "x", "points": "many"}, {"points": float("nan")}, {"points": None}],
)
def test_a_row_with_another_criterion_is_refused(criterion: Any) -> None:
    with pytest.raises(ValueError, match="criterion 1 of row 0"):
        judged(
            made("rubric_judge", rubric_key="rubric"),
            FakeJudge(1),
            "Rayleigh did it.",
            row={"rubric": [criterion]},
        )


async def test_reference() -> None:
    model = FakeJudge("yes")
    judge = made("reference_judge")
    (found,) = await score_with(judge, model, ["It scatters."], TASK)
    assert found.value == 1.0 and shown(model)[1] == ("reference", "scattering")
    (found,) = await score_with(judge, FakeJudge("no"), ["It scatters."], TASK)
    assert found.value == 0.0
    (none,) = await score_with(
        judge, FakeJudge("yes"), ["It scatters."], structs.replace(TASK, truth=None)
    )
    assert none.value is None and "no reference" in none.reason


def prefers(text: str) -> Any:
    """A judge that prefers the answer with `text` in it, wherever it stands."""

    def says(prompt: str) -> str:
        first, second = (
            body for name, body in BLOCK.findall(prompt) if name in ("first", "second")
        )
        return (
            "tie" if (text in first) == (text in second) else "first" if text in first else "second"
        )

    return says


async def test_pairs_are_judged_in_both_orders() -> None:
    judge = made("pairwise_judge", name="paired")
    for says, expected in (
        (prefers("good"), 1.0),
        (prefers("scatter"), 0.0),
        ("tie", 0.5),
        ("first", 0.5),
        ("second", 0.5),
    ):
        model = FakeJudge(says)
        (found,) = await score_with(judge, model, ["a good answer"], TASK)
        assert found.value == expected and len(model.calls) == 2
    told = judge_metrics.counts()
    assert told["judge/paired/pairs"] == 5 and told["judge/paired/order_flips"] == 2, (
        "one that always says first has flipped"
    )
    (found,) = await score_with(
        made("pairwise_judge", max_retries=0),
        FakeJudge("tie", replies=["?"]),
        ["a good answer"],
        TASK,
    )
    assert found.value is None, "half a comparison is none"


async def test_pairs_within_a_group() -> None:
    model = FakeJudge(prefers("good"))
    scores = await score_with(
        made("pairwise_judge", against="group"), model, ["good a", "bad b", "bad c", ""], TASK
    )
    assert [s.value for s in scores] == [1.0, 0.25, 0.25, 0.0] and len(model.calls) == 6
    (alone,) = await score_with(made("pairwise_judge", against="group"), model, ["good a"], TASK)
    assert alone.value is None and "no other answer" in alone.reason


async def test_a_group_is_scored_in_one_question() -> None:
    def says(prompt: str) -> dict[str, float]:
        return {
            name: len(body) / 10
            for name, body in BLOCK.findall(prompt)
            if name.startswith("answer")
        }

    model = FakeJudge(says)
    scores = await score_with(
        made("ruler_judge"), model, ["four", "sixsix", "four ", ":", "eighteig"], TASK
    )
    assert [s.value for s in scores] == [0.4, 0.6, 0.4, 0.0, 0.8] and len(model.calls) == 1
    assert len(shown(model)) == 4, "the question and three different answers"
    scores = await score_with(
        made("ruler_judge", max_retries=0), FakeJudge(replies=["?"]), ["four", "sixsix", ""], TASK
    )
    assert [s.value for s in scores] == [None, None, 0.0]


async def test_a_judge_may_be_one_part_of_a_reward_and_be_shaped() -> None:
    parts = {
        "judge": {"reward": "rubric_judge", "weight": 0.5, "args": {"cache": "off"}},
        "exact": {"reward": "exact_answer"},
    }
    weighted: Any = build("weighted_reward", {"rewards": parts})
    await weighted.prepare({"j": FakeJudge(8)})
    task = Task(taskset="t", index=0, prompt="1+1?", truth="2", workflow="w")
    found = await score(weighted, task, make_transcript("2"))
    await weighted.close()
    assert found.value == pytest.approx(1.4) and found.parts["judge/quality"] == 0.8
    shaped: Any = build(
        "rubric_judge",
        {
            "cache": "off",
            "enable_overlong_penalty": True,
            "cache_length": 1,
            "max_response_length": 3,
        },
    )
    await shaped.prepare({"j": FakeJudge(8)})
    assert (await score(shaped, task, make_transcript("two"))).value == pytest.approx(-0.2)
    await shaped.close()


def test_check_says_which_model_is_missing(tiny_model: Path, tmp_path: Path) -> None:
    from rft.preflight.check import check
    from rft.testing import tiny

    config = Path(__file__).parents[3] / "examples" / "tiny" / "config.yaml"
    parts = (
        "{judge: {reward: rubric_judge, args: {enable_overlong_penalty: true, cache_length: "
        "1}}, exact: {reward: exact_answer}}"
    )
    changes = (
        f"model.model_path={tiny_model}",
        "buffer.explorer_input.default_reward_fn_type=weighted_reward",
        f"buffer.explorer_input.taskset.reward_fn_args.rewards={parts}",
        f"buffer.explorer_input.eval_tasksets.0.reward_fn_args.rewards={parts}",
    )
    (error, *_) = check(config, changes).errors
    assert "no auxiliary models; rubric_judge asks one" in str(error)
    server = (
        "explorer.auxiliary_models=[{engine_type: external, model_path: j, "
        "external_model_config: {base_url: 'http://127.0.0.1:1/v1'}}]"
    )
    assert not check(config, (*changes, server)).errors
    folder = tiny.make(tmp_path / "rm", labels=1)
    scorer = (
        f"explorer.auxiliary_models=[{{engine_type: transformers, model_path: {folder}, task: "
        f"score}}]"
    )
    for args, why in (
        ("{}", None),
        ("{model: rm}", "explorer.auxiliary_models has auxiliary_model_0"),
    ):
        model = (
            changes[0],
            "buffer.explorer_input.default_reward_fn_type=reward_model",
            f"buffer.explorer_input.taskset.reward_fn_args={args}",
            f"buffer.explorer_input.eval_tasksets.0.reward_fn_args={args}",
        )
        errors = check(config, (*model, scorer)).errors
        assert (why in str(errors[0])) if why is not None else not errors

"""A judge that can say one of two words: the probability of the first is the reward."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rft.errors import ConfigError
from rft.plugins import load_all
from rft.reward import judge_metrics
from rft.reward.build_reward import build
from rft.testing.judge import FakeJudge, judged, probes, score_with
from rft.types.task import Task
from tests.helpers.careless_judge import CarelessJudge

load_all()
EXAMPLES = [
    {"answer": "The tea was cold.", "word": "yes"},
    {"answer": "The tea was good.", "word": "no"},
]


def made(**args: Any) -> Any:
    return build(
        "either_or_judge",
        {"cache": "off", "question": "Is it a complaint?  Answer yes or no.", **args},
    )


def test_the_reward_is_the_probability_of_yes() -> None:
    model = FakeJudge(0.8)
    assert judged(made(), model, "The soup was cold.").value == pytest.approx(0.8, abs=1e-6)
    assert judged(made(), FakeJudge(0.2), "The soup was cold.").value == pytest.approx(
        0.2, abs=1e-6
    )
    (request,) = model.calls
    assert (
        request.choices == ("yes", "no")
        and request.sampling.temperature == 0
        and request.sampling.max_tokens == 1
    )


def test_a_threshold_makes_it_0_or_1_and_keeps_the_probability() -> None:
    for share, value in [(0.7, 1.0), (0.3, 0.0)]:
        found = judged(made(threshold=0.6), FakeJudge(share), "The soup was cold.")
        assert found.value == value and found.parts["likely"] == pytest.approx(share, abs=1e-6)


def test_examples_are_earlier_verdicts_and_every_text_is_fenced() -> None:
    model = FakeJudge(0.5)
    judged(
        made(examples=EXAMPLES, show_question=True),
        model,
        "The soup was cold.",
        prompt="Complain about the soup.",
    )
    system, *shots, asked = model.calls[0].messages
    assert [m["role"] for m in shots] == ["user", "assistant", "user", "assistant"] and system[
        "role"
    ] == "system"
    assert [m["content"] for m in shots[1::2]] == ["yes", "no"] and "The tea was cold." in shots[0][
        "content"
    ]
    mark = str(system["content"]).split("<<<end ")[1].split(">>>")[0]
    assert f"<<<question {mark}>>>\nComplain about the soup.\n<<<end {mark}>>>" in asked["content"]
    assert f"<<<answer {mark}>>>\nThe soup was cold.\n<<<end {mark}>>>" in asked["content"]
    assert asked["content"].endswith("Is it a complaint?  Answer yes or no.")


@pytest.mark.parametrize("nature", [{}, {"sloppy": True}], ids=["gullible", "sloppy"])
async def test_no_probe_talks_it_round(nature: dict[str, bool]) -> None:
    async def value(text: str, order: str) -> float | None:
        (score,) = await score_with(
            made(), CarelessJudge(0.1, gullible=[order] if order else [], **nature), [text], task()
        )
        return score.value

    values = await asyncio.gather(*(value(p.answer, p.order) for p in probes()))
    assert all(v is None or v < 0.5 for v in values)


def test_a_model_that_tells_no_probability_leaves_it_unscored() -> None:
    found = judged(made(max_retries=0), FakeJudge(replies=["yes"]), "The soup was cold.")
    assert found.value is None and "its server has to give log-probs" in found.reason
    found = judged(made(max_retries=0), FakeJudge(replies=["perhaps"]), "The soup was cold.")
    assert found.value is None
    assert judged(made(), FakeJudge(0.9), "...").value == 0  # says nothing


async def test_a_verdict_is_remembered_with_its_probability(tmp_path: Path) -> None:
    model = FakeJudge(0.8)
    args = {"cache": str(tmp_path / "judge.db"), "name": "remembered"}
    for _ in range(2):
        (found,) = await score_with(made(**args), model, ["The soup was cold."], task())
        assert found.value == pytest.approx(0.8, abs=1e-6)
    assert len(model.calls) == 1 and judge_metrics.counts()["judge/remembered/cache_hit"] == 1
    await score_with(made(**args, examples=EXAMPLES), model, ["The soup was cold."], task())
    assert len(model.calls) == 2  # another question


@pytest.mark.parametrize(
    "wrong",
    [
        {"question": ""},
        {"threshold": 1.0},
        {"examples": [{"answer": "x", "word": "maybe"}]},
        {"criteria": {"a": 1}},
        {"words": ["yes", "Yes"]},
    ],
)
def test_bad_arguments(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        made(**wrong)


def task() -> Task:
    return Task(taskset="t", index=0, prompt="Complain.", workflow="w")

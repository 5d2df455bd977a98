"""What a judge was asked, and what it replied, is kept with the run that it judged."""

from __future__ import annotations

import json
from typing import Any

from rft.plugins import load_all
from rft.reward import exchanges
from rft.reward.delimiters import PromptDelimiters, Scale
from rft.reward.judge_base import Judge
from rft.testing import ScriptedModel, run_workflow
from rft.testing.judge import FakeJudge

load_all()
ROW = {"prompt": "Why is the sky blue?", "truth": "scattering"}


class Clarity(Judge):
    scale = Scale(1, 5)

    def prompt(self, case: Any, delimit: PromptDelimiters) -> str:
        return f"How clear?\n{delimit('answer', case.answer)}\n{delimit.ask(score=self.scale)}"


def kept(judge: FakeJudge, **args: Any) -> list[dict[str, Any]]:
    result = run_workflow(
        "simple_workflow",
        ROW,
        ScriptedModel("Light is scattered."),
        reward=Clarity(cache="off", **args),
        models={"judge": judge},
    )
    (row,) = result.experiences
    found: list[dict[str, Any]] = row.info.get(exchanges.KEY, [])
    return found


def test_question_and_reply_are_kept() -> None:
    judge = FakeJudge(4)
    (told,) = kept(judge)
    asked = [{"role": m["role"], "content": m["content"]} for m in judge.calls[0].messages]
    assert told["question"] == asked
    assert "Light is scattered." in asked[-1]["content"]
    assert json.loads(told["reply"].splitlines()[-1])["score"] == 4
    assert "why" not in told


def test_a_reply_that_cannot_be_read_is_kept_with_the_reason() -> None:
    (told,) = kept(FakeJudge(replies=["no verdict here"] * 9), max_retries=1)
    assert told["reply"] == "no verdict here"
    assert "cannot be read" in told["why"]


def test_what_is_kept_is_bounded_and_without_secrets() -> None:
    secret = "hf_" + "a1B2c3D4" * 4
    (told,) = kept(FakeJudge(replies=[f"{secret} " + "x" * 50_000] * 9), max_retries=0)
    assert secret not in json.dumps(told)
    assert len(told["reply"]) < exchanges.MOST_CHARS + 100
    with exchanges.noted() as found:
        for _ in range(50):
            exchanges.note("j", (), "r", "")
    assert len(found) == exchanges.MOST_EXCHANGES
    exchanges.note("j", (), "outside", "")
    assert len(found) == exchanges.MOST_EXCHANGES

"""A run that is slow says whom it waits for, whichever process that is in."""

from __future__ import annotations

import re
import threading

import pytest

from rft.testing.judge import FakeJudge
from tests.helpers import runs
from tests.helpers.judge_server import JudgeServer

pytestmark = pytest.mark.e2e

JUDGE = """
from rft import Judge, register


@register.reward("slow_judge")
class SlowJudge(Judge):
    def prompt(self, case, delimit):
        return delimit("answer", case.answer) + delimit.ask(score=self.scale)
"""


def test_a_run_whose_judge_does_not_answer_names_it(launch, tiny_model, tmp_path):
    """N2: 110 seconds without a line."""
    (tmp_path / "judge.py").write_text(JUDGE)
    answers = threading.Event()
    judge = FakeJudge(7)
    reply = judge.reply

    def late(messages):
        assert answers.wait(120)
        return reply(messages)

    judge.reply = late
    with JudgeServer(judge) as server:
        model = (
            f"{{engine_type: external, model_path: m, external_model_config: {{base_url: "
            f"'{server.url}'}}}}"
        )
        given = (
            "trainer.total_steps=1",
            f"plugin_dirs=[{tmp_path}]",
            f"explorer.auxiliary_models=[{model}]",
        )
        reward = "buffer.explorer_input.default_reward_fn_type=slow_judge"
        run = launch(
            *runs.arguments(tiny_model, tmp_path, *runs.SMALL, *given, reward),
            OPENAI_API_KEY="sk-test",
        )
        run.wait_for("for judge slow_judge, ")
        answers.set()
        assert run.end(120) == 0, run.output
    line = next(line for line in run.lines if "for judge slow_judge" in line)
    assert re.fullmatch(
        r"wait  explore step 1: \d of 4 groups, \d+ s; \d+ questions? waits? for judge slow_judge, "
        r"\d+ s\n",
        line,
    )

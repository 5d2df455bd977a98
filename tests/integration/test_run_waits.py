"""A run that is slow says whom it waits for, whichever process that is in."""

from __future__ import annotations

import io
import re
import sys
import threading

import pytest

from rft.launch import progress
from rft.launch.execute import execute
from rft.launch.runtime import LocalParts
from rft.testing.judge import FakeJudge
from rft.worker import teller
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


HELD = """
import sys

from rft import register

hear = sys.stdout.hear  # waits until a line about waiting has the text
hear("checking ")


@register.reward("held")
class Held:
    def prepare(self, models):
        hear("preparing rewards")

    def __call__(self, task, transcript):
        hear("evaluating copy_eval: " if task.taskset == "copy_eval" else "explore step 1: ")
        hear("wait for reward held")
        return 0.5

    def close(self):
        hear("closing the rewards")
"""


class Heard(io.StringIO):
    """Standard output whose lines can be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self._news = threading.Condition()

    def write(self, text: str) -> int:
        with self._news:
            self._news.notify_all()
            return super().write(text)

    def hear(self, text: str) -> None:
        said = re.compile(rf"^wait  .*{re.escape(text)}", re.MULTILINE)
        with self._news:
            assert self._news.wait_for(lambda: said.search(self.getvalue()), 60), self.getvalue()


def test_every_phase_says_what_it_waits_for(tiny_model, tmp_path, monkeypatch):
    """N2: 40 s of the check at the start and the end of a run were mute.  Each phase goes on once
    its line is there.
    """
    (tmp_path / "held.py").write_text(HELD)
    out = Heard()
    for module in (teller, progress):
        monkeypatch.setattr(module, "LOOK_S", 0.1)
    monkeypatch.setattr(teller, "QUIET_S", 0.2)
    monkeypatch.setattr(sys, "stdout", out)
    end = LocalParts.end

    async def held(self, **how):
        out.hear("ending the parts of the run")
        await end(self, **how)

    monkeypatch.setattr(LocalParts, "end", held)
    changes = (
        f"model.model_path={tiny_model}",
        f"checkpoint_root_dir={tmp_path}",
        *runs.SMALL,
        "trainer.total_steps=1",
        "explorer.eval_on_startup=true",
        "buffer.explorer_input.default_reward_fn_type=held",
    )
    done = execute(runs.TINY, changes, plugin_dirs=[str(tmp_path)], in_process=True)
    assert done.version.step == 1

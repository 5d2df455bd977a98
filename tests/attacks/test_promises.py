"""Figures and bounds that the documents promise, against what the code does."""

from __future__ import annotations

import os
import pwd
import re
from pathlib import Path
from typing import Any

import pytest

from rft.extras.sandbox import jobs
from rft.extras.sandbox.code_reward import CodeArgs
from rft.extras.sandbox.code_sandbox import Sandbox
from rft.extras.sandbox.jobs import ProgramVerdict
from rft.extras.sandbox.processes import ForkServer, ProgramLimits
from rft.reward.delimiters import PromptDelimiters
from rft.reward.judge_args import JudgeArgs
from rft.reward.judge_base import AGAIN_TEMPERATURE
from rft.testing.judge import probes
from rft.workflow import endpoint, endpoint_wire
from tests.attacks.table import attack

HOWTO = Path(__file__).parents[2] / "docs" / "howto"
LIMITS = ProgramLimits(timeout_s=20, memory_mb=512)


def doc(name: str) -> str:
    return " ".join((HOWTO / f"{name}.md").read_text(encoding="utf-8").split())


def run(server: ForkServer, body: str, wanted: str) -> ProgramVerdict:
    return jobs.judge_pairs(server, body, [("", wanted)], LIMITS)


@attack("–", "code.md: what a program may take", "the limits that stand there are those that hold")
def test_limits_of_a_program(server: ForkServer) -> None:
    text = doc("code")
    default = ProgramLimits()
    assert (default.output_kb, default.file_mb, default.files) == (1024, 16, 64)
    assert "1 MB of output, 16 MB of files, 64 open files" in text
    assert run(
        server,
        "import os\nn = 0\ntry:\n    while True: os.dup(0); n += 1\nexcept OSError: print(n < 64)",
        "True",
    ).right
    assert run(server, "print('x' * (2 << 20))", "x").reason == "output"
    assert (
        run(server, "print('x' * (2 << 20))", "x" * (2 << 20)).right
        and "four times what is wanted" in text
    )


@attack("–", "code.md: a program of root's", "is that of a user whom no account has")
def test_a_program_is_nobodys(server: ForkServer) -> None:
    if os.geteuid() != 0:
        pytest.skip("an ordinary account's programs run under its own number")
    taken = {entry.pw_uid for entry in pwd.getpwall()} - {pwd.getpwnam("nobody").pw_uid}
    assert run(
        server,
        f"import os\nprint(os.getuid() in {taken} or os.getgid() == 0 or bool(os.getgroups()))",
        "False",
    ).right


@attack(
    "–",
    "code.md: numbers of 4,300 digits, and of one more",
    "the first is exchanged, the second is an error",
)
@pytest.mark.parametrize(("digits", "right"), [(4300, True), (4301, False)])
def test_long_numbers(server: ForkServer, digits: int, right: bool) -> None:
    wanted = 10 ** (digits - 1) if right else 0
    verdict = jobs.judge_calls(
        server, "def f(n): return 10 ** n", "f", [([digits - 1], wanted)], LIMITS
    )
    assert verdict.right is right
    assert "numbers of up to 4,300 digits" in doc("code")


@attack("–", "code.md: how many programs run at a time", "as it says")
def test_as_many_programs_as_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "as the machine has cores, 2 to 16" in doc("code")
    for cores, size in ((1, 2), (7, 7), (64, 16)):
        monkeypatch.setattr(os, "cpu_count", lambda cores=cores: cores)
        made = Sandbox()
        assert made._size == size
        made.close()


@attack("–", "judge.md, code.md: defaults", "as they say")
@pytest.mark.parametrize(
    ("of", "page"), [(JudgeArgs, "judge"), (CodeArgs, "code")], ids=["judge.md", "code.md"]
)
def test_arguments_that_the_pages_name_have_the_defaults_that_they_say(of: Any, page: str) -> None:
    text = doc(page)
    fields = of.model_fields
    said = {
        "judge": {
            "temperature": "0",
            "max_tokens": "512",
            "timeout_s": "120",
            "max_retries": "2",
            "max_concurrent": "32",
            "max_chars": "32000",
        },
        "code": {"sandbox_max_concurrent": "(64)"},
    }[page]
    for name, value in said.items():
        assert f"`{name}` {value}" in text and fields[name].default == float(value.strip("()")), (
            name
        )


@attack("–", "judge.md: random bits of marks and keys, number of probes", "as it says")
def test_marks_and_probes_of_judges() -> None:
    text = doc("judge")
    one = PromptDelimiters()
    other = PromptDelimiters()
    assert (
        (4 * len(one.id), 4 * len(one.key)) == (64, 24)
        and one.id != other.id
        and one.key != other.key
    )
    assert re.search(r"\b64[ -](random )?bits?\b", text) and re.search(
        r"\b24[ -](random )?bits?\b", text
    )
    assert (
        f"{len(probes())} " in text
        and f"the {sum(len(p.answer) <= 600 for p in probes())} probes of at most" in text
    )
    assert f"temperature {AGAIN_TEMPERATURE:g}" in text
    assert (
        "eight languages besides English" in text
        and sum(p.kind == "language" for p in probes()) == 8
    )


@attack("–", "agent.md: bounds of a request", "as it says")
def test_bounds_of_requests() -> None:
    text = doc("agent")
    bounds = (
        endpoint_wire.MAX_BYTES,
        endpoint_wire.MAX_VALUES,
        endpoint_wire.MAX_DEPTH,
        endpoint.HEAD_S,
        endpoint.BODY_S,
    )
    assert bounds == (16 << 20, 1 << 20, 64, 15.0, 15.0)
    assert endpoint.KEEP_ALIVE_S == 15.0 and "longer than 15 s is preceded by comments" in text
    for figure in (
        "at most 16 MiB",
        "million values",
        "64 levels",
        "take longer than 15 s",
        "another 15 s",
    ):
        assert figure in text

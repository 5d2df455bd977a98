"""Rewards for programs: run the answer's code in a sandbox against the task's tests.

Tests are in the row: `test` and `entry_point` (HumanEval), or in the truth: {inputs, outputs[,
fn_name]} (APPS, TACO, veRL's prime_code), or a list of asserts (MBPP).
Invariant: a misbehaving program scores `wrong` with a reason; if the sandbox or the tests fail, the
run is not scored.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from dataclasses import replace
from functools import lru_cache
from typing import Any

import msgspec
from pydantic import BaseModel, ConfigDict, Field, model_validator

from rft.extras.sandbox.code_sandbox import Calls, Checks, Pairs, ProgramJudge, Sandbox, Tests
from rft.extras.sandbox.jobs import BrokenTests, ProgramVerdict
from rft.extras.sandbox.processes import Level, ProgramLimits, SandboxError, SandboxUnavailable
from rft.extras.sandbox.remote_sandbox import RemoteSandbox
from rft.reward.base import Reward, reward
from rft.reward.extract import fenced
from rft.reward.readings import UnreadableTruth, note, where
from rft.types.completion import Score, Transcript
from rft.types.task import Task

LOCAL = Sandbox()
_local = lru_cache(Sandbox)  # one sandbox for equal arguments
_remote = lru_cache(maxsize=8)(RemoteSandbox)
_FIRST_CASES = 10  # cases whose share is scored, as in veRL
_FUTURE = re.compile(r"^from __future__ import .*\n?", re.MULTILINE)


class CodeArgs(BaseModel):
    """`timeout_s`: for each input, or for all asserts of a test.  `continuous`: a failing program
    scores the share of tests passed.

    `test_key` etc.: columns of the row.  `sandbox_level`: isolation of programs on this machine,
    null: namespaces or else landlock.  With `sandbox_url` a remote service runs the programs.
    """

    model_config = ConfigDict(extra="forbid")
    timeout_s: float = Field(10.0, gt=0)
    memory_mb: int = Field(1024, ge=64)
    right: float = 1.0
    wrong: float = 0.0
    continuous: bool = False
    test_key: str = "test"
    entry_point_key: str = "entry_point"
    prompt_key: str = "prompt"
    sandbox_level: Level | None = None
    sandbox_url: str | None = None
    sandbox_max_concurrent: int = Field(64, ge=1)
    sandbox_memory_mb: int | None = Field(None, ge=64)

    @model_validator(mode="after")
    def _of_one_place(self) -> CodeArgs:
        if self.sandbox_level is not None and self.sandbox_url is not None:
            raise ValueError(
                "sandbox_level is about this machine, sandbox_url names another one; leave one of "
                "them away"
            )
        return self


class PrimeCodeArgs(CodeArgs):
    continuous: bool = True


@reward("code_reward", args=CodeArgs)
class CodeReward(Reward):
    """`right` if the answer's last code block passes all tests of its task, else `wrong`.

    Part `tests_passed`: the share of tests passed.
    """

    def __init__(self, **args: Any) -> None:
        self.args = CodeArgs(**args)
        a = self.args
        self.limits = ProgramLimits(
            timeout_s=a.timeout_s, memory_mb=a.sandbox_memory_mb or a.memory_mb
        )
        self.sandbox = _place(a)

    async def __call__(self, task: Task, transcript: Transcript) -> Score:
        checks = checks_of(task, self.args)
        prompt = ""
        entry = ""
        if isinstance(checks, Tests):
            prompt = checks.prompt
            entry = checks.entry_point
            checks = replace(checks, gold=program_of(self.gold_answer(task) or "", prompt, entry))
        program = program_of(transcript.answer, prompt, entry)
        note("program", program, type(checks).__name__)
        if not program.strip():
            return Score(
                value=self.args.wrong,
                parts={"tests_passed": 0.0},
                reason="no_code: the answer holds no program",
            )
        try:
            verdict = await self._judge(program, checks)
        except (SandboxError, BrokenTests) as e:
            return Score(value=None, reason=f"{type(e).__name__}: {e}")
        share = verdict.passed / verdict.total
        value = (
            self.args.right if verdict.right else share if self.args.continuous else self.args.wrong
        )
        reason = "" if verdict.right else f"{verdict.reason}: {verdict.detail}"
        return Score(value=value, parts={"tests_passed": share}, reason=reason)

    def gold_answer(self, task: Task) -> str | None:
        """Return a solution from the row, with which `rft check` can try the tests."""
        columns = (task.row.get(name) for name in ("canonical_solution", "solution"))
        return next((text for text in columns if isinstance(text, str) and text.strip()), None)

    def remarks(self) -> list[str]:
        """Return how this machine isolates programs, for `rft check`."""
        if not isinstance(self.sandbox, Sandbox):
            return []
        try:
            return [f"programs run at sandbox_level {self.sandbox.level()} on this machine"]
        except SandboxUnavailable as e:
            return [str(e)]

    async def prepare(self, models: Any) -> None:
        """Raise before the first run if this machine cannot isolate programs."""
        if isinstance(self.sandbox, Sandbox):
            await asyncio.to_thread(self.sandbox.level)

    async def close(self) -> None:
        await asyncio.to_thread(self.sandbox.close)

    async def _judge(self, program: str, checks: Checks) -> ProgramVerdict:
        verdict = await self.sandbox.judge(program, checks, self.limits)
        if verdict.right or not self.args.continuous:
            return verdict
        if verdict.total == 1 or verdict.reason == "timeout":  # a timeout ends the run
            cases = min(verdict.total, _FIRST_CASES)
            return replace(verdict, passed=min(verdict.passed, cases), total=cases)
        return await self.sandbox.judge(program, _first(checks), self.limits, all=True)


@reward("prime_code_reward", args=PrimeCodeArgs)
class PrimeCodeReward(CodeReward):
    """`code_reward` that scores a failing program with its share of the first ten tests."""

    def __init__(self, **args: Any) -> None:
        super().__init__(**{"continuous": True} | args)


def _place(args: CodeArgs) -> ProgramJudge:
    if args.sandbox_url is not None:
        return _remote(args.sandbox_url, max_concurrent=args.sandbox_max_concurrent)
    return LOCAL if args.sandbox_level is None else _local(level=args.sandbox_level)


def _first(checks: Checks) -> Checks:
    if isinstance(checks, Pairs):
        return Pairs(checks.pairs[:_FIRST_CASES])
    if isinstance(checks, Calls):
        return Calls(checks.function, checks.cases[:_FIRST_CASES])
    return replace(checks, tests=checks.tests[:_FIRST_CASES])


def program_of(answer: str, prompt: str = "", entry_point: str = "") -> str:
    """Return the last ```python block, else the last untagged block, else the whole answer; after
    the prompt's code if the answer continues or uses that code.
    """
    blocks = [
        block for block in fenced(answer) if block.language in ("", "python", "py", "python3")
    ]
    code = (
        max(blocks, key=lambda block: (bool(block.language), block.start)).body
        if blocks
        else answer
    )
    if not prompt or f"def {entry_point}" not in prompt or not code.strip():
        return code
    if not re.search(rf"\bdef\s+{re.escape(entry_point)}\b", code):
        return prompt + code  # the answer continues the prompt's code
    future = "".join(_FUTURE.findall(code))  # Python requires these imports first
    return f"{future}{prompt}\n\n{_FUTURE.sub('', code)}" if _compiles(prompt) else code


def _compiles(text: str) -> bool:
    with contextlib.suppress(SyntaxError, ValueError):
        return bool(compile(text, "<prompt>", "exec"))
    return False


def checks_of(task: Task, args: CodeArgs) -> Checks:
    """Return the task's tests.  Raises UnreadableTruth (a ValueError) if there are none in a known
    form.
    """
    row = task.row
    truth = _parsed(task.truth)
    entry = row.get(args.entry_point_key)
    test = row.get(args.test_key)
    prompt = row.get(args.prompt_key)
    prompt = prompt if isinstance(prompt, str) else task.prompt or ""
    if not isinstance(test, str) and isinstance(truth, str):
        test = truth
    if isinstance(test, str) and isinstance(entry, str):
        return Tests([test], entry, prompt)
    setup = row.get("test_setup_code") or _text(row.get("test_imports") or "")
    if isinstance(truth, dict) and "assert_case" in truth:
        truth = truth["assert_case"]
    if (
        isinstance(truth, dict)
        and truth.get("inputs")
        and len(truth["inputs"]) == len(truth.get("outputs") or ())
    ):
        return _in_and_out(truth)
    asserts = [truth] if isinstance(truth, str) else truth
    if (
        isinstance(asserts, list)
        and asserts
        and all(isinstance(a, str) and a.strip() for a in asserts)
    ):
        return Tests([f"{setup}\n{a}" if setup else a for a in asserts])
    raise UnreadableTruth(
        f"{where(task)} has no tests: give columns {args.test_key} and {args.entry_point_key}, or "
        f"a truth "
        "(format.response_key) that is {inputs, outputs} of equal length or a list of asserts"
    )


def _in_and_out(truth: dict[str, Any]) -> Checks:
    if not truth.get("fn_name"):
        return Pairs(
            [
                (_text(stdin), _text(expected))
                for stdin, expected in zip(truth["inputs"], truth["outputs"], strict=True)
            ]
        )
    cases = []
    for arguments, expected in zip(truth["inputs"], truth["outputs"], strict=True):
        if isinstance(arguments, str):  # one JSON value per line
            arguments = [
                msgspec.json.decode(line) for line in arguments.splitlines() if line.strip()
            ]
            expected = _parsed(expected)
        cases.append(([_with_numbers(argument) for argument in arguments], expected))
    return Calls(str(truth["fn_name"]), cases)


def _with_numbers(value: Any) -> Any:
    """Convert numeric keys of a JSON mapping to integers, as APPS and TACO intend."""
    integer_keys = isinstance(value, dict) and all(
        re.fullmatch(r"-?\d{1,18}", str(key)) for key in value
    )
    return {int(key): entry for key, entry in value.items()} if integer_keys else value


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _parsed(value: Any) -> Any:
    """Parse JSON in a text, as data sets store it; return any other text unchanged."""
    with contextlib.suppress(ValueError):
        return json.loads(value) if isinstance(value, str) else value
    return value

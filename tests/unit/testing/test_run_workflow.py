"""Authors' tests: a scripted, flaky or recorded model plays a task, what happened is checked and
can be read.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from rft.errors import ConfigError, EngineFailed, PluginError
from rft.reward.base import reward
from rft.testing import (
    FlakyModel,
    ScriptedModel,
    run_workflow,
    run_workflow_async,
    task_of,
    tool_call,
)
from rft.testing.play import InvariantBroken, WorkflowResult, check, history
from rft.types.completion import Score, Transcript
from rft.types.ports import GenerateRequest, ScoreRow
from rft.types.task import SamplingArgs, Task
from rft.workflow.base import RunContext, Workflow
from rft.workflow.call_workflow import RunError

ROW = {"prompt": "Guess a digit.", "truth": "7"}


class Guess(Workflow):
    def __init__(self, most: int = 5) -> None:
        self.most = most

    async def run(self, task: Task, ctx: RunContext) -> Transcript:
        messages = task.chat()
        for turn in range(self.most):
            said = await ctx.chat(messages)
            if said.text == task.truth:
                return ctx.transcript(
                    score=Score(value=1 / (turn + 1), parts={"found": 1.0}),
                    metrics={"turns": turn + 1},
                )
            messages += [said.message, {"role": "user", "content": "no"}]
        return ctx.transcript(score=Score(value=0.0))


class Blocking:
    isolated = True

    def run(self, task: Task, ctx: Any) -> Transcript:
        ctx.chat(task.chat())
        (judged,) = ctx.wait(
            ctx.model("judge").generate(
                GenerateRequest(messages=({"role": "user", "content": "?"},))
            )
        )
        return ctx.transcript(score=Score(value=float(judged.text)), info={"pid": os.getpid()})  # type: ignore[no-any-return]


def test_what_it_gives_back() -> None:
    model = ScriptedModel("3", "9", "7", "left")
    result = run_workflow(Guess, ROW, model)
    assert (
        result.answers == ["3", "9", "7"]
        and result.reward == 1 / 3
        and result.score.parts == {"found": 1.0}
    )
    assert [m["content"] for m in result.messages] == ["Guess a digit.", "3", "no", "9", "no", "7"]
    assert result.metrics == {"turns": 3.0} and not result.failed and result.reason == ""
    assert len(result.transcript.turns) == 3 and result.experience.num_response_tokens == 6
    assert (
        model.unused == ["left"]
        and len(model.calls) == 3
        and [c.model for c in result.calls] == ["policy"] * 3
    )


@pytest.mark.parametrize(
    "row",
    [
        "Guess a digit.",
        {"messages": [{"role": "user", "content": "Guess a digit."}], "answer": "7"},
    ],
)
def test_rows_become_tasks(row: Any) -> None:
    task = task_of(row, truth="7", sampling=SamplingArgs(max_tokens=3))
    assert (
        task.chat() == [{"role": "user", "content": "Guess a digit."}]
        and task.sampling.max_tokens == 3
    )
    assert run_workflow(Guess, task, ScriptedModel("7")).reward == 1.0
    assert task_of(task) is task


def test_runs_have_scripts_of_their_own() -> None:
    result = run_workflow(
        Guess, ROW, ScriptedModel(per_run=[["7"], ["1", "7"], ["1", "2", "7"]]), n=3
    )
    assert result.rewards == [1.0, 0.5, 1 / 3] and [r.answers for r in result.runs] == [
        ["7"],
        ["1", "7"],
        ["1", "2", "7"],
    ]
    with pytest.raises(EngineFailed, match="answers for 1 runs; this is run 1"):
        run_workflow(Guess, ROW, ScriptedModel(per_run=[["7"]]), n=2)
    with pytest.raises(ValueError, match="or per_run"):
        ScriptedModel("7", per_run=[["7"]])


def test_a_script_that_is_too_short_says_what_was_asked() -> None:
    with pytest.raises(EngineFailed, match="over after 1 calls, and the workflow asks again: 'no'"):
        run_workflow(Guess, ROW, ScriptedModel("1"))


def test_workflow_and_reward_by_name_class_function_and_object() -> None:
    class Fixed:
        def __init__(self, value: float = 0.25) -> None:
            self.value = value

        def __call__(self, task: Task, transcript: Transcript) -> float:
            return self.value

    async def later(task: Task, transcript: Transcript) -> float:
        await asyncio.sleep(0)
        return 0.75

    ask = ("simple_workflow", {"prompt": "2+2?", "truth": "4"})
    for given, args, value in [
        ("exact_answer", None, 1.0),
        (Fixed, {"value": 0.5}, 0.5),
        (Fixed(0.125), None, 0.125),
        (later, None, 0.75),
        (lambda task, transcript: {"a": 1.0, "b": 2.0}, None, 3.0),
    ]:
        assert (
            run_workflow(*ask, ScriptedModel("4"), reward=given, reward_args=args).reward == value
        ), given
    with pytest.raises(ConfigError, match="unknown argument 'vlaue'"):
        run_workflow(*ask, ScriptedModel("4"), reward=Fixed, reward_args={"vlaue": 1})
    with pytest.raises(ConfigError, match="unknown argument 'mots'"):
        run_workflow(Guess, ROW, ScriptedModel("7"), workflow_args={"mots": 1})
    with pytest.raises(PluginError, match="unknown workflow 'simple_workflwo'"):
        run_workflow("simple_workflwo", ROW, ScriptedModel("7"))
    with pytest.raises(TypeError, match="is an object already"):
        run_workflow(*ask, ScriptedModel("4"), reward=Fixed(), reward_args={"value": 1})


def test_what_is_raised_is_raised_here_or_kept() -> None:
    class Broken(Guess):
        async def run(self, task: Task, ctx: RunContext) -> Transcript:
            await ctx.chat(task.chat())
            raise KeyError("mine")

    def raises(task: Task, transcript: Transcript) -> float:
        raise ZeroDivisionError("reward")

    with pytest.raises(KeyError, match="mine") as caught:
        run_workflow(Broken, ROW, ScriptedModel("1"))
    assert "may_fail=True" in caught.value.__notes__[0]
    kept = run_workflow(Broken, ROW, ScriptedModel("1"), may_fail=True)
    assert (
        kept.failed
        and kept.reason == "KeyError: 'mine'"
        and isinstance(kept.runs[0].error, KeyError)
        and kept.reward is None
    )
    assert kept.answers == ["1"] and 'raise KeyError("mine")' in kept.trace()
    with pytest.raises(ZeroDivisionError):
        run_workflow("simple_workflow", ROW, ScriptedModel("1"), reward=raises)
    with pytest.raises(RunError, match="names no reward"):
        run_workflow("simple_workflow", ROW, ScriptedModel("1"))


def test_a_group_reward_and_a_group_workflow() -> None:
    class Order:
        whole_group = True

        def __call__(self, task: Task, transcripts: list[Transcript]) -> list[float]:
            if any(t.answer == "bad" for t in transcripts):
                raise ValueError("bad")
            return [float(len(t.answer)) for t in transcripts]

    class Together:
        async def run_group(self, task: Task, contexts: list[RunContext]) -> list[Transcript]:
            for ctx in contexts:
                await ctx.chat(task.chat())
            return [ctx.transcript() for ctx in contexts]

    for workflow in ("simple_workflow", Together):
        assert run_workflow(workflow, ROW, ScriptedModel("a", "bb"), reward=Order, n=2).rewards == [
            1.0,
            2.0,
        ]
        kept = run_workflow(
            workflow, ROW, ScriptedModel("a", "bad"), reward=Order(), n=2, may_fail=True
        )
        assert [type(r.error) for r in kept.runs] == [ValueError, ValueError] and kept.answers == [
            "a"
        ]


def test_blocking_and_isolated_workflows_play_here() -> None:
    result = run_workflow(
        Blocking, ROW, ScriptedModel("1", "1"), models={"judge": ScriptedModel("0.5", "0.25")}, n=2
    )
    assert (
        sorted(r for r in result.rewards if r is not None) == [0.25, 0.5]
        and result.info["pid"] == os.getpid()
    )
    assert all([c.model for c in r.calls] == ["policy", "judge"] for r in result.runs)


def test_auxiliary_models_reach_workflow_and_reward() -> None:
    class Asks:
        def __init__(self) -> None:
            self.models: Any = {}
            self.closed = False

        async def prepare(self, models: Any) -> None:
            self.models = models

        async def __call__(self, task: Task, transcript: Transcript) -> float:
            row = ScoreRow(tokens=np.arange(4, dtype=np.int32), prompt_length=2)
            assert len((await self.models["m"].score(row)).logprobs) == 2
            (value,) = await self.models["m"].classify(
                [{"role": "user", "content": transcript.answer}]
            )
            return float(value)

        async def close(self) -> None:
            self.closed = True

    asks = Asks()
    result = run_workflow(
        "simple_workflow",
        ROW,
        ScriptedModel("long"),
        reward=asks,
        models={"m": ScriptedModel(scores=lambda m: [0.5])},
    )
    assert result.reward == 0.5 and asks.closed and "gives      0.5" in result.trace()


def test_tool_calls() -> None:
    class Tool:
        async def run(self, task: Task, ctx: RunContext) -> Transcript:
            messages = task.chat()
            said = await ctx.chat(messages)
            (call,) = said.tool_calls
            messages += [
                said.message,
                {"role": "tool", "tool_call_id": call["id"], "content": "12"},
            ]
            return ctx.transcript(score=Score(value=float((await ctx.chat(messages)).text)))

    result = run_workflow(Tool, ROW, ScriptedModel(tool_call("add", a=5, b=7, text="I add."), "12"))
    assert result.reward == 12.0 and result.transcript.turns[0].completion.text == "I add."
    assert '-> add({"a": 5, "b": 7})' in result.trace() and "tool       12" in result.trace()


def test_an_answer_that_calls_tools_may_have_no_content() -> None:
    class Calls(Workflow):
        async def run(self, task: Task, ctx: RunContext) -> Transcript:
            call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            said = await ctx.chat(
                [
                    *task.chat(),
                    {"role": "assistant", "tool_calls": [call]},
                    {"role": "tool", "content": "r"},
                ]
            )
            return ctx.transcript(score=Score(value=float(said.text == "a")))

    assert run_workflow(Calls, ROW, ScriptedModel("a")).reward == 1.0


def test_a_flaky_model() -> None:
    result = run_workflow(
        Guess, ROW, FlakyModel(ScriptedModel(answer=lambda _: "7"), fail=[0]), max_retry_times=1
    )
    assert (
        result.reward == 1.0
        and result.runs[0].played.attempts == 2
        and result.experience.id.attempt == 1
    )
    with pytest.raises(OSError, match="mine"):
        run_workflow(Guess, ROW, FlakyModel(ScriptedModel("7"), fail={0: OSError("mine")}))
    with pytest.raises(RunError, match=r"took longer than 0\.05 s"):
        run_workflow(Guess, ROW, FlakyModel(ScriptedModel("1", "7"), hang=[1]), timeout_s=0.05)
    cut = run_workflow(Guess, ROW, FlakyModel(ScriptedModel("seven", "7"), truncate={0: 2}))
    assert cut.answers == ["se", "7"] and cut.transcript.truncated and "cut off" in cut.trace()


async def test_in_an_event_loop() -> None:
    assert (await run_workflow_async(Guess, ROW, ScriptedModel("7"))).reward == 1.0
    with pytest.raises(RuntimeError, match="await run_workflow_async"):
        run_workflow(Guess, ROW, ScriptedModel("7"))


# ---------------------------------------------------------------- what must hold


def played() -> WorkflowResult:
    return run_workflow(Guess, ROW, ScriptedModel("3", "7"), n=1)


def test_rows_that_are_not_what_was_said_are_found() -> None:
    result = played()
    run = result.group.runs[0]
    transcript = result.transcript
    row = result.experience
    ids = np.flatnonzero(row.loss_mask)
    more = row.loss_mask.copy()
    logps = row.logprobs.copy()
    more[0], logps[ids[0]] = True, -9.0
    other = row.tokens.copy()
    other[ids[0]] += 1
    changes: dict[str, dict[str, Any]] = {
        "loss_mask does not cover exactly": {
            "loss_mask": more,
            "version_spans": (*row.version_spans, replace_start(row)),
        },
        "log-probs are not those": {"logprobs": logps},
        "are not what the model wrote": {"tokens": other},
        "must be of version": {
            "version_spans": tuple(span_of_version(s, 2) for s in row.version_spans)
        },
        "its id is": {"id": msgspec.structs.replace(row.id, run=3)},
    }
    check(result.group, [transcript])
    for why, change in changes.items():
        bad = replace(run, experiences=(msgspec.structs.replace(row, **change),))
        with pytest.raises(InvariantBroken, match=why):
            check(replace(result.group, runs=(bad,)), [transcript])
    with pytest.raises(InvariantBroken, match="two experiences have one id"):
        check(replace(result.group, runs=(replace(run, experiences=(row, row)),)), [transcript])
    with pytest.raises(InvariantBroken, match="no transcript"):
        check(result.group, [None])


def replace_start(row: Any) -> Any:
    return msgspec.structs.replace(row.version_spans[0], start=0, end=1)


def span_of_version(span: Any, step: int) -> Any:
    return msgspec.structs.replace(span, version=msgspec.structs.replace(span.version, step=step))


def test_history_that_was_tokenised_anew_is_found() -> None:
    first, second = played().transcript.turns
    prompt = second.completion.prompt_tokens.copy()
    prompt[len(first.completion.prompt_tokens)] += 1
    anew = msgspec.structs.replace(
        second, completion=msgspec.structs.replace(second.completion, prompt_tokens=prompt)
    )
    with pytest.raises(InvariantBroken, match="call 1: earlier turns were tokenised again"):
        history(Transcript(turns=(first, anew), layout="steps"))
    history(Transcript(turns=(first, second), layout="steps"))


# ---------------------------------------------------------------- to be read


def test_the_trace() -> None:
    @reward("test_trace_reward")
    def parts(task: Task, transcript: Transcript) -> Score:
        return Score(
            value=0.5, parts={"right": 1.0, "long": -0.5}, reason="as \x1b[31mlong as that"
        )

    result = run_workflow("simple_workflow", ROW, ScriptedModel("seven\nor so"), reward=parts)
    text = result.trace(tokens=True)
    for line in (
        "simple_workflow plays test[0], run 0: complete",
        "  truth      7",
        "  user       Guess a digit.",
        "  assistant  seven",
        "             or so  [12 tokens, ",
        "  reward     0.5, right 1, long -0.5  (as \\x1b[31mlong as that)",
        "of which 12 are trained",
        "not trained  user\\nGuess a digit.assistant\\n",
    ):
        assert line in text, line
    assert "\x1b" not in text and str(result) == result.trace()
    long = run_workflow("simple_workflow", ROW, ScriptedModel("x" * 5000), reward=parts).trace()
    assert "and 1000 characters more" in long


def test_the_trace_of_several_runs() -> None:
    text = run_workflow(Guess, ROW, ScriptedModel(per_run=[["7"], ["7"]]), n=2).trace()
    assert (
        "rewards 1, 1; all are equal, so the runs cannot be told apart; the group can be trained"
        in text
    )


# ---------------------------------------------------------------- cheap

CHEAP = """
import sys, time
from rft.testing import ScriptedModel, run_workflow
began = time.process_time()
result = run_workflow("simple_workflow", {"prompt": "2+2?", "truth": "4"}, ScriptedModel("4"), reward="exact_answer")
took = time.process_time() - began
assert result.reward == 1.0
heavy = [m for m in ("torch", "transformers", "vllm", "ray", "datasets", "math_verify", "openai", "rich") if m in sys.modules]
assert not heavy, heavy
print(took)
"""


def test_it_takes_less_than_a_second_and_no_torch() -> None:
    """CPU seconds: the machine may be busy with something else."""
    done = subprocess.run(
        [sys.executable, "-c", CHEAP], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1.0

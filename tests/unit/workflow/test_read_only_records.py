"""What a reward or a workflow receives is read-only; what is trained is what the engine wrote
(finding R1).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rft import Reward, RunContext, Task, Transcript, Workflow
from rft.testing import ScriptedModel, run_workflow, tool_call
from rft.testing.trace import WorkflowResult
from rft.types.completion import Turn

TASK = Task(taskset="t", index=0, prompt="2+2?", workflow="w", num_runs=2)
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
SLIPS: dict[str, Callable[[Turn], Any]] = {
    "zero the tokens": lambda turn: turn.completion.tokens.fill(0),
    "sort the tokens": lambda turn: turn.completion.tokens.sort(),
    "zero the prompt": lambda turn: turn.completion.prompt_tokens.__setitem__(slice(None), 0),
    "shift the log-probs": lambda turn: np.add(
        turn.completion.logprobs, -1, out=turn.completion.logprobs
    ),
    "change a message": lambda turn: turn.messages[0].update(content="?"),
    "rename a call": lambda turn: turn.completion.tool_calls[0]["function"].update(name="pay"),
    "forget a tool": lambda turn: turn.tools[0].clear(),
    "add info": lambda turn: turn.info.update(x=1),
}


class Talk(Workflow):
    slip: Callable[[Turn], Any] | None = None

    async def run(self, task: Task, ctx: RunContext) -> Transcript:
        messages = task.chat()
        answer = await ctx.chat(messages, tools=TOOLS)
        await ctx.chat([*messages, answer.message, {"role": "tool", "content": "4"}], tools=TOOLS)
        transcript = ctx.transcript(info={"seen": [1]}, metrics={"turns": 2})
        if self.slip is not None:
            type(self).slip(transcript.turns[0])
        return transcript


def played(workflow: type[Workflow], reward: Any) -> WorkflowResult:
    model = ScriptedModel(
        answer=lambda messages: tool_call("add", a=2) if len(messages) == 1 else "It is 4."
    )
    return run_workflow(workflow, TASK, model, reward=reward, may_fail=True)


def one(task: Task, transcript: Transcript) -> float:
    return 1.0


def check_refused(result: WorkflowResult, line: str) -> None:
    for run in result.runs:
        assert run.failed and "read-only; return what you want to change" in run.reason
        assert line in run.traceback


@pytest.mark.parametrize("slip", SLIPS)
def test_a_reward_cannot_change_what_is_trained(slip: str) -> None:
    def careless(task: Task, transcript: Transcript) -> float:
        SLIPS[slip](transcript.turns[0])
        return 1.0

    check_refused(played(Talk, careless), "SLIPS[slip](transcript.turns[0])")


@pytest.mark.parametrize("slip", SLIPS)
def test_a_group_reward_cannot_change_what_is_trained(slip: str) -> None:
    class Careless(Reward):
        whole_group = True

        def __call__(self, task: Task, transcripts: Any, /) -> list[float]:
            SLIPS[slip](transcripts[0].turns[0])
            return [1.0, 1.0]

    check_refused(played(Talk, Careless), "SLIPS[slip](transcripts[0].turns[0])")


@pytest.mark.parametrize("slip", SLIPS)
def test_a_workflow_cannot_change_what_is_trained(slip: str) -> None:
    careless = type("Careless", (Talk,), {"slip": staticmethod(SLIPS[slip])})
    check_refused(played(careless, one), "type(self).slip(transcript.turns[0])")


def test_a_transcript_and_its_score_are_read_only() -> None:
    def careless(task: Task, transcript: Transcript) -> float:
        transcript.metrics["turns"] = 3
        return 1.0

    check_refused(played(Talk, careless), 'transcript.metrics["turns"] = 3')


@pytest.mark.parametrize(
    ("attribute", "value"), [("shape", (1, -1)), ("dtype", np.dtype(np.float32))]
)  # NumPy lets these be set of any array
def test_a_reward_that_reshapes_tokens_fails_the_run(attribute: str, value: Any) -> None:
    def careless(task: Task, transcript: Transcript) -> float:
        setattr(transcript.turns[0].completion.tokens, attribute, value)
        return 1.0

    result = played(Talk, careless)
    assert all(run.failed and "tokens: " in run.reason for run in result.runs)


def test_a_workflow_may_change_the_messages_it_adds() -> None:
    class Careful(Workflow):
        async def run(self, task: Task, ctx: RunContext) -> Transcript:
            messages = task.chat()
            messages.append((await ctx.chat(messages, tools=TOOLS)).message)
            messages[-1]["tool_calls"][0]["note"] = "seen"
            messages[0]["content"] += " Be short."
            await ctx.chat(messages, tools=TOOLS)
            return ctx.transcript(layout="steps")

    result = played(Careful, one)
    assert [run.reward for run in result.runs] == [1.0, 1.0]
    first = result.runs[0].experiences[0]
    assert (
        first.messages[0]["content"] == "2+2?" and "note" not in first.messages[1]["tool_calls"][0]
    )


def test_a_task_belongs_to_each_run() -> None:
    task = Task(
        taskset="t",
        index=0,
        prompt="?",
        row={"a": [1]},
        workflow="w",
        workflow_args={"b": [2]},
        reward_args={"c": [3]},
    )
    own = task.deep_copy()
    own.row["a"].append(1)
    own.workflow_args["b"].append(1)
    own.reward_args["c"].append(1)
    assert (task.row, task.workflow_args, task.reward_args) == ({"a": [1]}, {"b": [2]}, {"c": [3]})

"""Agents that speak OpenAI's protocol: a small ReAct loop to copy, and any program of yours.

explorer_input:
  taskset: {path: sums.jsonl, default_workflow_type: react_agent_workflow, default_reward_fn_type:
  final_answer}
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from rft import AgentWorkflow, Task, Transcript, register
from rft.reward.readings import note, truth_of
from rft.reward.search_qa import same_answer
from rft.types.thoughts import split_thought
from rft.workflow.agent import CommandAgent, CommandArgs

INSTRUCTION = (
    "Solve the task. To calculate, write a line `Action: EXPRESSION` and stop; you are then told "
    "`Observation: RESULT`. "
    "When you know the result, write a line `Answer: RESULT`."
)
_ACTION = re.compile(r"^Action:\s*(.+)$", re.MULTILINE)
_ANSWER = re.compile(r"^Answer:\s*(.+)$", re.MULTILINE)
_OPERATORS: dict[type, Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}

register.workflow("agent_command_workflow", args=CommandArgs)(CommandAgent)


class ReactArgs(BaseModel):
    """How long the loop may be, and what stands in front of the task."""

    model_config = ConfigDict(extra="forbid")
    max_turns: int = Field(4, ge=1, description="model calls of a run at most")
    system_prompt: str | None = None


@register.workflow("react_agent_workflow", args=ReactArgs)
class ReactAgent(AgentWorkflow):
    """Thinks, calculates, answers; written against the `openai` client as any other agent would be."""

    needs: ClassVar[Mapping[str, str]] = {"openai": "agent"}

    def __init__(self, max_turns: int = 4, system_prompt: str | None = None) -> None:
        self.max_turns = max_turns
        self.instruction = system_prompt if system_prompt is not None else INSTRUCTION

    async def agent(self, task: Task, base_url: str, api_key: str) -> None:
        import openai

        messages: list[Any] = [{"role": "system", "content": self.instruction}, *task.chat()]
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            for _ in range(self.max_turns):
                answer = await client.chat.completions.create(
                    model="policy", messages=messages, stop=["Observation:"]
                )
                said = answer.choices[0].message
                text = split_thought(said.content or "").answer
                action = _ACTION.search(text)
                if action is None or _ANSWER.search(text):
                    return
                messages += [
                    said,
                    {"role": "user", "content": f"Observation: {calculate(action[1])}"},
                ]


@register.reward("final_answer")
def final_answer(task: Task, transcript: Transcript) -> float:
    """1 if the last line `Answer: ...` of the run's last answer, or all of it where it has none, is
    the truth; else 0.
    """
    found = _ANSWER.findall(transcript.answer) or [transcript.answer]
    right = same_answer(found[-1], str(truth_of(task)))
    note("last line Answer:", found[-1], found[-1].strip(), task.truth, right)
    return float(right)


def calculate(expression: str) -> str:
    """The value of an expression of + - * / and numbers; what is wrong with it, in words for the
    model.
    """
    try:
        if len(expression) > 200:
            raise ValueError("the expression is too long")
        value = _value(ast.parse(expression.strip(), mode="eval").body)
        return str(int(value)) if value == int(value) else f"{value:.6g}"
    except (ValueError, SyntaxError, ZeroDivisionError, OverflowError, RecursionError) as e:
        return f"error: {e}"


def _value(node: ast.expr) -> float:
    if (
        isinstance(node, ast.Constant)
        and isinstance(node.value, int | float)
        and not isinstance(node.value, bool)
    ):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return float(_OPERATORS[type(node.op)](_value(node.left), _value(node.right)))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        return float(_OPERATORS[type(node.op)](_value(node.operand)))
    raise ValueError("only numbers and + - * / are allowed")

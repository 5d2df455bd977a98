"""Single tool calls that are compared with gold calls and not executed (`tool_call_workflow`), for
data in the format of BFCL.
"""

from __future__ import annotations

import json
import re
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from rft.extras.worlds.tool_call_answers import gold_calls, mismatch
from rft.plugins import register
from rft.types.completion import Score, Transcript
from rft.types.task import Task
from rft.types.thoughts import THINK
from rft.workflow.base import RunContext, Workflow
from rft.workflow.tools import Format, described, find, with_system_text

# Python's type names in BFCL's schemas
_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}
_THOUGHT = re.compile(r"^\s*<think>.*?</think>\s*\S", re.DOTALL)


class ToolCallArgs(BaseModel):
    """How one call is requested and scored."""

    model_config = ConfigDict(extra="forbid")
    format: Format = Field(
        "auto",
        description="how calls are written where the engine has no parser: hermes, json, auto",
    )
    with_think: bool = Field(
        False, description="an answer that does not begin with <think>...</think> has reward 0"
    )
    system_prompt: str | None = Field(
        None, description="your own words instead of the description of tools and format"
    )


@register.workflow("tool_call_workflow", args=ToolCallArgs)
class ToolCallWorkflow(Workflow):
    """One answer; reward 1 if it makes exactly the gold calls, else 0.  Nothing is executed.

    Rows in the format of BFCL: `question` (messages, or a list of such lists), `function`
    (schemas), `ground_truth`; or prompt, tools, truth.
    """

    scores_itself = True

    def __init__(
        self, format: Format = "auto", with_think: bool = False, system_prompt: str | None = None
    ) -> None:
        self.format: Format = format
        self.with_think = with_think
        self.system_prompt = system_prompt

    async def run(self, task: Task, ctx: RunContext) -> Transcript:
        tools = [_schema(t) for t in _listed(task.row.get("function")) or task.tools]
        if not tools:
            raise ValueError(
                f"task {task.taskset}[{task.index}] has no tools: a column `function`, or "
                f"format.tools_key"
            )
        messages = _question(task)
        text = self.system_prompt if self.system_prompt is not None else described(tools)
        answer = await ctx.chat(with_system_text(messages, text))
        reason = self._mistake(task, answer)
        right = float(not reason)
        return ctx.transcript(score=Score(value=right, parts={"right": right}, reason=reason))

    def _mistake(self, task: Task, answer: Any) -> str:
        if self.with_think and not (
            answer.reasoning
            or _THOUGHT.match(THINK + answer.text if answer.in_thought else answer.text)
        ):
            return "no thought in front of the calls"
        calls = find(answer, self.format)
        if bad := next((c.error for c in calls if c.error), ""):
            return bad
        truth = task.truth if task.truth is not None else task.row.get("ground_truth")
        return mismatch([(c.name, c.arguments) for c in calls], gold_calls(truth))


# Trinity-RFT's older name
register.workflow("toolcall_workflow", args=ToolCallArgs)(ToolCallWorkflow)


def _question(task: Task) -> list[dict[str, Any]]:
    messages = _listed(task.row.get("question"))
    if messages and isinstance(messages[0], list):
        messages = messages[0]
    return [dict(m) for m in messages] if messages else task.chat()


def _listed(value: Any) -> list[Any]:
    read = (
        json.loads(value)
        if isinstance(value, str) and value.lstrip().startswith(("[", "{"))
        else value
    )
    return list(read) if isinstance(read, list) else [read] if isinstance(read, dict) else []


def _schema(tool: Any) -> dict[str, Any]:
    """Return a schema in OpenAI's form; BFCL writes `type: dict` and omits the envelope."""
    inner = tool.get("function", tool) if isinstance(tool, dict) else tool
    return {"type": "function", "function": _typed(inner)}


def _typed(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            k: _TYPES.get(v, v) if k == "type" and isinstance(v, str) else _typed(v)
            for k, v in value.items()
        }
    return [_typed(v) for v in value] if isinstance(value, list) else value

"""Tools: a conversation in which they are run (`tool_workflow`), and single calls that are only
compared (`tool_call_workflow`).

explorer_input:
  taskset:
    path: questions.jsonl
    default_workflow_type: tool_workflow
    workflow_args: {tools: ["tools.py:weather"], max_turns: 4}
    default_reward_fn_type: exact_answer
"""

import json
import re
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from rft import RunContext, Score, Task, ToolArgs, ToolWorkflow, Transcript, Workflow, register
from rft.reward.tool_calls import matches, wanted
from rft.types.thoughts import THINK
from rft.workflow.tools import Format, described, find

register.workflow("tool_workflow", args=ToolArgs)(ToolWorkflow)

# Python's names in BFCL's schemas
_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}
_THOUGHT = re.compile(r"^\s*<think>.*?</think>\s*\S", re.DOTALL)


class ToolCallArgs(BaseModel):
    """How one call is asked for and scored."""

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
    """One answer; reward 1 if it makes exactly the gold calls, else 0.  Nothing is run.

    Rows of BFCL's shape: `question` (messages, or a list of such lists), `function` (schemas),
    `ground_truth`; or prompt, tools, truth.
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
        told = self.system_prompt if self.system_prompt is not None else described(tools)
        if messages[0]["role"] == "system":
            messages = [
                {**messages[0], "content": f"{messages[0]['content']}\n\n{told}"},
                *messages[1:],
            ]
        else:
            messages = [{"role": "system", "content": told}, *messages]
        answer = await ctx.chat(messages)
        why = self._wrong(task, answer)
        return ctx.transcript(
            score=Score(value=float(not why), parts={"right": float(not why)}, reason=why)
        )

    def _wrong(self, task: Task, answer: Any) -> str:
        if self.with_think and not (
            answer.reasoning
            or _THOUGHT.match(THINK + answer.text if answer.in_thought else answer.text)
        ):
            return "no thought in front of the calls"
        calls = find(answer, self.format)
        if bad := next((c.error for c in calls if c.error), ""):
            return bad
        truth = task.truth if task.truth is not None else task.row.get("ground_truth")
        return matches([(c.name, c.arguments) for c in calls], wanted(truth))


# Trinity-RFT's older name
register.workflow("toolcall_workflow", args=ToolCallArgs)(ToolCallWorkflow)


def _question(task: Task) -> list[dict[str, Any]]:
    asked = _listed(task.row.get("question"))
    if asked and isinstance(asked[0], list):
        asked = asked[0]
    return [dict(m) for m in asked] if asked else task.chat()


def _listed(value: Any) -> list[Any]:
    read = (
        json.loads(value)
        if isinstance(value, str) and value.lstrip().startswith(("[", "{"))
        else value
    )
    return list(read) if isinstance(read, list) else [read] if isinstance(read, dict) else []


def _schema(tool: Any) -> dict[str, Any]:
    """OpenAI's form of a schema; BFCL writes `type: dict` and leaves out the envelope."""
    inner = tool.get("function", tool) if isinstance(tool, dict) else tool
    return {"type": "function", "function": _typed(inner)}


def _typed(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            k: _TYPES.get(v, v) if k == "type" and isinstance(v, str) else _typed(v)
            for k, v in value.items()
        }
    return [_typed(v) for v in value] if isinstance(value, list) else value

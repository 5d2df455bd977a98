"""Conversations with tools: calls in an answer are run and their results said; an answer without a call ends the run.

Knows no tool.  Invariant: a tool that fails, and a call that makes no sense, are told to the model and counted; they do not end the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, Field, model_validator

from rft.types.completion import Completion
from rft.types.task import Task
from rft.workflow import mcp, toolfile
from rft.workflow.toolcalls import Format, described, find
from rft.workflow.tools import FunctionTool, Side, Tool, Toolbox, named
from rft.workflow.turns import Message, MultiTurnWorkflow, Reply, TurnArgs


class ToolArgs(TurnArgs):
    """As TurnArgs, with veRL's names for what belongs to tools."""

    tools: tuple[str, ...] = Field((), description="functions: path/file.py:name, pkg.module:name, or a marked name")
    tool_config_path: str | None = Field(None, description="veRL's tool file")
    mcp_config_path: str | None = Field(None, description="JSON file of MCP servers")
    mcp_tools: tuple[str, ...] = Field((), description="which of their tools; empty: all")
    max_assistant_turns: int | None = Field(None, ge=1, description="veRL's name of max_turns")
    max_user_turns: int | None = Field(None, ge=1, description="answers that are followed by tool results, at most")
    max_parallel_calls: int = Field(1, ge=1, description="calls of one answer that are run")
    max_tool_response_length: int = Field(256, ge=1, description="characters of a result that the model is told")
    tool_response_truncate_side: Side = Field(
        "middle", description="which part is kept: the left, the right, or both ends (middle)"
    )
    tool_timeout: float = Field(30.0, gt=0, description="seconds that one call may take")
    format: Format = Field("auto", description="how calls are written where the engine has no parser: hermes, json, auto")
    tools_in: Literal["template", "system"] = Field(
        "template", description="who tells the model of its tools: the chat template, or a text in the system message"
    )
    result_role: Literal["tool", "user"] = Field("tool", description="role of the messages with results")

    @model_validator(mode="before")
    @classmethod
    def _verl(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("max_assistant_turns") is not None:
            if values.get("max_turns") not in (None, 10, values["max_assistant_turns"]):
                raise ValueError("max_turns and max_assistant_turns are the same; write one of them")
            return {**values, "max_turns": values["max_assistant_turns"]}
        return values


class ToolWorkflow(MultiTurnWorkflow):
    """Base; works as it is.  Override `make_tools(task)` for tools that belong to the task, `outcome` or `react` for a score."""

    Args: type[BaseModel] = ToolArgs

    def __init__(self, **args: Any) -> None:
        super().__init__(**args)
        self.box = Toolbox()
        self._user_turns = 0

    def make_tools(self, task: Task) -> Any:
        """Tools of this task besides those of the arguments: functions or Tools."""
        return ()

    async def begin(self, task: Task) -> list[Message]:
        a = self.args
        own = await self.call(self.make_tools, task)
        found: list[Tool] = [*named(a.tools), *_as_tools(own)]
        if a.tool_config_path is not None:
            found += await toolfile.load(a.tool_config_path)
        if a.mcp_config_path is not None:
            found += await mcp.tools(a.mcp_config_path, a.mcp_tools)
        self.box = Toolbox(found, a.max_parallel_calls, a.max_tool_response_length, a.tool_response_truncate_side, a.tool_timeout)
        messages = task.chat()
        return self._told(messages) if a.tools_in == "system" and found else messages

    def _told(self, messages: list[Message]) -> list[Message]:
        text = described(self.box.schemas)
        if messages[0]["role"] == "system":
            return [{**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]
        return [{"role": "system", "content": text}, *messages]

    def tools(self) -> Sequence[Message]:
        return self.box.schemas if self.args.tools_in == "template" else ()

    async def react(self, answer: Completion) -> Reply:
        calls = find(answer, self.args.format)
        self._user_turns += 1
        if not calls:
            return Reply(done=True)
        if self.args.max_user_turns is not None and self._user_turns > self.args.max_user_turns:
            return Reply(done=True, info={"stopped": "max_user_turns"})
        results = await self.box.run(calls)
        role = self.args.result_role
        said = [
            {"role": role, "content": r.text, **({"tool_call_id": r.call.id, "name": r.call.name} if r.call.id else {})}
            for r in results
        ]
        return Reply(tuple(said))

    def counts(self) -> dict[str, float]:
        given = [r for t in self.box.tools for r in getattr(t, "rewards", ())]
        return {**{k: float(v) for k, v in self.box.counts.items()}, **({"tool_reward": sum(given)} if given else {})}

    async def close(self) -> None:
        await self.box.close()


def _as_tools(own: Any) -> list[Tool]:
    return [t if hasattr(t, "schema") else FunctionTool(t) for t in own]

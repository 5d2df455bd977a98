"""Finds tool calls in an answer: those that the engine's parser found, else in the text.

Knows no tools.  Invariant: what looks like a call and cannot be read is a call too, with the error that the model is told.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from rft.types.completion import Completion

Format = Literal["auto", "hermes", "json"]
_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_FENCED = re.compile(r"```(?:json|tool_call)?\s*\n(.*?)```", re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    """`error`: why it cannot be run; empty where it can."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    id: str = ""
    error: str = ""


def find(answer: Completion, form: Format = "auto") -> list[ToolCall]:
    """The calls in order.

    hermes: <tool_call>{"name": ..., "arguments": {...}}</tool_call>.  json: the answer, or a fenced block of it, is such an object or
    a list of them ("parameters" is understood too).  auto: hermes where there are such tags, else json.
    """
    if answer.tool_calls:
        return [_given(call) for call in answer.tool_calls]
    return in_text(answer.text, form)


def in_text(text: str, form: Format = "auto") -> list[ToolCall]:
    """As `find`, for a text alone."""
    tagged = _TAGGED.findall(text)
    if form == "hermes" or (form == "auto" and tagged):
        return [call for block in tagged for call in _read(block, sure=True)]
    blocks = [*_FENCED.findall(text), text]
    for block in blocks:
        if found := _read(block, sure=False):
            return found
    return []


def _read(block: str, *, sure: bool) -> list[ToolCall]:
    try:
        value: Any = msgspec.json.decode(block.strip())
    except (msgspec.DecodeError, RecursionError) as e:
        return [ToolCall("", error=f"this tool call is no JSON: {_why(e)}")] if sure else []
    items = value if isinstance(value, list) else [value]
    if not sure and not (items and all(isinstance(i, dict) and isinstance(i.get("name"), str) for i in items)):
        return []
    return [_item(i) for i in items]


def _item(item: Any) -> ToolCall:
    if not isinstance(item, dict) or not isinstance(item.get("name"), str):
        return ToolCall("", error='a tool call must be an object with "name" and "arguments"')
    arguments = item.get("arguments", item.get("parameters", {}))
    if isinstance(arguments, str):
        return _with(item["name"], arguments)
    if not isinstance(arguments, dict):
        return ToolCall(item["name"], error='"arguments" must be an object')
    return ToolCall(item["name"], arguments)


def _given(call: dict[str, Any]) -> ToolCall:
    function = call.get("function", {})
    return _with(str(function.get("name", "")), function.get("arguments") or "{}", str(call.get("id", "")))


def _with(name: str, arguments: str, id: str = "") -> ToolCall:
    try:
        value: Any = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError) as e:
        return ToolCall(name, id=id, error=f"the arguments are no JSON: {_why(e)}")
    if not isinstance(value, dict):
        return ToolCall(name, id=id, error="the arguments must be an object")
    return ToolCall(name, value, id)


def _why(error: Exception) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def described(tools: Sequence[dict[str, Any]]) -> str:
    """Tools and the form of a call in words, for models whose chat template does not tell them."""
    lines = "\n".join(msgspec.json.encode(t.get("function", t)).decode() for t in tools)
    return (
        f"You may call these tools, described as JSON:\n{lines}\n"
        'To call one write <tool_call>{"name": "...", "arguments": {...}}</tool_call> and nothing after it; the result follows.'
    )

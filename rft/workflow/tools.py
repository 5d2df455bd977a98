"""Tools as Python functions, and the tool calls of an answer: from the engine's parser, else from
the text.

    def weather(city: str, days: int = 1) -> str:
        # its docstring: a description, then a line `name: text` for each parameter

Depends on no workflow.  Invariants: a thought has no calls; an unreadable call is a call with an
error; `Toolbox.run` returns errors of models and tools as results, and counts them.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_type_hints, runtime_checkable

import msgspec
from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from rft.errors import ConfigError, RftError
from rft.files.strict_json import no_key_twice
from rft.images.decode import check
from rft.plugins import REGISTRY, kind
from rft.reward.extract import fenced
from rft.types.completion import Completion
from rft.types.images import Observation
from rft.types.thoughts import split_thought
from rft.worker.threads import in_time, unblocked
from rft.worker.waiting import waits

Format = Literal["auto", "hermes", "json"]
_TAGGED = re.compile(
    r"<tool_call>((?:(?!<tool_call>).)*?)(</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL
)
_WORDS = re.compile(r"[^\n{\[<(=]*")  # text between tags that are only mentioned

tool = kind("tool")
Side = Literal["left", "middle", "right"]
_PARAMETER = re.compile(r"^\s*(?::param\s+)?(\w+)(?:\s*\([^)]*\))?\s*:\s+(\S.*)$")


@dataclass(frozen=True)
class ToolCall:
    """`error`: why the call cannot be run, or empty."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    id: str = ""
    error: str = ""


def find(answer: Completion, form: Format = "auto") -> list[ToolCall]:
    """Return the calls after the last thought (`rft.types.thoughts`), in order.

    hermes: <tool_call>{"name": ..., "arguments": {...}}</tool_call>.  json: the answer, or a fenced
    block in it, is such an object or a list of them ("parameters" is accepted too).  auto: hermes
    if such tags exist, else json.  A tag without a call after it is no call.
    """
    if answer.tool_calls:
        return [_parsed_call(call) for call in answer.tool_calls]
    return in_text(answer.answer, form)


def in_text(text: str, form: Format = "auto") -> list[ToolCall]:
    """Return the calls in a text, like `find`."""
    text = split_thought(text).answer
    tagged = [block[1] for block in _TAGGED.finditer(text) if _is_call(block)]
    if form == "hermes" or (form == "auto" and tagged):
        return [call for block in tagged for call in _read(block, sure=True)]
    blocks = [
        *(b.body for b in fenced(text) if b.closed and b.language in ("", "json", "tool_call")),
        text,
    ]
    for block in blocks:
        if calls := _read(block, sure=False):
            return calls
    return []


def _is_call(block: re.Match[str]) -> bool:
    """Return whether a tag begins a call.  Words alone are no call; a tag without an end is a call
    only if a call begins, or at the end of the text.
    """
    if block[2]:
        return _WORDS.fullmatch(block[1]) is None
    body = block[1].lstrip()
    return body.startswith(("{", "[", "<")) or (not body and block.end() == len(block.string))


def _read(block: str, *, sure: bool) -> list[ToolCall]:
    try:
        value = _decoded(block.strip())
    except (msgspec.DecodeError, ValueError, RecursionError) as e:
        return [ToolCall("", error=f"this tool call is no JSON: {_json_error(e)}")] if sure else []
    items = value if isinstance(value, list) else [value]
    if not sure and not (
        items and all(isinstance(i, dict) and isinstance(i.get("name"), str) for i in items)
    ):
        return []
    return [_item(i) for i in items]


def _item(item: Any) -> ToolCall:
    # OpenAI's form
    if isinstance(item, dict) and isinstance(function := item.get("function"), dict):
        item = function
    if not isinstance(item, dict) or not isinstance(item.get("name"), str):
        return ToolCall("", error='a tool call must be an object with "name" and "arguments"')
    arguments = item.get("arguments", item.get("parameters", {}))
    if isinstance(arguments, str):
        return _with(item["name"], arguments or "{}")
    if not isinstance(arguments, dict):
        return ToolCall(item["name"], error='"arguments" must be an object')
    return ToolCall(item["name"], arguments)


def _parsed_call(call: dict[str, Any]) -> ToolCall:
    function = call.get("function", {})
    return _with(
        str(function.get("name", "")), function.get("arguments") or "{}", str(call.get("id", ""))
    )


def _with(name: str, arguments: str, id: str = "") -> ToolCall:
    try:
        value = _decoded(arguments)
    except (msgspec.DecodeError, ValueError, RecursionError) as e:
        return ToolCall(name, id=id, error=f"the arguments are no JSON: {_json_error(e)}")
    if not isinstance(value, dict):
        return ToolCall(name, id=id, error="the arguments must be an object")
    return ToolCall(name, value, id)


def _decoded(text: str) -> Any:
    """Decode JSON.  Raises the errors of msgspec, and ValueError for a key that is written twice."""
    value = msgspec.json.decode(text)
    json.loads(text, object_pairs_hook=no_key_twice)
    return value


def _json_error(error: Exception) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def described(tools: Sequence[dict[str, Any]]) -> str:
    """Describe tools and the form of a call, for chat templates that do not."""
    lines = "\n".join(msgspec.json.encode(t.get("function", t)).decode() for t in tools)
    return (
        f"You may call these tools, described as JSON:\n{lines}\n"
        'To call one write <tool_call>{"name": "...", "arguments": {...}}</tool_call> and nothing '
        "after it; the result follows."
    )


def with_system_text(messages: Sequence[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """Return the messages with `text` at the end of the system message, or as a new one."""
    first = messages[0]
    if first["role"] == "system":
        return [{**first, "content": f"{first['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


@runtime_checkable
class Tool(Protocol):
    """Something a model may call.  `schema` is OpenAI's form {"type": "function", "function":
    {name, description, parameters}}.
    """

    @property
    def schema(self) -> dict[str, Any]: ...

    async def call(self, arguments: Mapping[str, Any]) -> Observation:
        """Return the result for the model.  Raises ToolError for a wrong call; may raise anything."""
        ...

    async def close(self) -> None: ...


class ToolError(Exception):
    """The call is wrong; the message is shown to the model."""


@dataclass(frozen=True)
class ToolResult:
    call: ToolCall
    content: Observation
    error: bool = False


def _failure(call: ToolCall, text: str) -> ToolResult:
    return ToolResult(call, f"Error: {text}", error=True)


class FunctionTool:
    """A tool from a function; an ordinary function runs in a thread, so it may block.  Arguments
    are checked against its annotations.
    """

    def __init__(self, function: Callable[..., Any], *, name: str = "") -> None:
        self.function = function
        self.name = name or function.__name__
        self._model = _model(function, self.name)
        self.schema = _schema(function, self.name, self._model)

    async def call(self, arguments: Mapping[str, Any]) -> Observation:
        try:
            checked = self._model(**arguments)
        except ValidationError as e:
            faults = "; ".join(f"{'.'.join(map(str, f['loc']))}: {f['msg']}" for f in e.errors())
            raise ToolError(f"wrong arguments: {faults}") from None
        keywords = {name: getattr(checked, name) for name in type(checked).model_fields}
        return as_observation(await unblocked(self.function, f"tool {self.name}", **keywords))

    async def close(self) -> None:
        """Nothing to close."""


@dataclass
class Toolbox:
    """The tools of one run.  Limits as in veRL: `parallel` calls per answer, `length` characters
    of a result, or of each text between its images.
    """

    tools: Sequence[Tool] = ()
    parallel: int = 1
    length: int = 256
    side: Side = "middle"
    timeout_s: float = 30.0
    counts: dict[str, int] = field(default_factory=lambda: {"tool_calls": 0, "tool_errors": 0})

    def __post_init__(self) -> None:
        self._by_name: dict[str, Tool] = {}
        for tool in self.tools:
            name = tool.schema["function"]["name"]
            if name in self._by_name:
                raise ConfigError(
                    f"two tools are called {name!r}; rename one", key="workflow_args.tools"
                )
            self._by_name[name] = tool

    @property
    def schemas(self) -> list[dict[str, Any]]:
        return [t.schema for t in self.tools]

    async def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Run the calls of one answer concurrently; refuse calls beyond `parallel`."""
        results = await asyncio.gather(*(self._run_call(call, i) for i, call in enumerate(calls)))
        self.counts["tool_calls"] += len(results)
        self.counts["tool_errors"] += sum(r.error for r in results)
        return list(results)

    async def _run_call(self, call: ToolCall, number: int) -> ToolResult:
        if number >= self.parallel:
            return _failure(call, f"not run; at most {self.parallel} calls in one answer")
        if call.error:
            return _failure(call, self.shortened(call.error))
        tool = self._by_name.get(call.name)
        if tool is None:
            names = ", ".join(self._by_name) or "none"
            return _failure(
                call, f"there is no tool {self.shortened(call.name)!r}; there is: {names}"
            )
        what = f"tool {call.name}"
        try:
            with waits("call", what, opaque=True):
                content = await in_time(
                    unblocked(tool.call, what, call.arguments), self.timeout_s, what
                )
        except RftError:
            raise
        except TimeoutError:
            return _failure(call, f"{call.name} took longer than {self.timeout_s:g} s")
        except ToolError as e:
            return _failure(call, self.shortened(str(e)))
        except Exception as e:  # a tool may raise anything
            return _failure(call, self.shortened(f"{type(e).__name__}: {e}"))
        if isinstance(content, str):
            return ToolResult(call, self.shortened(content))
        return ToolResult(call, [p if isinstance(p, bytes) else self.shortened(p) for p in content])

    def shortened(self, text: str) -> str:
        """Return at most `length` characters of a text: its left, its right, or both ends (middle).

        Surrogates, which no file and no request can hold, become question marks.
        """
        text = text.encode("utf-8", "replace").decode()
        if len(text) <= self.length:
            return text
        if self.side == "left":
            return f"{text[: self.length]}...(truncated)"
        if self.side == "right":
            return f"(truncated)...{text[len(text) - self.length :]}"
        half = self.length // 2
        return f"{text[:half]}...(truncated)...{text[len(text) - half :]}"

    async def close(self) -> None:
        async with contextlib.AsyncExitStack() as stack:  # closes all tools even if one fails
            for tool in self.tools:
                stack.push_async_callback(tool.close)


def named(names: Iterable[str]) -> list[Tool]:
    """Return tools for functions: `pkg.module:function`, `path/file.py:function`, @tool("name")."""
    return [FunctionTool(_function(name)) for name in names]


def _function(name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = REGISTRY.get("tool", name).obj
    if not callable(function) or inspect.isclass(function):
        raise ConfigError(
            f"tool {name!r} must be a function", key="workflow_args.tools", given=name
        )
    return function


ELSEWHERE: ContextVar[list[str] | None] = ContextVar("elsewhere", default=None)
"""Set if other machines may play the runs: collects programs missing on this machine instead of an
error.
"""


def missing(program: str, env: Mapping[str, str]) -> str:
    """Return why a program cannot be started with these environment variables; empty if it can, or
    if another machine starts it.
    """
    path = env.get("PATH", os.environ.get("PATH"))
    if shutil.which(program, path=path) is not None:
        return ""
    reason = f"{program!r} is no program here (PATH: {path}); install it, or write its whole path"
    reasons = ELSEWHERE.get()
    if reasons is None:
        return reason
    reasons.append(reason)
    return ""


def as_observation(value: Any) -> Observation:
    """Return what a tool returned as a text, or as texts and images where it holds files (bytes).

    Raises ValueError for a file that is no usable image.
    """
    pieces = value if isinstance(value, list | tuple) else (value,)
    files = [piece for piece in pieces if isinstance(piece, bytes)]
    if files and all(isinstance(piece, str | bytes) for piece in pieces):
        for file in files:
            check(file)
        return pieces
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _model(function: Callable[..., Any], name: str) -> type[BaseModel]:
    hints = get_type_hints(function, include_extras=True)
    fields: dict[str, Any] = {}
    for p in inspect.signature(function).parameters.values():
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD, p.POSITIONAL_ONLY):
            raise ConfigError(
                f"tool {name!r}: parameter {p.name!r} must have a name that a model can give",
                key="workflow_args.tools",
            )
        fields[p.name] = (hints.get(p.name, Any), ... if p.default is p.empty else p.default)
    model: type[BaseModel] = create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
    return model


def _schema(function: Callable[..., Any], name: str, model: type[BaseModel]) -> dict[str, Any]:
    description, about = _docstring(function, set(model.model_fields))
    parameters = model.model_json_schema()
    parameters.pop("title", None)
    for key, p in parameters.get("properties", {}).items():
        p.pop("title", None)
        if key in about:
            p.setdefault("description", about[key])
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


def _docstring(function: Callable[..., Any], parameters: set[str]) -> tuple[str, dict[str, str]]:
    """Return (text before the parameters, text of each): lines `name: text`, also below Args: or as
    :param name: text.
    """
    text = []
    about = {}
    for line in (inspect.getdoc(function) or "").splitlines():
        if (m := _PARAMETER.match(line)) and m[1] in parameters:
            about[m[1]] = m[2].strip()
        elif not about and line.strip().lower() not in ("args:", "parameters:", "arguments:"):
            text.append(line)
    return "\n".join(text).strip(), about

"""Conversations with tools: calls in an answer are run and their results said; an answer without a
call ends the run.

Tools are functions, what veRL's tool configuration (`tool_config_path`) lists, and those of MCP
servers:

    tools:
      - class_name: tools.py:Search          # or pkg.module.Search; veRL's methods create, execute, release
        config: {timeout: 5}
        tool_schema: {type: function, function: {name: search, description: ..., parameters: {...}}}
      - function: tools.py:weather            # a function; its schema is made from it
      - class_name: anything
        config: {type: mcp}
        mcp: {mcp_servers_config_path: servers.json, tool_selected_list: [search]}

Paths in the file are relative to it; a file is read once per run of the program.  MCP servers (`pip
install rft-platform[mcp]`) are named in a JSON file {"mcpServers": {name: {command, args, env} or
{url}}}; each is started once for all runs (anew after it has died) and ends with its event loop.
Invariant: a tool that fails, and a call that makes no sense, are told to the model and counted;
they do not end the run.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Self, TextIO

import msgspec
import yaml
from pydantic import BaseModel, Field, model_validator

from rft.errors import ConfigError, SetupError
from rft.plugins import REGISTRY
from rft.reward.run_folder import run_folder
from rft.secrets import redact
from rft.types.completion import Completion
from rft.types.task import Task
from rft.worker.threads import unblocked
from rft.workflow.tools import (
    Format,
    FunctionTool,
    Side,
    Tool,
    Toolbox,
    ToolError,
    as_text,
    described,
    find,
    missing,
    named,
)
from rft.workflow.turns import Message, MultiTurnWorkflow, Reply, TurnArgs

log = logging.getLogger(__name__)
_MCP_KEY = "workflow_args.mcp_config_path"
_ERROR_BYTES = 4000  # of a server's standard error in a message
_ERROR_LINES = 10
START_S = 30.0
# what the library says where a server is not there any more
_GONE = ("Connection closed", "Session terminated")
_FILE_KEY = "workflow_args.tool_config_path"


@dataclass(frozen=True)
class McpTool:
    """One tool of a server."""

    schema: dict[str, Any]
    server: _McpServer

    async def call(self, arguments: Mapping[str, Any]) -> str:
        name = self.schema["function"]["name"]
        try:
            result = await self.server.client.call_tool(name, dict(arguments))
        except Exception as e:
            if str(e) in _GONE:
                self.server.leave(str(e))
            raise
        text = "\n".join(getattr(part, "text", f"[{part.type}]") for part in result.content)
        if result.is_error:
            raise ToolError(text)
        return text

    async def close(self) -> None:
        """The server is shared; it goes on."""


class _McpServer:
    """A connection, held open by a task until the event loop ends."""

    def __init__(self, name: str, where: Any) -> None:
        self._name = name
        self._where = where
        self._errors = _error_file(name)
        self.client: Any = None
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[list[McpTool]] = self._loop.create_future()
        self._job = asyncio.ensure_future(self._hold())

    @property
    def usable(self) -> bool:
        return self._loop is asyncio.get_running_loop() and not (
            self._job.done() or self._job.cancelling()
        )

    def leave(self, why: str) -> None:
        """It is gone: the next run opens another connection, and so starts the program again."""
        log.warning("MCP server %r: %s%s", self._name, why, self._last_errors())
        self._job.cancel()

    async def tools(self) -> list[McpTool]:
        try:
            async with asyncio.timeout(START_S):
                return await asyncio.shield(self._ready)
        except TimeoutError:
            raise ConfigError(
                f"MCP server {self._name!r} did not answer within {START_S:g} s", key=_MCP_KEY
            ) from None

    async def _hold(self) -> None:
        from mcp import Client, StdioServerParameters
        from mcp.client.stdio import stdio_client

        where = self._where
        with self._errors:
            if isinstance(where, StdioServerParameters):
                where = stdio_client(where, errlog=self._errors)
            try:
                async with Client(where) as client:
                    self.client = client
                    listed = await client.list_tools()
                    self._ready.set_result([McpTool(_schema(t), self) for t in listed.tools])
                    await asyncio.Event().wait()
            except Exception as e:  # the server is another program; who waits for it is told
                if not self._ready.done():
                    text = (
                        f"MCP server {self._name!r} cannot be used: "
                        f"{_innermost(e)}{self._last_errors()}"
                    )
                    self._ready.set_exception(ConfigError(text, key=_MCP_KEY))

    def _last_errors(self) -> str:
        """The end of what the program has written to its standard error, on lines of their own."""
        size = os.fstat(self._errors.fileno()).st_size
        text = os.pread(self._errors.fileno(), _ERROR_BYTES, max(0, size - _ERROR_BYTES)).decode(
            "utf-8", "replace"
        )
        return "".join(f"\n  {redact(line)}" for line in text.splitlines()[-_ERROR_LINES:])


def _error_file(name: str) -> TextIO:
    """Takes the standard error of a server: in the logs of the run, where there is one."""
    if (folder := run_folder.get()) is None:
        return tempfile.TemporaryFile("w+")
    return (folder / "logs" / f"mcp-{re.sub(r'[^A-Za-z0-9._-]', '_', name)}.out").open("a+")


def _innermost(error: BaseException) -> str:
    """What a group of errors is about; one of the library's own says nothing."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


_SERVERS: dict[tuple[str, str], _McpServer] = {}


async def mcp_tools(path: str, selected: tuple[str, ...] = ()) -> list[Tool]:
    """The tools of all servers in the file, or those that are selected.  Raises ConfigError,
    SetupError without the library.
    """
    try:
        from mcp import StdioServerParameters
    except ImportError as e:
        raise SetupError(
            f"MCP servers need the package mcp ({e}): pip install 'rft-platform[mcp]'"
        ) from e
    found: list[Tool] = []
    for name, about in _servers(path).items():
        key = (_whole(path), name)
        server = _SERVERS.get(key)
        if server is None or not server.usable:
            where: Any = about.get("url")
            if where is None:
                env = {**os.environ, **{k: str(v) for k, v in (about.get("env") or {}).items()}}
                args = [str(a) for a in about.get("args", ())]
                where = StdioServerParameters(command=str(about["command"]), args=args, env=env)
            server = _SERVERS[key] = _McpServer(name, where)
        found += await server.tools()
    names = [t.schema["function"]["name"] for t in found]
    if missing := [s for s in selected if s not in names]:
        raise ConfigError(
            f"no MCP server has the tool {missing[0]!r}; they have {', '.join(names)}", key=_MCP_KEY
        )
    return [t for t, name in zip(found, names, strict=True) if not selected or name in selected]


def _whole(path: str) -> str:
    return str(Path(path).expanduser().resolve())


def _servers(path: str) -> dict[str, dict[str, Any]]:
    try:
        read: Any = msgspec.json.decode(Path(path).expanduser().read_bytes())
    except (OSError, msgspec.DecodeError) as e:
        raise ConfigError(
            f"the list of MCP servers cannot be read: {e}", key=_MCP_KEY, given=path
        ) from None
    servers = read.get("mcpServers") if isinstance(read, dict) else None
    if not isinstance(servers, dict) or not all(
        isinstance(s, dict) and ("command" in s or "url" in s) for s in servers.values()
    ):
        raise ConfigError(
            'it must be {"mcpServers": {name: {"command": ..., "args": [...]} or {"url": ...}}}',
            key=_MCP_KEY,
            given=path,
        )
    for name, about in servers.items():
        if "url" not in about and (why := missing(str(about["command"]), about.get("env") or {})):
            raise ConfigError(
                f"MCP server {name!r} cannot be used: {why}", key=_MCP_KEY, given=path
            )
    return servers


def _schema(t: Any) -> dict[str, Any]:
    about = {"name": t.name, "description": t.description or "", "parameters": dict(t.input_schema)}
    return {"type": "function", "function": about}


class ClassTool:
    """An object with veRL's methods: `create(instance_id, **kwargs)`, `execute(instance_id,
    parameters)`, `release(instance_id)`.

    `execute` gives (what the model is told, a reward, metrics); what it is told is a text or has an
    attribute `text`.  All may block.
    """

    def __init__(self, made: Any, schema: dict[str, Any]) -> None:
        self._made = made
        self.schema = schema
        self.rewards: list[float] = []
        self._instance = ""
        self._creating = asyncio.Lock()

    async def call(self, arguments: Mapping[str, Any]) -> str:
        async with self._creating:
            if not self._instance:
                self._instance = uuid.uuid4().hex
                try:
                    await self._does("create")
                except Exception:
                    self._instance = ""  # the next call tries again
                    raise
        result = await self._does("execute", dict(arguments))
        said, reward = (result[0], result[1]) if isinstance(result, tuple) else (result, None)
        if reward is not None:
            self.rewards.append(float(reward))
        told = getattr(said, "text", said)
        return "" if told is None else as_text(told)

    async def close(self) -> None:
        if self._instance:
            await self._does("release")

    async def _does(self, name: str, *given: Any) -> Any:
        """What a method says of our instance; None where the object has no such method."""
        method = getattr(self._made, name, None)
        return (
            await unblocked(method, f"tool {name}", self._instance, *given)
            if callable(method)
            else None
        )


async def load_tool_file(path: str) -> list[Tool]:
    """Fresh tools for one run.  Raises ConfigError naming the file and the entry."""
    found: list[Tool] = []
    for number, entry in enumerate(_entries(path)):
        where = f"{path}: tools[{number}]"
        folder = Path(_whole(path)).parent
        if "function" in entry:
            found.append(
                FunctionTool(REGISTRY.get("tool", _near(str(entry["function"]), folder)).obj)
            )
        elif (entry.get("config") or {}).get("type") == "mcp":
            about = entry.get("mcp") or {}
            if "mcp_servers_config_path" not in about:
                raise ConfigError(
                    f"{where}: an MCP tool needs mcp.mcp_servers_config_path", key=_FILE_KEY
                )
            servers = _beside(folder, str(about["mcp_servers_config_path"]))
            found += await mcp_tools(servers, tuple(about.get("tool_selected_list") or ()))
        else:
            found.append(_class(entry, where, folder))
    return found


def _class(entry: Mapping[str, Any], where: str, folder: Path) -> ClassTool:
    name = str(entry.get("class_name", ""))
    schema = entry.get("tool_schema")
    if ":" not in name and "." in name:
        name = ":".join(name.rsplit(".", 1))
    if ":" not in name:
        raise ConfigError(
            f"{where} needs `function`, or `class_name` as pkg.module.Name or path/file.py:Name",
            key=_FILE_KEY,
        )
    cls = REGISTRY.get("tool", _near(name, folder)).obj
    made = cls(dict(entry.get("config") or {}), schema)
    schema = schema or getattr(made, "tool_schema", None)
    if not isinstance(schema, dict) or "name" not in schema.get("function", {}):
        raise ConfigError(
            f"{where}: tool_schema must be OpenAI's form {{type: function, function: {{name, "
            f"...}}}}",
            key=_FILE_KEY,
        )
    if not callable(getattr(made, "execute", None)):
        raise ConfigError(
            f"{where}: {name} has no method execute(instance_id, parameters)", key=_FILE_KEY
        )
    return ClassTool(made, schema)


def _beside(folder: Path, name: str) -> str:
    return str(folder / Path(name).expanduser())


def _near(name: str, folder: Path) -> str:
    """A file is looked for beside the tool file."""
    where, _, attribute = name.rpartition(":")
    if where.endswith(".py") and (folder / where).is_file():
        return f"{folder / where}:{attribute}"
    return name


@lru_cache(maxsize=64)
def _entries(path: str) -> tuple[dict[str, Any], ...]:
    try:
        read = yaml.safe_load(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as e:
        raise ConfigError(f"the tool file cannot be read: {e}", key=_FILE_KEY, given=path) from None
    entries = read.get("tools") if isinstance(read, dict) else None
    if not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
        raise ConfigError(
            "the tool file must hold a list `tools` of mappings", key=_FILE_KEY, given=path
        )
    return tuple(entries)


class ToolArgs(TurnArgs):
    """As TurnArgs, with veRL's names for what belongs to tools."""

    tools: tuple[str, ...] = Field(
        (), description="functions: path/file.py:name, pkg.module:name, or a marked name"
    )
    tool_config_path: str | None = Field(None, description="veRL's tool file")
    mcp_config_path: str | None = Field(None, description="JSON file of MCP servers")
    mcp_tools: tuple[str, ...] = Field((), description="which of their tools; empty: all")
    max_assistant_turns: int | None = Field(None, ge=1, description="veRL's name of max_turns")
    max_user_turns: int | None = Field(
        None, ge=1, description="answers that are followed by tool results, at most"
    )
    max_parallel_calls: int = Field(1, ge=1, description="calls of one answer that are run")
    max_tool_response_length: int = Field(
        256, ge=1, description="characters of a result that the model is told"
    )
    tool_response_truncate_side: Side = Field(
        "middle", description="which part is kept: the left, the right, or both ends (middle)"
    )
    tool_timeout: float = Field(30.0, gt=0, description="seconds that one call may take")
    format: Format = Field(
        "auto",
        description="how calls are written where the engine has no parser: hermes, json, auto",
    )
    tools_in: Literal["template", "system"] = Field(
        "template",
        description="who tells the model of its tools: the chat template, or a text in the system "
        "message",
    )
    result_role: Literal["tool", "user"] = Field(
        "tool", description="role of the messages with results"
    )

    @model_validator(mode="before")
    @classmethod
    def _verl(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("max_assistant_turns") is not None:
            if values.get("max_turns") not in (None, 10, values["max_assistant_turns"]):
                raise ValueError(
                    "max_turns and max_assistant_turns are the same; write one of them"
                )
            return {**values, "max_turns": values["max_assistant_turns"]}
        return values

    @model_validator(mode="after")
    def _there(self) -> Self:
        _usable(self.tools)
        if self.tool_config_path is not None:
            _entries(self.tool_config_path)
        if self.mcp_config_path is not None:
            _servers(self.mcp_config_path)
        return self


@lru_cache(maxsize=64)
def _usable(names: tuple[str, ...]) -> None:
    """Raises ConfigError for functions that are not there, or cannot be tools together."""
    Toolbox(named(names))


class ToolWorkflow(MultiTurnWorkflow):
    """Base; works as it is.  Override `make_tools(task)` for tools that belong to the task,
    `outcome` or `react` for a score.
    """

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
        found: list[Tool] = [
            *named(a.tools),
            *(t if isinstance(t, Tool) else FunctionTool(t) for t in own),
        ]
        if a.tool_config_path is not None:
            found += await load_tool_file(a.tool_config_path)
        if a.mcp_config_path is not None:
            found += await mcp_tools(a.mcp_config_path, a.mcp_tools)
        self.box = Toolbox(
            found,
            a.max_parallel_calls,
            a.max_tool_response_length,
            a.tool_response_truncate_side,
            a.tool_timeout,
        )
        messages = task.chat()
        return self._told(messages) if a.tools_in == "system" and found else messages

    def _told(self, messages: list[Message]) -> list[Message]:
        text = described(self.box.schemas)
        if messages[0]["role"] == "system":
            return [
                {**messages[0], "content": f"{messages[0]['content']}\n\n{text}"},
                *messages[1:],
            ]
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
        said: list[Message] = []
        for r in await self.box.run(calls):
            of_call = {"tool_call_id": r.call.id, "name": r.call.name} if r.call.id else {}
            said.append({"role": self.args.result_role, "content": r.text, **of_call})
        return Reply(tuple(said))

    def counts(self) -> dict[str, float]:
        given = [r for t in self.box.tools if isinstance(t, ClassTool) for r in t.rewards]
        return {
            **{k: float(v) for k, v in self.box.counts.items()},
            **({"tool_reward": sum(given)} if given else {}),
        }

    async def close(self) -> None:
        await self.box.close()

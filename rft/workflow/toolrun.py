"""Conversations with tools: run the calls of an answer and send the results; an answer without a
call ends the run.

Tools are functions, entries of veRL's tool configuration (`tool_config_path`), and tools of MCP
servers:

    tools:
      - class_name: tools.py:Search          # or pkg.module.Search; veRL's methods create, execute, release
        config: {timeout: 5}
        tool_schema: {type: function, function: {name: search, description: ..., parameters: {...}}}
      - function: tools.py:weather            # a function; its schema follows its signature
      - class_name: anything
        config: {type: mcp}
        mcp: {mcp_servers_config_path: servers.json, tool_selected_list: [search]}

Paths in the file are relative to it; a file is read once per process.  MCP servers (`pip install
rft-platform[mcp]`) are listed in a JSON file {"mcpServers": {name: {command, args, env} or {url}}};
each is started once for all runs, restarted if it dies, and ends with its event loop.
Invariant: a failing tool and an unreadable call are reported to the model and counted; they do not
end the run.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import re
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, Self, TextIO

import msgspec
import yaml
from pydantic import BaseModel, Field, model_validator

from rft.errors import ConfigError, SetupError
from rft.images import data_url
from rft.plugins import REGISTRY
from rft.reward.run_folder import run_folder
from rft.secrets import redact
from rft.taskset import row_images
from rft.types.completion import Completion
from rft.types.images import Observation, content_of
from rft.types.task import Task
from rft.worker.threads import unblocked
from rft.workflow.tools import (
    Format,
    FunctionTool,
    Side,
    Tool,
    Toolbox,
    ToolError,
    as_observation,
    described,
    find,
    missing,
    named,
    with_system_text,
)
from rft.workflow.turns import Message, MultiTurnWorkflow, Reply, TurnArgs

log = logging.getLogger(__name__)
_MCP_KEY = "workflow_args.mcp_config_path"
_ERROR_BYTES = 4000  # of a server's standard error in a message
_ERROR_LINES = 10
START_S = 30.0
# error texts of the library when a server has ended
_DISCONNECTED = ("Connection closed", "Session terminated")
_FILE_KEY = "workflow_args.tool_config_path"
_NO_ROW: Mapping[str, Any] = {}


@dataclass(frozen=True)
class McpTool:
    """One tool of an MCP server."""

    schema: dict[str, Any]
    server: _McpServer

    async def call(self, arguments: Mapping[str, Any]) -> Observation:
        name = self.schema["function"]["name"]
        try:
            result = await self.server.client.call_tool(name, dict(arguments))
        except Exception as e:
            if str(e) in _DISCONNECTED:
                self.server.disconnect(str(e))
            raise
        pieces: list[str | bytes] = []
        for kind, parts in groupby((_piece(p.model_dump()) for p in result.content), type):
            series = [*parts]
            pieces += series if kind is bytes else ["\n".join(map(str, series))]
        if result.is_error:
            raise ToolError("\n".join(p if isinstance(p, str) else "[image]" for p in pieces))
        return as_observation(pieces) if bytes in map(type, pieces) else "".join(map(str, pieces))

    async def close(self) -> None:
        """Keep the shared server running."""


def _piece(part: Mapping[str, Any]) -> str | bytes:
    """Return the text, or the image file, in a part of a result; the kind of another part."""
    content = part.get("resource", part)
    encoded = content.get("data") or content.get("blob")
    if encoded and str(content["mime_type"]).startswith("image/"):
        return data_url.from_base64(encoded)
    return str(content.get("text", f"[{part['type']}]"))


class _McpServer:
    """A connection, kept open by a task until the event loop ends."""

    def __init__(self, name: str, address: Any) -> None:
        self._name = name
        self._address = address
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

    def disconnect(self, reason: str) -> None:
        """Drop the connection; the next run opens another, which starts the program again."""
        log.warning("MCP server %r: %s%s", self._name, reason, self._last_errors())
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

        address = self._address
        with self._errors:
            if isinstance(address, StdioServerParameters):
                address = stdio_client(address, errlog=self._errors)
            try:
                async with Client(address) as client:
                    self.client = client
                    listed = await client.list_tools()
                    self._ready.set_result([McpTool(_schema(t), self) for t in listed.tools])
                    await asyncio.Event().wait()
            except Exception as e:  # of the server; raised in `tools`
                if not self._ready.done():
                    text = (
                        f"MCP server {self._name!r} cannot be used: "
                        f"{_innermost(e)}{self._last_errors()}"
                    )
                    self._ready.set_exception(ConfigError(text, key=_MCP_KEY))

    def _last_errors(self) -> str:
        """Return the last lines of the program's standard error."""
        size = os.fstat(self._errors.fileno()).st_size
        text = os.pread(self._errors.fileno(), _ERROR_BYTES, max(0, size - _ERROR_BYTES)).decode(
            "utf-8", "replace"
        )
        return "".join(f"\n  {redact(line)}" for line in text.splitlines()[-_ERROR_LINES:])


def _error_file(name: str) -> TextIO:
    """Open a file for the standard error of a server, in the logs of a run if there is one."""
    if (folder := run_folder.get()) is None:
        return tempfile.TemporaryFile("w+")
    return (folder / "logs" / f"mcp-{re.sub(r'[^A-Za-z0-9._-]', '_', name)}.out").open("a+")


def _innermost(error: BaseException) -> str:
    """Return the first error inside an exception group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


_SERVERS: dict[tuple[str, str], _McpServer] = {}


async def mcp_tools(path: str, selected: tuple[str, ...] = ()) -> list[Tool]:
    """Return the tools of all servers in the file, or the selected ones.  Raises ConfigError, and
    SetupError without the library.
    """
    try:
        from mcp import StdioServerParameters
    except ImportError as e:
        raise SetupError(
            f"MCP servers need the package mcp ({e}): pip install 'rft-platform[mcp]'"
        ) from e
    tools: list[Tool] = []
    for name, entry in _servers(path).items():
        key = (_absolute(path), name)
        server = _SERVERS.get(key)
        if server is None or not server.usable:
            address: Any = entry.get("url")
            if address is None:
                env = {**os.environ, **{k: str(v) for k, v in (entry.get("env") or {}).items()}}
                args = [str(a) for a in entry.get("args", ())]
                address = StdioServerParameters(command=str(entry["command"]), args=args, env=env)
            server = _SERVERS[key] = _McpServer(name, address)
        tools += await server.tools()
    names = [t.schema["function"]["name"] for t in tools]
    if missing := [s for s in selected if s not in names]:
        raise ConfigError(
            f"no MCP server has the tool {missing[0]!r}; they have {', '.join(names)}", key=_MCP_KEY
        )
    return [t for t, name in zip(tools, names, strict=True) if not selected or name in selected]


def _absolute(path: str) -> str:
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
    for name, entry in servers.items():
        if "url" in entry:
            continue
        if reason := missing(str(entry["command"]), entry.get("env") or {}):
            raise ConfigError(
                f"MCP server {name!r} cannot be used: {reason}", key=_MCP_KEY, given=path
            )
    return servers


def _schema(t: Any) -> dict[str, Any]:
    function = {
        "name": t.name,
        "description": t.description or "",
        "parameters": dict(t.input_schema),
    }
    return {"type": "function", "function": function}


class ClassTool:
    """An object with veRL's methods: `create(instance_id, **kwargs)`, `execute(instance_id,
    parameters)`, `release(instance_id)`.  `create` gets what it takes of the row's
    extra_info.tools_kwargs: {NAME: {create_kwargs: {...}}}, by name or as `create_kwargs`.

    `execute` returns (response, reward, metrics); the response is a text, or has attributes `text`
    and `image`, a list.  All may block.
    """

    def __init__(self, tool: Any, schema: dict[str, Any], row: Mapping[str, Any] = _NO_ROW) -> None:
        self._tool = tool
        self.schema = schema
        of_tools = (row.get("extra_info") or {}).get("tools_kwargs") or {}
        kwargs = (of_tools.get(schema["function"]["name"]) or {}).get("create_kwargs")
        self._create_kwargs = {**kwargs, "create_kwargs": kwargs} if kwargs else {}
        self.rewards: list[float] = []
        self._instance = ""
        self._creating = asyncio.Lock()

    async def call(self, arguments: Mapping[str, Any]) -> Observation:
        async with self._creating:
            if not self._instance:
                self._instance = uuid.uuid4().hex
                try:
                    await self._call_method("create", **self._create_kwargs)
                except Exception:
                    self._instance = ""  # the next call then creates the instance
                    raise
        result = await self._call_method("execute", dict(arguments))
        response, reward = (result[0], result[1]) if isinstance(result, tuple) else (result, None)
        if reward is not None:
            self.rewards.append(float(reward))
        text = getattr(response, "text", response)
        content = "" if text is None else as_observation(text)
        images = row_images.read(getattr(response, "image", None), Path())
        if not images or not isinstance(content, str):
            return content
        return [*(image.data for image in images), *([content] if content else [])]

    async def close(self) -> None:
        if self._instance:
            await self._call_method("release")

    async def _call_method(self, name: str, *arguments: Any, **optional: Any) -> Any:
        """Call a method for this instance, with the `optional` arguments that it takes; None if the
        tool has no such method.
        """
        method = getattr(self._tool, name, None)
        if not callable(method):
            return None
        if optional:
            takes = inspect.signature(method).parameters
            if all(p.kind is not p.VAR_KEYWORD for p in takes.values()):
                optional = {k: v for k, v in optional.items() if k in takes}
        return await unblocked(method, f"tool {name}", self._instance, *arguments, **optional)


async def load_tool_file(path: str, row: Mapping[str, Any] = _NO_ROW) -> list[Tool]:
    """Make new tools for one run of the task in `row`.  Raises ConfigError that names the file and
    the entry.
    """
    tools: list[Tool] = []
    for number, entry in enumerate(_entries(path)):
        where = f"{path}: tools[{number}]"
        folder = Path(_absolute(path)).parent
        if "function" in entry:
            tools.append(
                FunctionTool(REGISTRY.get("tool", _near(str(entry["function"]), folder)).obj)
            )
        elif (entry.get("config") or {}).get("type") == "mcp":
            mcp = entry.get("mcp") or {}
            if "mcp_servers_config_path" not in mcp:
                raise ConfigError(
                    f"{where}: an MCP tool needs mcp.mcp_servers_config_path", key=_FILE_KEY
                )
            servers = _below(folder, str(mcp["mcp_servers_config_path"]))
            tools += await mcp_tools(servers, tuple(mcp.get("tool_selected_list") or ()))
        else:
            tools.append(_class_tool(entry, where, folder, row))
    return tools


def _class_tool(
    entry: Mapping[str, Any], where: str, folder: Path, row: Mapping[str, Any]
) -> ClassTool:
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
    tool = cls(dict(entry.get("config") or {}), schema)
    schema = schema or getattr(tool, "tool_schema", None)
    if not isinstance(schema, dict) or "name" not in schema.get("function", {}):
        raise ConfigError(
            f"{where}: tool_schema must be OpenAI's form {{type: function, function: {{name, "
            f"...}}}}",
            key=_FILE_KEY,
        )
    if not callable(getattr(tool, "execute", None)):
        raise ConfigError(
            f"{where}: {name} has no method execute(instance_id, parameters)", key=_FILE_KEY
        )
    return ClassTool(tool, schema, row)


def _below(folder: Path, name: str) -> str:
    return str(folder / Path(name).expanduser())


def _near(name: str, folder: Path) -> str:
    """Return path/file.py:Name with its path below the folder of the tool file, if it exists there."""
    file, _, attribute = name.rpartition(":")
    if file.endswith(".py") and (folder / file).is_file():
        return f"{folder / file}:{attribute}"
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
    """As TurnArgs, with veRL's names of arguments for tools."""

    tools: tuple[str, ...] = Field(
        (), description="functions: path/file.py:name, pkg.module:name, or a marked name"
    )
    tool_config_path: str | None = Field(None, description="veRL's tool file")
    mcp_config_path: str | None = Field(None, description="JSON file of MCP servers")
    mcp_tools: tuple[str, ...] = Field((), description="selected tools of theirs; empty: all")
    max_assistant_turns: int | None = Field(None, ge=1, description="veRL's name of max_turns")
    max_user_turns: int | None = Field(
        None, ge=1, description="answers that are followed by tool results, at most"
    )
    max_parallel_calls: int = Field(1, ge=1, description="calls of one answer that are run")
    max_tool_response_length: int = Field(
        256, ge=1, description="characters of a result that the model gets"
    )
    tool_response_truncate_side: Side = Field(
        "middle", description="part of a longer result: the left, the right, or both ends (middle)"
    )
    tool_timeout: float = Field(30.0, gt=0, description="seconds that one call may take")
    format: Format = Field(
        "auto",
        description="form of calls where the engine has no parser: hermes, json, auto",
    )
    tools_in: Literal["template", "system"] = Field(
        "template",
        description="where the tools are described: in the chat template, or in the system message",
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
    def _check_files(self) -> Self:
        _check_tools(self.tools)
        if self.tool_config_path is not None:
            _entries(self.tool_config_path)
        if self.mcp_config_path is not None:
            _servers(self.mcp_config_path)
        return self


@lru_cache(maxsize=64)
def _check_tools(names: tuple[str, ...]) -> None:
    """Raise ConfigError for unknown functions, and for two functions of one name."""
    Toolbox(named(names))


class ToolWorkflow(MultiTurnWorkflow):
    """A conversation with tools.

    Override `make_tools(task)` for tools of a task, `outcome` or `react` for a score.
    """

    Args: type[BaseModel] = ToolArgs

    def __init__(self, **args: Any) -> None:
        super().__init__(**args)
        self.box = Toolbox()
        self._user_turns = 0

    def make_tools(self, task: Task) -> Any:
        """Return further tools for a task: functions or Tools."""
        return ()

    async def begin(self, task: Task) -> list[Message]:
        a = self.args
        tools = named(a.tools)
        for tool in await self.call(self.make_tools, task):
            tools.append(tool if isinstance(tool, Tool) else FunctionTool(tool))
        if a.tool_config_path is not None:
            tools += await load_tool_file(a.tool_config_path, task.row)
        if a.mcp_config_path is not None:
            tools += await mcp_tools(a.mcp_config_path, a.mcp_tools)
        self.box = Toolbox(
            tools,
            a.max_parallel_calls,
            a.max_tool_response_length,
            a.tool_response_truncate_side,
            a.tool_timeout,
        )
        messages = task.chat()
        if a.tools_in == "system" and tools:
            return with_system_text(messages, described(self.box.schemas))
        return messages

    def tools(self) -> Sequence[Message]:
        return self.box.schemas if self.args.tools_in == "template" else ()

    async def react(self, answer: Completion) -> Reply:
        calls = find(answer, self.args.format)
        self._user_turns += 1
        if not calls:
            return Reply(done=True)
        if self.args.max_user_turns is not None and self._user_turns > self.args.max_user_turns:
            return Reply(done=True, info={"stopped": "max_user_turns"})
        messages: list[Message] = []
        for result in await self.box.run(calls):
            message = {"role": self.args.result_role, "content": content_of(result.content)}
            if result.call.id:
                message |= {"tool_call_id": result.call.id, "name": result.call.name}
            messages.append(message)
        return Reply(tuple(messages))

    def counts(self) -> dict[str, float]:
        counts = {k: float(v) for k, v in self.box.counts.items()}
        rewards = [r for t in self.box.tools if isinstance(t, ClassTool) for r in t.rewards]
        if rewards:
            counts["tool_reward"] = sum(rewards)
        return counts

    async def close(self) -> None:
        await self.box.close()

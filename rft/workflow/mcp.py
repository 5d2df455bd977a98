"""Tools of MCP servers (`pip install rft-platform[mcp]`), named in a JSON file {"mcpServers": {name: {command, args, env} or {url}}}.

A server is started once for all runs of the program and ends with its event loop.  Knows no workflow.
Invariant: a connection is opened and closed in one task of its own, as the library asks for.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rft.errors import ConfigError, SetupError
from rft.workflow.tools import Tool, ToolError

_KEY = "workflow_args.mcp_config_path"
START_S = 30.0


@dataclass(frozen=True)
class McpTool:
    """One tool of a server."""

    schema: dict[str, Any]
    server: _Server

    async def call(self, arguments: Mapping[str, Any]) -> str:
        name = self.schema["function"]["name"]
        result = await self.server.client.call_tool(name, dict(arguments))
        text = "\n".join(getattr(part, "text", None) or f"[{part.type}]" for part in result.content)
        if result.is_error:
            raise ToolError(text)
        return text

    async def close(self) -> None:
        """The server is shared; it goes on."""


class _Server:
    """A connection, held open by a task until the event loop ends."""

    def __init__(self, name: str, where: Any) -> None:
        self._name, self._where = name, where
        self.client: Any = None
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[list[McpTool]] = self._loop.create_future()
        self._job = asyncio.ensure_future(self._hold())

    @property
    def usable(self) -> bool:
        return self._loop is asyncio.get_running_loop() and not self._job.done()

    async def tools(self) -> list[McpTool]:
        try:
            async with asyncio.timeout(START_S):
                return await asyncio.shield(self._ready)
        except TimeoutError:
            raise ConfigError(f"MCP server {self._name!r} did not answer within {START_S:g} s", key=_KEY) from None

    async def _hold(self) -> None:
        from mcp import Client

        try:
            async with Client(self._where) as client:
                self.client = client
                listed = await client.list_tools()
                self._ready.set_result([McpTool(_schema(t), self) for t in listed.tools])
                await asyncio.Event().wait()
        except Exception as e:  # of a program of somebody else; told to whoever waits for it
            if not self._ready.done():
                self._ready.set_exception(ConfigError(f"MCP server {self._name!r} cannot be used: {e}", key=_KEY))


_SERVERS: dict[tuple[str, str], _Server] = {}


async def tools(path: str, selected: tuple[str, ...] = ()) -> list[Tool]:
    """The tools of all servers in the file, or those that are selected.  Raises ConfigError, SetupError without the library."""
    try:
        from mcp import StdioServerParameters
    except ImportError as e:
        raise SetupError(f"MCP servers need the package mcp ({e}): pip install 'rft-platform[mcp]'") from e
    found: list[Tool] = []
    for name, about in _servers(path).items():
        key = (_whole(path), name)
        server = _SERVERS.get(key)
        if server is None or not server.usable:
            where: Any = about.get("url")
            if where is None:
                env = {**os.environ, **{k: str(v) for k, v in (about.get("env") or {}).items()}}
                where = StdioServerParameters(
                    command=str(about["command"]), args=[str(a) for a in about.get("args", ())], env=env
                )
            server = _SERVERS[key] = _Server(name, where)
        found += await server.tools()
    names = [t.schema["function"]["name"] for t in found]
    if missing := [s for s in selected if s not in names]:
        raise ConfigError(f"no MCP server has the tool {missing[0]!r}; they have {', '.join(names)}", key=_KEY)
    return [t for t, name in zip(found, names, strict=True) if not selected or name in selected]


def _servers(path: str) -> dict[str, dict[str, Any]]:
    try:
        read: Any = msgspec.json.decode(Path(path).expanduser().read_bytes())
    except (OSError, msgspec.DecodeError) as e:
        raise ConfigError(f"the list of MCP servers cannot be read: {e}", key=_KEY, given=path) from None
    servers = read.get("mcpServers") if isinstance(read, dict) else None
    if not isinstance(servers, dict) or not all(isinstance(s, dict) and ("command" in s or "url" in s) for s in servers.values()):
        raise ConfigError(
            'it must be {"mcpServers": {name: {"command": ..., "args": [...]} or {"url": ...}}}', key=_KEY, given=path
        )
    return servers


def _whole(path: str) -> str:
    return str(Path(path).expanduser().resolve())


def _schema(t: Any) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": t.name, "description": t.description or "", "parameters": dict(t.input_schema)},
    }

"""Tools from files: veRL's tool configuration (`tool_config_path`) and lists of MCP servers.

    tools:
      - class_name: tools.py:Search          # or pkg.module.Search; veRL's methods create, execute, release
        config: {timeout: 5}
        tool_schema: {type: function, function: {name: search, description: ..., parameters: {...}}}
      - function: tools.py:weather            # a function; its schema is made from it
      - class_name: anything
        config: {type: mcp}
        mcp: {mcp_servers_config_path: servers.json, tool_selected_list: [search]}

Paths in the file are relative to it.  Knows no workflow.  Invariant: a file is read once per run of the program.
"""

from __future__ import annotations

import inspect
import uuid
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from rft.errors import ConfigError
from rft.plugins import REGISTRY
from rft.workflow import mcp
from rft.workflow.tools import FunctionTool, Tool, as_text

_KEY = "workflow_args.tool_config_path"


class ClassTool:
    """An object with veRL's methods: `create(instance_id, **kwargs)`, `execute(instance_id, parameters)`, `release(instance_id)`.

    `execute` gives (what the model is told, a reward, metrics); what it is told is a text or has an attribute `text`.
    """

    def __init__(self, made: Any, schema: dict[str, Any]) -> None:
        self._made = made
        self.schema = schema
        self.rewards: list[float] = []
        self._instance = ""

    async def call(self, arguments: Mapping[str, Any]) -> str:
        if not self._instance:
            self._instance = uuid.uuid4().hex
            if callable(create := getattr(self._made, "create", None)):
                await _waited(create(self._instance))
        result = await _waited(self._made.execute(self._instance, dict(arguments)))
        said, reward = (result[0], result[1]) if isinstance(result, tuple) else (result, None)
        if reward is not None:
            self.rewards.append(float(reward))
        return as_text(getattr(said, "text", said) or "")

    async def close(self) -> None:
        if self._instance and callable(release := getattr(self._made, "release", None)):
            await _waited(release(self._instance))


async def load(path: str) -> list[Tool]:
    """Fresh tools for one run.  Raises ConfigError naming the file and the entry."""
    found: list[Tool] = []
    for number, entry in enumerate(_entries(path)):
        where = f"{path}: tools[{number}]"
        folder = Path(path).parent
        if "function" in entry:
            found.append(FunctionTool(REGISTRY.get("tool", _near(str(entry["function"]), folder)).obj))
        elif (entry.get("config") or {}).get("type") == "mcp":
            about = entry.get("mcp") or {}
            if "mcp_servers_config_path" not in about:
                raise ConfigError(f"{where}: an MCP tool needs mcp.mcp_servers_config_path", key=_KEY)
            found += await mcp.tools(
                _beside(folder, str(about["mcp_servers_config_path"])), tuple(about.get("tool_selected_list") or ())
            )
        else:
            found.append(_class(entry, where, folder))
    return found


def _class(entry: Mapping[str, Any], where: str, folder: Path) -> ClassTool:
    name, schema = str(entry.get("class_name", "")), entry.get("tool_schema")
    if ":" not in name and "." in name:
        name = ":".join(name.rsplit(".", 1))
    if ":" not in name:
        raise ConfigError(f"{where} needs `function`, or `class_name` as pkg.module.Name or path/file.py:Name", key=_KEY)
    cls = REGISTRY.get("tool", _near(name, folder)).obj
    made = cls(dict(entry.get("config") or {}), schema)
    schema = schema or getattr(made, "tool_schema", None)
    if not isinstance(schema, dict) or "name" not in schema.get("function", {}):
        raise ConfigError(f"{where}: tool_schema must be OpenAI's form {{type: function, function: {{name, ...}}}}", key=_KEY)
    if not callable(getattr(made, "execute", None)):
        raise ConfigError(f"{where}: {name} has no method execute(instance_id, parameters)", key=_KEY)
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
        raise ConfigError(f"the tool file cannot be read: {e}", key=_KEY, given=path) from None
    entries = read.get("tools") if isinstance(read, dict) else None
    if not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
        raise ConfigError("the tool file must hold a list `tools` of mappings", key=_KEY, given=path)
    return tuple(entries)


async def _waited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value

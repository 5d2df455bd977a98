"""Options of several commands, and functions for them.  Imports only the errors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rft.errors import ConfigError

if TYPE_CHECKING:
    from rft.config.plan import Plan
    from rft.taskset.base import Taskset
    from rft.taskset.settings import TasksetSettings
    from rft.types.task import Task

RunDir = Annotated[Path, typer.Argument(help="folder of the run", show_default=False)]
Config = Annotated[Path, typer.Option("--config", "-c", help="the YAML file", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        help="key.path=value; items of a list by number: a.tasksets.0.path=x", show_default=False
    ),
]
PluginDirs = Annotated[
    list[str] | None,
    typer.Option("--plugin-dir", help="folder with your plugins; repeatable", show_default=False),
]
Json = Annotated[bool, typer.Option("--json", help="print one JSON object")]
JsonArray = Annotated[bool, typer.Option("--json", help="print one JSON array")]


def option(*names: str, help: str) -> Any:
    """Make a typer option whose default is not shown."""
    return typer.Option(*names, help=help, show_default=False)


def one_of(value: str | None, allowed: Sequence[str], key: str) -> str:
    """Return `value`.

    Raises ConfigError if it is not allowed.
    """
    if value is None or value not in allowed:
        names = ", ".join(allowed) or "no taskset"
        raise ConfigError(f"write one of {names}", key=key, given=value)
    return value


def planned(
    config: Path,
    overrides: Sequence[str] | None = None,
    plugin_dirs: Sequence[str] | None = None,
    stage: str = "",
) -> Plan:
    """Return the plan of a configuration, after loading all plugins."""
    from rft.config.load import load
    from rft.config.resolve import resolve
    from rft.plugins import load_all

    plan = resolve(load(config, overrides or (), stage=stage))
    load_all([*plan.plugin_dirs, *(plugin_dirs or ())])
    return plan


def task_of(opened: Taskset, row: int, key: str) -> Task:
    """Return the task of row `row` of the taskset's source."""
    if (place := opened.place(row)) is None:
        raise ConfigError(
            f"taskset {opened.settings.name} has no row {row}, or leaves it out; it has "
            f"{len(opened)}",
            key=key,
            given=row,
        )
    return opened.task(place)


def tasksets(plan: Plan) -> dict[str, TasksetSettings]:
    """Return training tasksets, then evaluation tasksets, by name."""
    return {t.name: t for t in (*plan.explorer.tasksets, *plan.explorer.eval_tasksets)}

"""`rft bench`: score answers that are stored already, split by source."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rft.config.plan import Plan
    from rft.explorer.stored import Scored
    from rft.taskset.base import Taskset
    from rft.taskset.settings import TasksetSettings

_VERL = {
    "prompt": "prompt",
    "truth": "reward_model",
    "group": "data_source",
}  # columns of veRL's data, where there is no --config


def bench(
    stored: Annotated[Path, typer.Option("--input", "-i", help="parquet, jsonl, json or csv with answers", show_default=False)],
    config: Annotated[
        Path | None,
        typer.Option("--config", "-c", help="the YAML file whose taskset says how a row is scored", show_default=False),
    ] = None,
    taskset: Annotated[
        str | None, typer.Option(help="which one of its tasksets; default: the only one", show_default=False)
    ] = None,
    prompt_key: Annotated[
        str | None, typer.Option(help="column of prompts; default: the taskset's, else prompt", show_default=False)
    ] = None,
    response_key: Annotated[str, typer.Option(help="column with an answer or a list of answers")] = "responses",
    group_key: Annotated[str, typer.Option(help="column by which results are split")] = "data_source",
    truth_key: Annotated[
        str | None,
        typer.Option(help="column of reference answers; default: the taskset's, else reward_model", show_default=False),
    ] = None,
    reward_fn: Annotated[
        str | None, typer.Option(help="name of a reward, or file.py:function; default: the taskset's", show_default=False)
    ] = None,
    plugin_dir: Annotated[list[str] | None, typer.Option(help="folder with your plugins; repeatable", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Score stored answers with a taskset's reward, split by source."""
    import asyncio
    import json

    from rft.errors import ConfigError
    from rft.explorer.stored import summary
    from rft.plugins import load_all
    from rft.taskset.base import open_taskset

    if not stored.is_file():
        raise ConfigError("is not a file", key="--input", given=str(stored))
    plan: Plan | None = None
    folders = list(plugin_dir or [])
    if config is not None:
        plan, settings = _of_config(config, taskset)
        folders = [*plan.plugin_dirs, *folders]
    elif reward_fn is None:
        raise ConfigError("name the reward with --reward-fn, or a configuration with --config", key="--reward-fn")
    else:
        settings = _plain()
    load_all(folders)
    settings = _for_file(settings, stored, prompt_key, truth_key, reward_fn, own=config is not None)
    opened = open_taskset(settings)
    rows = asyncio.run(_scored(plan, opened, response_key, group_key))
    told = summary(rows)
    why = next((r.why for r in rows if r.why), "")
    if as_json:
        print(json.dumps({"input": str(stored), "reward": settings.reward, "sources": told, "unscored": why}, indent=1))
        return
    print(_table(told))
    if why:
        print(f"not scored, the first one: {why}")


async def _scored(plan: Plan | None, opened: Taskset, response_key: str, group_key: str) -> list[Scored]:
    """With the models of the plan for rewards that ask one; each is started by its first question."""
    from rft.explorer.stored import score_stored

    if plan is None:
        return await score_stored(opened, response_key=response_key, group_key=group_key, timeout_s=1800.0, max_concurrent=256)
    from rft.launch.solo import Models
    from rft.reward.place import run_folder

    models, limits = Models(plan, lambda text: typer.echo(text, err=True)), plan.explorer
    run_folder.set(plan.run_dir)
    try:
        return await score_stored(
            opened,
            response_key=response_key,
            group_key=group_key,
            timeout_s=limits.max_timeout_s,
            max_concurrent=limits.max_concurrent_runs,
            models=models.auxiliary({}),
        )
    finally:
        await models.close()


def _of_config(path: Path, name: str | None) -> tuple[Plan, TasksetSettings]:
    """The plan of a configuration, and the taskset that is meant."""
    from rft.config.load import load
    from rft.config.resolve import resolve
    from rft.errors import ConfigError

    plan = resolve(load(path))
    found = {t.name: t for t in (*plan.explorer.tasksets, *plan.explorer.eval_tasksets)}
    if name is None and len(found) == 1:
        name = next(iter(found))
    if name not in found:
        raise ConfigError(f"write one of {', '.join(found) or 'no taskset'}", key="--taskset", given=name)
    return plan, found[name]


def _plain() -> TasksetSettings:
    from rft.taskset.settings import TasksetSettings

    return TasksetSettings(name="stored", path="", workflow="simple_workflow")


def _for_file(
    settings: TasksetSettings, stored: Path, prompt_key: str | None, truth_key: str | None, reward_fn: str | None, *, own: bool
) -> TasksetSettings:
    """The taskset over the rows of `stored`.  A column that holds messages, or {ground_truth}, is read as what it is."""
    from dataclasses import replace

    from rft.taskset.base import lookup
    from rft.taskset.files import open_path

    settings = replace(
        settings, path=str(stored.absolute()), storage_type="file", reader_path=None, max_rows=None, prompt_limit=None
    )
    if reward_fn is not None:
        settings = replace(settings, reward=reward_fn, reward_args={}, format=replace(settings.format, reward_fn_key=""))
    first = open_path(settings).rows[0]
    changes: dict[str, Any] = {}
    if prompt_key is not None or not own:
        key = prompt_key or _VERL["prompt"]
        messages = isinstance(lookup(first, key), list)
        changes |= {"prompt_key": key, "messages_key": key, "prompt_type": "messages" if messages else "plaintext"}
    if truth_key is not None or not own:
        key = truth_key or _VERL["truth"]
        column = lookup(first, key)
        changes["response_key"] = f"{key}.ground_truth" if isinstance(column, dict) and "ground_truth" in column else key
    return replace(settings, format=replace(settings.format, **changes))


def _table(told: dict[str, dict[str, float]]) -> str:
    names = list(dict.fromkeys(name for values in told.values() for name in values))
    rows = [["source", *names]]
    for source, values in told.items():
        rows.append([source, *(_shown(name, values.get(name)) for name in names)])
    widths = [max(len(row[i]) for row in rows) for i in range(len(names) + 1)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]) for row in rows
    )


def _shown(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    return str(int(value)) if name in ("rows", "answers", "unscored") else f"{value:.4f}"

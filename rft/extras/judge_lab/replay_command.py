"""`rft replay`: the stored rollouts of a run scored again with another reward; nothing of the run
is changed.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rft.cli.options import Json, PluginDirs, RunDir, option, planned, task_of, tasksets
from rft.errors import ConfigError
from rft.extras.judge_lab.judge_command import auxiliary_models

if TYPE_CHECKING:
    from rft.config.plan import Plan
    from rft.extras.judge_lab.rescore import Rescored, StoredAnswer


def replay(
    run: RunDir,
    reward: Annotated[str, option(help="name of a reward, pkg.module:Name or path/file.py:Name")],
    reward_args: Annotated[str, option(help="its arguments, as JSON")] = "{}",
    config: Annotated[
        Path | None,
        option("--config", "-c", help="YAML file of tasksets and judges; default: the run's own"),
    ] = None,
    overrides: Annotated[
        list[str] | None, option("--set", help="key.path=value; repeatable")
    ] = None,
    where: Annotated[str, option(help="SQL condition on the columns of v_experiences")] = "",
    step: Annotated[
        int | None,
        typer.Option(min=1, help="only runs that this train step used", show_default=False),
    ] = None,
    limit: Annotated[
        int, typer.Option("-n", "--limit", min=0, help="groups at most, evenly spread; 0: all")
    ] = 0,
    to: Annotated[
        Path | None, option(help="new .jsonl file for every answer, old and new reward")
    ] = None,
    plugin_dir: PluginDirs = None,
    as_json: Json = False,
) -> None:
    """Score stored rollouts with another reward, and show old against new."""
    from rft.extras.judge_lab.rescore import summary
    from rft.files.disk import write_whole
    from rft.secrets import learn_environment

    learn_environment()
    if to is not None and (to.suffix != ".jsonl" or os.path.lexists(to) or not to.parent.is_dir()):
        raise ConfigError(
            "must be a new file that ends in .jsonl, in a folder that is there",
            key="--to",
            given=str(to),
        )
    plan = planned(_config_file(run, config), overrides, plugin_dir)
    try:
        args = dict(json.loads(reward_args))
    except (ValueError, TypeError) as e:
        raise ConfigError(
            f"is no JSON object: {e}", key="--reward-args", given=reward_args
        ) from None
    rescored = asyncio.run(_rescore(run, plan, reward, args, where, step, limit))
    if to is not None:
        lines = "".join(json.dumps(vars(r), ensure_ascii=False) + "\n" for r in rescored)
        # half characters stay what they are in JSON
        write_whole(to, lines.encode("utf-8", "backslashreplace"))
    by_taskset = summary(rescored)
    if as_json:
        print(json.dumps({"run": str(run), "reward": reward, "tasksets": by_taskset}, indent=1))
    else:
        _show(rescored, by_taskset, to)


def _config_file(run: Path, config: Path | None) -> Path:
    file = config or run / "config.resolved.yaml"
    if not file.is_file():
        raise ConfigError(
            f"{run} has no config.resolved.yaml; name the run's YAML file with --config",
            key="RUN",
            given=str(run),
        )
    return file


async def rescored_run(
    run: Path, reward: str, args: dict[str, Any], where: str, step: int | None, limit: int
) -> list[Rescored]:
    """Return the scored rollouts of a run, with its own configuration.  Raises ConfigError."""
    plan = planned(_config_file(run, None), None, None)
    return await _rescore(run, plan, reward, args, where, step, limit)


async def _rescore(
    run: Path,
    plan: Plan,
    name: str,
    args: dict[str, Any],
    where: str,
    step: int | None,
    limit: int,
) -> list[Rescored]:
    from rft.cli.show import progress
    from rft.extras.judge_lab.rescore import rescore
    from rft.reward.build_reward import build

    reward = build(name, args, key="--reward-args")
    stored = _stored(run, plan, where, step, limit)
    if not stored:
        raise ConfigError("no rollout matches", key="--where" if where or step else "RUN")
    report_progress = progress()
    async with auxiliary_models(plan) as models:
        return await rescore(
            stored,
            reward,
            models=models,
            timeout_s=plan.explorer.max_timeout_s,
            max_concurrent=plan.explorer.max_concurrent_runs,
            progress=lambda n: report_progress(f"scored {n} of {len(stored)}"),
        )


def _stored(run: Path, plan: Plan, where: str, step: int | None, limit: int) -> list[StoredAnswer]:
    """Groups in order, with the tasks that the configuration gives them.  Failed runs have no
    answer and are left out.
    """
    from rft.buffer.query import open_run
    from rft.extras.judge_lab.judge_command import evenly, payloads, tell_changed
    from rft.extras.judge_lab.rescore import StoredAnswer
    from rft.taskset.open_source import open_taskset

    opened = {name: open_taskset(settings) for name, settings in tasksets(plan).items()}
    condition = f"({where.strip() or '1 = 1'}\n)" + (f" AND used_step = {step:d}" if step else "")
    question = (
        "SELECT id, group_id, taskset, task_index, reward FROM v_experiences WHERE status <> "
        "'failed' AND (group_id, run) IN "
        # a run is scored whole
        f"(SELECT group_id, run FROM v_experiences WHERE {condition}) ORDER BY id"
    )
    with open_run(run) as questions:
        with questions.ask(question) as answer:
            rows = list(answer.rows)
        chosen = set(evenly(list(dict.fromkeys(r[1] for r in rows)), limit))
        rows = [r for r in rows if r[1] in chosen]
        if missing := sorted({r[2] for r in rows} - opened.keys()):
            raise ConfigError(
                f"the configuration has no taskset {missing[0]!r}, which rows of the run belong to",
                key="--config",
            )
        for name in sorted({r[2] for r in rows}):
            tell_changed(questions, opened[name])
        payload = dict(payloads(questions, [r[0] for r in rows]))
        names = {place.sha256 for row in payload.values() for place in row.images}
        images = {name: questions.image(name) for name in sorted(names)}
    return [
        StoredAnswer(task_of(opened[name], index, "--config"), group, payload[id], old, images)
        for id, group, name, index, old in rows
    ]


def _show(
    rescored: Sequence[Rescored], by_taskset: dict[str, dict[str, float]], to: Path | None
) -> None:
    from rft.cli.show import table
    from rft.secrets import safe

    names = list(dict.fromkeys(n for values in by_taskset.values() for n in values))
    rows = [
        [taskset, *("" if n not in values else f"{values[n]:.4g}" for n in names)]
        for taskset, values in by_taskset.items()
    ]
    print(
        "\n".join(
            table(
                ["taskset", *(n.replace("_", " ") for n in names)],
                rows,
                [False, *([True] * len(names))],
            )
        )
    )
    apart = sorted(
        (r for r in rescored if r.old is not None and r.new is not None),
        key=lambda r: -abs((r.new or 0.0) - (r.old or 0.0)),
    )
    if apart and apart[0].old != apart[0].new:
        print("\nfurthest apart")
        cells = [[r.id, f"{r.old:.4g}", f"{r.new:.4g}", r.answer] for r in apart[:8]]
        print("\n".join(table(("row", "old", "new", "answer"), cells, (False, True, True))))
    if first_reason := next((f"{r.id}: {r.reason}" for r in rescored if r.new is None), ""):
        print(f"\nnot scored, the first one: {safe(first_reason)}")
    if to is not None:
        print(f"\n{to}  {len(rescored)} answers")

"""`rft judge`: how far a judge can be trusted.  The numbers are those of rft.explorer.judged."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rft.config.plan import Plan
    from rft.taskset.base import Taskset
    from rft.types.task import Task

PAGE = 256  # experiences whose payload is read at once
app = typer.Typer(no_args_is_help=True, help="How far a judge can be trusted.")


@app.callback()
def judge() -> None:
    """How far a judge can be trusted."""


@app.command()
def report(
    config: Annotated[
        Path,
        typer.Option("--config", "-c", help="the YAML file whose taskset names the judge, and its models", show_default=False),
    ],
    stored: Annotated[
        Path | None, typer.Option("--input", "-i", help="parquet, jsonl, json or csv with answers and labels", show_default=False)
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(help="folder of a run instead: its answers and scores, by weight version", show_default=False),
    ] = None,
    taskset: Annotated[
        str | None, typer.Option(help="which one of its tasksets; default: the only one to train on", show_default=False)
    ] = None,
    prompt_key: Annotated[str | None, typer.Option(help="column of prompts; default: the taskset's", show_default=False)] = None,
    response_key: Annotated[str, typer.Option(help="column with an answer or a list of answers")] = "response",
    label_key: Annotated[str, typer.Option(help="column with a label, or a list of labels, one for each answer")] = "label",
    truth_key: Annotated[
        str | None, typer.Option(help="column of reference answers; default: the taskset's", show_default=False)
    ] = None,
    gold: Annotated[
        str | None, typer.Option(help="a reward whose value is the label, e.g. math_reward", show_default=False)
    ] = None,
    repeats: Annotated[
        int | None,
        typer.Option(
            min=0, max=100, help="ask so often; default: 1, and 0 with --run, whose stored scores are taken", show_default=False
        ),
    ] = None,
    threshold: Annotated[float, typer.Option(help="a score from here on is a good verdict")] = 0.5,
    label_threshold: Annotated[
        float | None, typer.Option(help="a label from here on is good; default: the middle of their range", show_default=False)
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="no more answers than this", show_default=False)] = None,
    to: Annotated[Path | None, typer.Option(help="also write the JSON object to this file", show_default=False)] = None,
    plugin_dir: Annotated[list[str] | None, typer.Option(help="folder with your plugins; repeatable", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Agreement of a judge with labels, its consistency and biases, and its drift over a run."""
    import asyncio
    import json

    from rft.config.load import load
    from rft.config.resolve import resolve
    from rft.errors import ConfigError
    from rft.plugins import load_all

    if (stored is None) == (run is None):
        raise ConfigError("give a file with --input, or the folder of a run with --run", key="--input")
    plan = resolve(load(config))
    load_all([*plan.plugin_dirs, *(plugin_dir or [])])
    opened = _taskset(plan, taskset, stored, prompt_key, truth_key)
    if run is not None:
        rows = _of_run(run, opened, limit)
    else:
        rows = _of_file(opened, response_key, None if gold is not None else label_key, limit)
    if not rows:
        raise ConfigError("there is no answer to judge", key="--run" if run is not None else "--input")
    asked = (1 if run is None else 0) if repeats is None else repeats
    told = asyncio.run(_report(plan, rows, asked, gold, threshold, label_threshold))
    told = {"judge": rows[0][0].reward, "source": str(stored or run), **told}
    if to is not None:
        to.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(told, indent=1) if as_json else _table(told))


def _taskset(plan: Plan, name: str | None, stored: Path | None, prompt_key: str | None, truth_key: str | None) -> Taskset:
    from dataclasses import replace

    from rft.cli.bench import _for_file
    from rft.errors import ConfigError
    from rft.taskset.base import open_taskset

    train = {t.name: t for t in plan.explorer.tasksets}
    found = train | {t.name: t for t in plan.explorer.eval_tasksets}
    if name is None and len(train) == 1:
        name = next(iter(train))
    if name not in found:
        raise ConfigError(f"write one of {', '.join(found) or 'no taskset'}", key="--taskset", given=name)
    settings = found[name]
    if settings.reward is None:
        raise ConfigError("names no reward; write default_reward_fn_type: NAME_OF_THE_JUDGE", key=f"taskset {name}")
    if stored is not None:
        if not stored.is_file():
            raise ConfigError("is not a file", key="--input", given=str(stored))
        settings = _for_file(settings, stored, prompt_key, truth_key, None, own=True)
        settings = replace(settings, format=replace(settings.format, reward_fn_key=""))
    return open_taskset(settings)


def _of_file(opened: Taskset, response_key: str, label_key: str | None, limit: int | None) -> list[Any]:
    from rft.errors import ConfigError
    from rft.explorer.judged import number
    from rft.taskset.base import ABSENT, lookup

    rows: list[Any] = []
    for task in map(opened.task, range(len(opened))):
        answers, labels = lookup(task.row, response_key), lookup(task.row, label_key) if label_key else None
        for key, given in ((response_key, answers), (label_key, labels)):
            if given is ABSENT:
                raise ConfigError(
                    f"row {task.index} has no column {key!r}; it has {', '.join(task.row)}", key="--input", given=key
                )
        answers = [answers] if isinstance(answers, str) else list(answers)
        labels = list(labels) if isinstance(labels, list | tuple) else [labels] * len(answers)
        if len(labels) != len(answers):
            raise ConfigError(f"row {task.index} has {len(answers)} answers and {len(labels)} labels", key="--label-key")
        rows += [(task, str(a), None if v is None else number(v), None, None) for a, v in zip(answers, labels, strict=True)]
    return rows[:limit]


def _of_run(run: Path, opened: Taskset, limit: int | None) -> list[Any]:
    """Every answer of the taskset in the run's buffer, with the step of the weights that wrote its newest token."""
    from rft.buffer.query import open_run

    question = "SELECT id, taskset, task_index, reward, newest_step FROM v_experiences WHERE status <> 'failed' ORDER BY id"
    with open_run(run) as questions:
        with questions.ask(question) as answer:
            found = [r for r in answer.rows if r[1] == opened.settings.name]
        if limit is not None and len(found) > limit:  # spread over the whole run
            found = [found[i * len(found) // limit] for i in range(limit)]
        texts: dict[str, str] = {}
        for i in range(0, len(found), PAGE):
            payload = questions.payload([r[0] for r in found[i : i + PAGE]])
            texts |= {id: str(x.messages[-1].get("content") or "") for id, x in payload.items()}
    return [(opened.task(index), texts[id], None, reward, step) for id, _, index, reward, step in found]


async def _report(
    plan: Plan, rows: list[Any], repeats: int, gold: str | None, threshold: float, label_threshold: float | None
) -> dict[str, Any]:
    from rft.explorer import judged
    from rft.launch.solo import Models
    from rft.reward.build import build
    from rft.reward.judge import meter
    from rft.reward.place import run_folder

    task: Task = rows[0][0]
    answers = [(r[0], r[1]) for r in rows]
    values: list[tuple[float | None, ...]] = [(r[3],) for r in rows]
    labels: list[float | None] = [r[2] for r in rows]
    models, before = Models(plan, lambda text: typer.echo(text, err=True)), dict(meter.counts())
    run_folder.set(plan.run_dir)
    try:
        if repeats:
            values = await _asked(build(str(task.reward), task.reward_args), models.auxiliary({}), answers, repeats)
        if gold is not None:
            labels = [v for (v,) in await _asked(build(gold, {}), models.auxiliary({}), answers, 1)]
    finally:
        await models.close()
    counted: dict[str, float] = {}
    for name, value in meter.counts().items():
        judge, _, what = name.rpartition("/")
        if value != before.get(name, 0.0) and f"{judge}/latency" != name:
            counted[what] = counted.get(what, 0.0) + value - before.get(name, 0.0)
    told = [judged.Labelled(len(r[1]), v, label, r[4]) for r, v, label in zip(rows, values, labels, strict=True)]
    found = judged.report(told, threshold=threshold, label_threshold=label_threshold, counted=counted)
    return {**found, "repeats": repeats, "asked": counted}


async def _asked(reward: Any, models: Any, answers: list[Any], repeats: int) -> list[tuple[float | None, ...]]:
    from rft.explorer.judged import scores

    try:
        if callable(prepare := getattr(reward, "prepare", None)):
            await prepare(models)
        return await scores(reward, answers, repeats=repeats)
    finally:
        if callable(close := getattr(reward, "close", None)):
            await close()


_SHOWN = (
    ("answers", "answers"),
    ("unscored", "of them unscored"),
    ("labelled", "of them labelled"),
    ("mean_score", "mean score"),
    ("accuracy", "agrees with the label"),
    ("kappa", "Cohen's kappa"),
    ("auc", "AUC"),
    ("pearson", "Pearson correlation"),
    ("spearman", "Spearman correlation"),
    ("bias", "mean of score - label"),
    ("self_consistency", "same verdict in every repeat"),
    ("repeat_std", "deviation between repeats"),
    ("position_bias", "verdict changes with the order"),
    ("length_bias", "score - label goes with length"),
    ("length_correlation", "score goes with length"),
)


def _table(told: dict[str, Any]) -> str:
    lines = [f"{told['judge']} on {told['source']}"]
    lines += [f"{says.ljust(32)}{_number(told[name]):>10}" for name, says in _SHOWN]
    if asked := told["asked"]:
        lines.append(", ".join(f"{name} {value:g}" for name, value in asked.items()))
    if drift := told["drift"]:
        names = list(drift[0])
        cells = [names, *([_number(row[n]) for n in names] for row in drift)]
        lines += ["", "by train step of the weights", *("  ".join(c.rjust(11) for c in row) for row in cells)]
    return "\n".join(lines)


def _number(value: Any) -> str:
    return "-" if value is None else str(value) if isinstance(value, int) else f"{value:.4f}"

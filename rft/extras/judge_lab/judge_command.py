"""`rft bench` and `rft judge`: rewards and judges on answers that are there already, in a file or
in a run.

The numbers are those of rft.explorer.stored and rft.extras.judge_lab.judge_eval.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from rft.cli.options import Json, PluginDirs, one_of, option, planned, task_of, tasksets
from rft.errors import ConfigError

if TYPE_CHECKING:
    from rft.buffer.query import Questions
    from rft.config.plan import Plan
    from rft.explorer.stored import Scored
    from rft.taskset.base import Taskset
    from rft.taskset.settings import TasksetSettings
    from rft.types.experience import Experience
    from rft.types.task import Task

T = TypeVar("T")
PAGE = 256  # experiences whose payload is read at once
judge = typer.Typer(no_args_is_help=True, callback=lambda: None)


Answers = Annotated[Path, option("--input", "-i", help="parquet, jsonl, json or csv with answers")]
ConfigFile = Annotated[
    Path | None,
    option("--config", "-c", help="the YAML file whose taskset says how a row is scored"),
]
TasksetName = Annotated[
    str | None, option(help="which one of its tasksets; default: the only one to train on")
]
PromptKey = Annotated[
    str | None, option(help="column of prompts; default: the taskset's, else prompt")
]
ResponseKey = Annotated[str, typer.Option(help="column with an answer or a list of answers")]
TruthKey = Annotated[
    str | None,
    option(help="column of reference answers; default: the taskset's, else reward_model"),
]


def bench(
    stored: Answers,
    config: ConfigFile = None,
    taskset: TasksetName = None,
    prompt_key: PromptKey = None,
    response_key: ResponseKey = "responses",
    group_key: Annotated[
        str, typer.Option(help="column by which results are split")
    ] = "data_source",
    truth_key: TruthKey = None,
    reward_fn: Annotated[
        str | None,
        option(help="name of a reward, or file.py:function; default: the taskset's"),
    ] = None,
    plugin_dir: PluginDirs = None,
    as_json: Json = False,
) -> None:
    """Measure a reward on a file of answers, by source."""
    from rft.explorer.stored import summary
    from rft.taskset.open_source import open_taskset

    plan = planned(config, plugin_dirs=plugin_dir) if config is not None else None
    settings = _for_file(
        _settings(plan, taskset, reward_fn, plugin_dir),
        stored,
        prompt_key,
        truth_key,
        reward_fn,
        is_verdict=config is not None,
    )
    scored = asyncio.run(_scored(plan, open_taskset(settings), response_key, group_key))
    sources = summary(scored)
    unscored = next((r.reason for r in scored if r.reason), "")
    if as_json:
        answer = {
            "input": str(stored),
            "reward": settings.reward,
            "sources": sources,
            "unscored": unscored,
        }
        print(json.dumps(answer, indent=1))
    else:
        _print_sources(sources, unscored)


def _settings(
    plan: Plan | None, taskset: str | None, reward_fn: str | None, plugin_dir: list[str] | None
) -> TasksetSettings:
    """Return the plan's taskset of that name; without a plan, one that has only a reward."""
    from rft.plugins import load_all
    from rft.taskset.settings import TasksetSettings

    if plan is not None:
        by_name = tasksets(plan)
        only = next(iter(by_name)) if taskset is None and len(by_name) == 1 else taskset
        return by_name[one_of(only, list(by_name), "--taskset")]
    if reward_fn is None:
        raise ConfigError(
            "name the reward with --reward-fn, or a configuration with --config", key="--reward-fn"
        )
    load_all(plugin_dir or ())
    return TasksetSettings(name="stored", path="", workflow="simple_workflow")


def _print_sources(sources: dict[str, dict[str, float]], unscored: str) -> None:
    from rft.cli.show import table
    from rft.secrets import safe

    names = list(dict.fromkeys(name for values in sources.values() for name in values))
    rows = [
        [source, *(_count(name, values.get(name)) for name in names)]
        for source, values in sources.items()
    ]
    print(*table(["source", *names], rows, [False, *([True] * len(names))]), sep="\n")
    if unscored:
        print(f"not scored, the first one: {safe(unscored)}")


async def _scored(
    plan: Plan | None, opened: Taskset, response_key: str, group_key: str
) -> list[Scored]:
    from rft.explorer.stored import score_stored

    score = partial(score_stored, opened, response_key=response_key, group_key=group_key)
    if plan is None:
        return await score(timeout_s=1800.0, max_concurrent=256)
    s = plan.explorer
    async with auxiliary_models(plan) as models:
        return await score(
            timeout_s=s.max_timeout_s, max_concurrent=s.max_concurrent_runs, models=models
        )


@asynccontextmanager
async def auxiliary_models(plan: Plan) -> AsyncIterator[Any]:
    """The models of the plan for rewards that ask one; each is started by its first question."""
    from rft.launch.debug_session import Models
    from rft.reward.run_folder import run_folder

    models = Models(plan, lambda text: typer.echo(text, err=True))
    run_folder.set(plan.run_dir)
    try:
        yield models.auxiliary({})
    finally:
        await models.close()


def _for_file(
    settings: TasksetSettings,
    stored: Path,
    prompt_key: str | None,
    truth_key: str | None,
    reward_fn: str | None,
    *,
    is_verdict: bool,
) -> TasksetSettings:
    """The taskset over the rows of `stored`.  A column that holds messages, or {ground_truth}, is
    read as what it is.
    """
    from rft.taskset.files import open_path
    from rft.taskset.messages import lookup

    if not stored.is_file():
        raise ConfigError("is not a file", key="--input", given=str(stored))
    settings = replace(
        settings,
        path=str(stored.absolute()),
        storage_type="file",
        max_rows=None,
        prompt_limit=None,
    )
    if reward_fn is not None:
        settings = replace(
            settings,
            reward=reward_fn,
            reward_args={},
            format=replace(settings.format, reward_fn_key=""),
        )
    if not (rows := open_path(settings).rows):
        raise ConfigError("has no rows", key="--input", given=str(stored))
    first = rows[0]
    changes: dict[str, Any] = {}
    if prompt_key is not None or not is_verdict:
        key = prompt_key or "prompt"  # this and the next of veRL's data
        messages = isinstance(lookup(first, key), list)
        changes |= {
            "prompt_key": key,
            "messages_key": key,
            "prompt_type": "messages" if messages else "plaintext",
        }
    if truth_key is not None or not is_verdict:
        key = truth_key or "reward_model"
        if truth_key is None and key not in first:
            raise ConfigError(
                f"name the column of reference answers; there are {', '.join(first)}",
                key="--truth-key",
            )
        column = lookup(first, key)
        changes["response_key"] = (
            f"{key}.ground_truth" if isinstance(column, dict) and "ground_truth" in column else key
        )
    return replace(settings, format=replace(settings.format, **changes))


def _count(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    return str(int(value)) if name in ("rows", "answers", "unscored") else f"{value:.4f}"


@judge.command()
def report(
    config: Annotated[
        Path,
        option(
            "--config", "-c", help="the YAML file whose taskset names the judge, and its models"
        ),
    ],
    stored: Annotated[
        Path | None,
        option("--input", "-i", help="parquet, jsonl, json or csv with answers and labels"),
    ] = None,
    run: Annotated[
        Path | None,
        option(help="folder of a run instead: its answers and scores, by weight version"),
    ] = None,
    taskset: TasksetName = None,
    prompt_key: PromptKey = None,
    response_key: ResponseKey = "response",
    label_key: Annotated[
        str, typer.Option(help="column with a label, or a list of labels, one for each answer")
    ] = "label",
    truth_key: TruthKey = None,
    gold: Annotated[
        str | None, option(help="a reward whose value is the label, e.g. math_reward")
    ] = None,
    repeats: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=100,
            help="calls per answer; default: 1, and 0 with --run, which has scores",
            show_default=False,
        ),
    ] = None,
    threshold: Annotated[float, typer.Option(help="a score from here on is a good verdict")] = 0.5,
    label_threshold: Annotated[
        float | None,
        option(help="a label from here on is good; default: the middle of their range"),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="at most this many answers", show_default=False)
    ] = None,
    to: Annotated[Path | None, option(help="also write the JSON object to this file")] = None,
    plugin_dir: PluginDirs = None,
    as_json: Json = False,
) -> None:
    """Agreement of a judge with labels, its consistency and biases, and its drift over a run."""
    if (stored is None) == (run is None):
        raise ConfigError(
            "give a file with --input, or the folder of a run with --run", key="--input"
        )
    if to is not None and not to.parent.is_dir():
        raise ConfigError("must be a file in a folder that is there", key="--to", given=str(to))
    plan = planned(config, plugin_dirs=plugin_dir)
    opened = _taskset(plan, taskset, stored, prompt_key, truth_key)
    rows = _answers(run, opened, response_key, None if gold is not None else label_key, limit)
    repeats = int(run is None) if repeats is None else repeats
    figures = asyncio.run(_report(plan, rows, repeats, gold, threshold, label_threshold))
    figures = {"judge": rows[0][0].reward, "source": str(stored or run), **figures}
    text = json.dumps(figures, indent=1)
    if to is not None:
        to.write_text(text + "\n", encoding="utf-8")
    print(text if as_json else _table(figures))


def _taskset(
    plan: Plan, name: str | None, stored: Path | None, prompt_key: str | None, truth_key: str | None
) -> Taskset:
    from rft.taskset.open_source import open_taskset

    by_name = tasksets(plan)
    train = plan.explorer.tasksets
    name = one_of(
        train[0].name if name is None and len(train) == 1 else name, list(by_name), "--taskset"
    )
    settings = by_name[name]
    if settings.reward is None:
        raise ConfigError(
            "names no reward; write default_reward_fn_type: NAME_OF_THE_JUDGE",
            key=f"taskset {name}",
        )
    if stored is not None:
        settings = _for_file(settings, stored, prompt_key, truth_key, None, is_verdict=True)
        settings = replace(settings, format=replace(settings.format, reward_fn_key=""))
    return open_taskset(settings)


def _answers(
    run: Path | None, opened: Taskset, response_key: str, label_key: str | None, limit: int | None
) -> list[Any]:
    rows = (
        _of_file(opened, response_key, label_key, limit)
        if run is None
        else _of_run(run, opened, limit)
    )
    if not rows:
        raise ConfigError("there is no answer to judge", key="--input" if run is None else "--run")
    return rows


def _of_file(
    opened: Taskset, response_key: str, label_key: str | None, limit: int | None
) -> list[Any]:
    from rft.extras.judge_lab.judge_eval import number
    from rft.taskset.messages import ABSENT, lookup

    rows: list[Any] = []
    for task in map(opened.task, range(len(opened))):
        answers = lookup(task.row, response_key)
        labels = lookup(task.row, label_key) if label_key else None
        for key, file_rows in ((response_key, answers), (label_key, labels)):
            if file_rows is ABSENT:
                raise ConfigError(
                    f"row {task.index} has no column {key!r}; it has {', '.join(task.row)}",
                    key="--input",
                    given=key,
                )
        answers = [answers] if isinstance(answers, str) else list(answers)
        labels = list(labels) if isinstance(labels, list | tuple) else [labels] * len(answers)
        if len(labels) != len(answers):
            raise ConfigError(
                f"row {task.index} has {len(answers)} answers and {len(labels)} labels",
                key="--label-key",
            )
        rows += [
            (task, str(a), None if v is None else number(v), None, None)
            for a, v in zip(answers, labels, strict=True)
        ]
    return rows[:limit]


def _of_run(run: Path, opened: Taskset, limit: int | None) -> list[Any]:
    """Every answer of the taskset in the run's buffer, with the step of the weights that wrote its
    newest token.
    """
    from rft.buffer.query import open_run

    question = (
        "SELECT id, taskset, task_index, reward, newest_step FROM v_experiences WHERE "
        "status <> 'failed' ORDER BY id"
    )
    with open_run(run) as questions:
        with questions.ask(question) as answer:
            matching = [r for r in answer.rows if r[1] == opened.settings.name]
        tell_changed(questions, opened)
        matching = evenly(matching, limit)
        texts = {
            id: str(x.messages[-1].get("content") or "")
            for id, x in payloads(questions, [r[0] for r in matching])
        }
    return [
        (task_of(opened, index, "--run"), texts[id], None, reward, step)
        for id, _, index, reward, step in matching
    ]


def tell_changed(questions: Questions, opened: Taskset) -> None:
    """Says so where the rows of a taskset are not those that the run has explored."""
    name = opened.settings.name
    explored = [
        v
        for k, v in questions.about.items()
        if k.startswith("taskset:") and k.split(":", 2)[2] == name
    ]
    # earlier versions noted the end alone
    if explored and not opened.fingerprint.endswith(tuple(explored)):
        typer.echo(
            f"note: taskset {name} has changed since the run; each answer is scored by the row "
            f"that has its number now",
            err=True,
        )


def evenly(items: list[T], most: int | None) -> list[T]:
    """At most `most` of them, spread over all; None and 0: all."""
    return (
        items
        if not most or len(items) <= most
        else [items[i * len(items) // most] for i in range(most)]
    )


def payloads(questions: Questions, ids: Sequence[str]) -> Iterator[tuple[str, Experience]]:
    """The stored experiences with these ids, of which a page is read at a time."""
    for i in range(0, len(ids), PAGE):
        yield from questions.payload(ids[i : i + PAGE]).items()


async def _report(
    plan: Plan,
    rows: list[Any],
    repeats: int,
    gold: str | None,
    threshold: float,
    label_threshold: float | None,
) -> dict[str, Any]:
    from rft.extras.judge_lab import judge_eval
    from rft.reward import judge_metrics
    from rft.reward.build_reward import build

    task: Task = rows[0][0]
    answers = [(r[0], r[1]) for r in rows]
    values: list[tuple[float | None, ...]] = [(r[3],) for r in rows]
    labels: list[float | None] = [r[2] for r in rows]
    before = dict(judge_metrics.counts())
    async with auxiliary_models(plan) as models:
        if repeats:
            values = await _scores_of(
                build(str(task.reward), task.reward_args), models, answers, repeats
            )
        if gold is not None:
            labels = [v for (v,) in await _scores_of(build(gold, {}), models, answers, 1)]
    counted: dict[str, float] = {}
    for name, value in judge_metrics.counts().items():
        judge, _, what = name.rpartition("/")
        if value != before.get(name, 0.0) and f"{judge}/latency" != name:
            counted[what] = counted.get(what, 0.0) + value - before.get(name, 0.0)
    labelled = [
        judge_eval.Labelled(len(r[1]), v, label, r[4])
        for r, v, label in zip(rows, values, labels, strict=True)
    ]
    figures = judge_eval.report(
        labelled, threshold=threshold, label_threshold=label_threshold, counted=counted
    )
    return {**figures, "repeats": repeats, "asked": counted}


async def _scores_of(
    reward: Any, models: Any, answers: list[Any], repeats: int
) -> list[tuple[float | None, ...]]:
    from rft.extras.judge_lab.judge_eval import scores
    from rft.reward.base import hook

    try:
        await hook(reward.prepare, models)
        return await scores(reward, answers, repeats=repeats)
    finally:
        await hook(reward.close)


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


def _table(figures: dict[str, Any]) -> str:
    lines = [f"{figures['judge']} on {figures['source']}"]
    lines += [f"{label.ljust(32)}{_number(figures[name]):>10}" for name, label in _SHOWN]
    if calls := figures["asked"]:
        lines.append(", ".join(f"{name} {value:g}" for name, value in calls.items()))
    if drift := figures["drift"]:
        names = list(drift[0])
        cells = [names, *([_number(row[n]) for n in names] for row in drift)]
        lines += [
            "",
            "by train step of the weights",
            *("  ".join(c.rjust(11) for c in row) for row in cells),
        ]
    return "\n".join(lines)


def _number(value: Any) -> str:
    return "-" if value is None else str(value) if isinstance(value, int) else f"{value:.4f}"

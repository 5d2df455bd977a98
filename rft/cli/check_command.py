"""`rft check`: show the effects of a configuration without starting a run.  Exit code 0, or 2 with
errors.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from rft.cli import show
from rft.cli.options import Config, Json, Overrides, PluginDirs
from rft.errors import ConfigError, SetupError
from rft.secrets import learn_environment, redact

if TYPE_CHECKING:
    from rft.config.plan import Plan
    from rft.preflight.check_report import Report


def check(
    overrides: Overrides = None,
    config: Config = ...,  # type: ignore[assignment]
    plugin_dir: PluginDirs = None,
    schema_only: Annotated[
        bool, typer.Option("--schema-only", help="only the file itself: no plugins, data or model")
    ] = False,
    as_json: Json = False,
    show_all: Annotated[
        bool,
        typer.Option("--all", help="also show written values, timeline, memory in parts, prompts"),
    ] = False,
    gpu_memory: Annotated[
        float | None,
        typer.Option(help="GiB of each GPU, to compare with the estimate", show_default=False),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", hidden=True, help="changes nothing: a check never starts anything"
        ),
    ] = False,
) -> None:
    """Say what a configuration will do, and everything that is wrong with it; nothing is started."""
    from rft.config.load import stage_names
    from rft.config.plan import Facts
    from rft.config.save import start_command
    from rft.preflight import check as preflight
    from rft.preflight.check_report import Report

    learn_environment()
    facts = Facts()
    if gpu_memory is not None:
        facts = Facts(gpu_memory=int(gpu_memory * (1 << 30)), gpu_memory_declared=True)
    written = overrides or []
    try:
        stages = stage_names(config, overrides or ()) or ("",)
    except ConfigError as e:
        stages = ()
        invalid = Report(errors=tuple(e.errors), schema_only=schema_only)
    reports = {
        stage: preflight.check(
            config,
            written,
            plugin_dirs=plugin_dir or (),
            schema_only=schema_only,
            facts=facts,
            stage=stage,
        )
        for stage in stages
    } or {"": invalid}
    seats = {
        stage: place_roles(report.plan) if report.ok else ([], "")
        for stage, report in reports.items()
    }
    modes = {report.plan.mode for report in reports.values() if report.plan is not None}
    again = start_command(
        "serve" if modes == {"serve"} else "both", config, overrides or (), plugin_dir or ()
    )
    if as_json:
        print(show.as_json(_json(reports, seats)))
    else:
        for stage, report in reports.items():
            if stage:
                print(f"stage {stage}")
            show_report(report, *seats[stage], config, again, show_all=show_all)
    if not all(report.ok and not seats[stage][1] for stage, report in reports.items()):
        raise typer.Exit(2)


def _json(
    reports: dict[str, Report], seats: dict[str, tuple[list[tuple[str, str]], str]]
) -> dict[str, Any]:
    """Return one report, or those of all stages below "stages" with their messages on top."""
    stages = []
    for name, report in reports.items():
        places, error = seats[name]
        stage = report.to_json()
        stage["placement"] = [{"role": role, "place": place} for role, place in places]
        if error:
            stage["ok"] = False
            stage["errors"].append({"key": "cluster", "given": None, "message": error})
        stages.append({"stage_name": name, **stage} if name else stage)
    if "" in reports:
        return stages[0]
    messages = {
        kind: [x for stage in stages for x in stage[kind]]
        for kind in ("errors", "warnings", "notes", "needs")
    }
    return {"ok": all(s["ok"] for s in stages), **messages, "plan": None, "stages": stages}


def place_roles(plan: Plan | None) -> tuple[list[tuple[str, str]], str]:
    """Place roles on the declared cluster: ([(role, place)], error)."""
    from rft.config.roles import explores
    from rft.launch.cluster import placement

    if plan is None:
        return [], ""
    nodes = [plan.cluster.gpu_per_node] * plan.cluster.node_num
    auxiliary = plan.cluster.auxiliary
    engines = plan.engines if explores(plan.mode) else ()
    learner = plan.learner if plan.trains else None
    try:
        seats = placement(engines, learner, nodes, auxiliary, shared=plan.cluster.shared)
    except SetupError as e:
        return [], str(e)
    rows = [
        (
            f"{s.role} {s.index}",
            f"node {s.node}, "
            + (f"{s.gpus} GPU(s)" if s.gpus else "CPU")
            + (f" of engine {s.host}" if s.host is not None else ""),
        )
        for s in seats
    ]
    return rows, ""


def console() -> Any:
    """Return a console on standard output, 140 columns wide unless it is a terminal."""
    from rich.console import Console

    fixed = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(highlight=False, soft_wrap=True, width=140 if fixed else None)


def show_report(
    report: Report,
    seats: list[tuple[str, str]],
    seat_error: str,
    path: Path,
    command: str,
    *,
    show_all: bool = False,
) -> None:
    out = console()
    errors = [*map(str, report.errors), *([f"cluster: {seat_error}"] if seat_error else [])]
    if report.ok and not errors and report.plan is not None:
        _show_plan(out, report, report.plan, seats, show_all)
    for name, style, texts in (
        ("note", "dim", report.notes),
        ("warning", "yellow", report.warnings),
        ("needs", "yellow", report.needs),
        ("error", "red", errors),
    ):
        for text in texts:
            out.print(f"[{style}]{name}[/]{' ' * (9 - len(name))}{escape(redact(str(text)))}")
    if errors:
        unseen = report.config is None and not report.schema_only
        rest = "; plugins, data and model were not checked yet" if unseen else ""
        out.print(f"[bold red]{path}: {len(errors)} error(s)[/]{rest}")
    else:
        scope = f", {len(report.warnings)} warning(s)" if report.warnings else ""
        if report.schema_only:
            scope = (
                f" (the file and its names; plugins, data and model were not opened): "
                f"{report.outcome}"
            )
        if report.plan is not None and not show_all:
            out.print(
                "--all also shows the values you wrote, the timeline, the memory in parts, and prompts.",
                style="dim",
            )
        out.print(f"[bold green]{path} is fine[/]{scope}.  Start it with: {escape(command)}")


def _show_plan(
    out: Any, report: Report, plan: Plan, seats: list[tuple[str, str]], show_all: bool
) -> None:
    from rft.config.describe import values

    assert report.config is not None
    rows = [("run folder", str(plan.run_dir)), *_summary(report, plan, show_all)]
    if show_all:
        written = [row for row in values(report.config, plan) if row[2] != "default"]
        print_table(
            out, "values that differ from their defaults", ("key", "value", "from"), written
        )
        rows += seats
    print_table(out, "what will happen", ("", ""), rows)
    if not show_all and plan.derived:
        out.print("[italic]derived values[/]")
        for reason, keys in _derived(plan):
            out.print(escape(f"{keys}: {reason}"))
        out.print()
    if report.memory:
        title = "memory and disk at the peak (docs/concepts/memory.md)"
        memory = _memory(report)
        if show_all:
            print_table(out, title, ("role", "estimate", "of which"), memory)
        else:
            print_table(out, title, ("", ""), [row[:2] for row in memory])
    if show_all:
        _show_prompts(out, report)


def _derived(plan: Plan) -> list[tuple[str, str]]:
    """Return a row for each reason, with the keys that follow from it."""
    keys: dict[str, list[str]] = {}
    for d in {d.key: d for d in plan.derived}.values():
        if plan.trainer.alone and d.key.startswith("explorer."):
            continue
        keys.setdefault(d.reason, []).append(f"{d.key} {d.value}")
    return [(reason, ", ".join(texts)) for reason, texts in keys.items()]


def _show_prompts(out: Any, report: Report) -> None:
    for t in report.tasksets:
        for row in t.rows:
            tokens = f"{row.tokens} tokens" if row.tokens is not None else ""
            shown = [f"image of {image}" for image in row.images]
            facts = "".join(f", {fact}" for fact in (tokens, *shown, _gold(row)) if fact)
            out.print(f"[bold]{escape(t.name)}\\[{row.index}][/]{escape(facts)}")
            prompt = row.prompt if len(row.prompt) < 800 else row.prompt[:797] + "..."
            out.print(f"  {escape(prompt)!s}", style="cyan")
        if t.workflows:
            added = escape(", ".join(t.workflows))
            out.print(
                f"  {added} may add to it, or score its runs without the reward; see: rft debug "
                f"workflow --config FILE",
                style="dim",
            )


def _gold(row: Any) -> str:
    if row.truth is None:
        return ""
    score = "" if row.gold_reward is None else f", reward {row.gold_reward:g}"
    return f"gold answer {row.truth!r}{score}"


def _memory(report: Report) -> list[tuple[str, str, str]]:
    """Return a row for each group of roles with equal estimates."""
    rows: dict[tuple[str, str], list[str]] = {}
    where = {"cpu": "", "cuda": " of a GPU", "disk": " of disk"}
    for r in report.memory:
        terms = ", ".join(f"{t.name} {t.nbytes / (1 << 20):,.0f} MiB" for t in r.terms)
        size = (
            f"{r.nbytes / (1 << 30):.2f} GiB"
            if r.nbytes >= 1 << 27
            else f"{r.nbytes / (1 << 20):.0f} MiB"
        )
        rows.setdefault((size + where[r.device], terms), []).append(r.role)
    return [
        (roles[0] if len(roles) == 1 else f"{roles[0]} ... {roles[-1]}, each", size, terms)
        for (size, terms), roles in rows.items()
    ]


def _summary(report: Report, plan: Plan, show_all: bool) -> list[tuple[str, str]]:
    from rft.algorithm.needs import needs
    from rft.preflight.check_report import step

    s = step(plan, report.tasksets)
    learner = plan.learner
    parts = learner.algorithm
    advantages = "" if plan.trainer.alone else f"advantages {parts.advantage_fn}, "
    end = [
        (
            "trainer",
            f"{counted(learner.world_size, 'rank')} on {learner.device}, {learner.dtype}, lr "
            f"{learner.optim.lr:g}",
        ),
        (
            "loss",
            f"{advantages}policy loss {parts.policy_loss_fn}, KL {parts.kl_loss_fn}, entropy "
            + (parts.entropy_loss_fn if needs(parts).entropy else "none")
            + ("" if needs(parts).pairs else f", {parts.loss_agg_mode}"),
        ),
        *_model_and_rows(report),
    ]
    if plan.trainer.alone:
        return _offline(s, plan) + end
    engine = plan.engines[0]
    unknown = (
        "until it is stopped" if plan.serve is not None else "known once the tasksets are opened"
    )
    steps = counted(s["train_steps"], "train step") if s["train_steps"] is not None else unknown
    if s["epochs"] is not None:
        steps += f", {_epochs(s['epochs'])} in {counted(s['explore_steps'], 'explore step')}"
    answers = (
        f"{counted(s['tasks'], 'task')}, {counted(s['experiences'], 'answer')}, at most "
        f"{s['max_generated_tokens']:,} generated tokens"
    )
    if s["prompt_tokens"] is not None:
        answers += f", plus about {_rounded(s['prompt_tokens'])} prompt tokens"
    picture = ["if exploring takes as long as training:", *s["timeline"]]
    return [
        ("steps", steps),
        ("each step", answers),
        ("weights", s["sync"]),
        *([("", "\n".join(picture))] if show_all else []),
        ("staleness", _staleness(plan.staleness_bound)),
        (
            "engines",
            f"{len(plan.engines)} x {engine.engine_type} on {engine.device}, {engine.dtype}, "
            f"context of {engine.max_model_len} tokens",
        ),
        *end,
    ]


def _offline(s: dict[str, Any], plan: Plan) -> list[tuple[str, str]]:
    epochs = f", {_epochs(s['epochs'])}" if s["epochs"] is not None else ""
    tokens = (
        f", about {_rounded(s['tokens'])} tokens, {_rounded(s['trained_tokens'])} of them trained"
        if s["tokens"] is not None
        else ""
    )
    steps = (
        counted(s["train_steps"], "train step")
        if s["train_steps"] is not None
        else "known once the data set is opened"
    )
    rows = (
        f"{s['rows']} {s['kind']}{tokens}"
        if s["rows"]
        else f"the rows that it used in {plan.trainer.replay_run}"
    )
    return [("steps", steps + epochs), ("each step", rows)]


DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}  # of safetensors
LAYOUTS = {
    "shared": "common prompts are computed once",
    "packed": "rows are packed one after the other",
    "padded": "rows are padded to the longest",
}


def _model_and_rows(report: Report) -> list[tuple[str, str]]:
    rows = []
    model = report.model
    if model:
        dtype = DTYPES.get(model["stored"], model["stored"])
        size = f"{_short(model['parameters'])} parameters, stored in {dtype}"
        rows.append(("model", f"{model['type']}, {size}"))
    if "row_layout" in model:
        layout = (
            f"{LAYOUTS[model['row_layout']]} (compared with the transformers library at the start)"
        )
        rows.append(("row layout", layout))
    for t in report.tasksets:
        sample = (
            f"; first row: {_gold(t.rows[0])}" if t.rows and t.rows[0].truth is not None else ""
        )
        kind = "evaluation" if t.is_eval else "training"
        rows.append((f"{kind} set", f"{t.name}: {counted(t.num_rows, 'row')}{sample}"))
    return rows


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _epochs(number: float) -> str:
    return f"{number:g} epoch{'' if number == 1 else 's'}"


def _rounded(number: int) -> str:
    """Return two significant digits, 1,408 as 1,400."""
    return f"{int(float(f'{number:.1e}')):,}"


def _short(number: int) -> str:
    """Return 134,515,008 as 135M."""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)


def _staleness(bound: int | None) -> str:
    if bound is None:
        return "no bound (synchronizer.max_staleness sets one)"
    return "none: on-policy" if bound == 0 else f"at most {counted(bound, 'train step')}"


def print_table(out: Any, title: str, head: tuple[str, ...], rows: list[Any]) -> None:
    from rich.table import Table

    table = Table(
        title=title, title_justify="left", show_header=any(head), box=None, pad_edge=False
    )
    for name in head:
        table.add_column(name, overflow="fold", no_wrap=table.columns == [])
    for row in rows:
        table.add_row(*[escape(str(c)) for c in row])
    out.print(table)
    out.print()

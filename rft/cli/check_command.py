"""`rft check`: what a configuration will do, without starting anything.  Exit code 0, or 2 with
every error.
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
    from rft.config.check_report import Report
    from rft.config.plan import Plan


def check(
    overrides: Overrides = None,
    config: Config = ...,  # type: ignore[assignment]
    plugin_dir: PluginDirs = None,
    schema_only: Annotated[
        bool, typer.Option("--schema-only", help="only the file itself: no plugins, data or model")
    ] = False,
    as_json: Json = False,
    gpu_memory: Annotated[
        float | None,
        typer.Option(help="GiB of each GPU, to judge the estimate", show_default=False),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", hidden=True, help="changes nothing: a check never starts anything"
        ),
    ] = False,
) -> None:
    """Say what a configuration will do, and everything that is wrong with it; nothing is started."""
    from rft.config import verify
    from rft.config.check_report import Report
    from rft.config.load import stage_names
    from rft.config.plan import Facts
    from rft.config.save import start_command

    learn_environment()
    facts = Facts(gpu_memory=None if gpu_memory is None else int(gpu_memory * (1 << 30)))
    written = overrides or []
    try:
        stages = stage_names(config, overrides or ()) or ("",)
    except ConfigError as e:
        stages = ()
        wrong = Report(errors=tuple(e.errors), schema_only=schema_only)
    found = {
        stage: verify.check(
            config,
            written,
            plugin_dirs=plugin_dir or (),
            schema_only=schema_only,
            facts=facts,
            stage=stage,
        )
        for stage in stages
    } or {"": wrong}
    seats = {
        stage: place_roles(report.plan) if report.ok else ([], "")
        for stage, report in found.items()
    }
    modes = {report.plan.mode for report in found.values() if report.plan is not None}
    again = start_command(
        "serve" if modes == {"serve"} else "both", config, overrides or (), plugin_dir or ()
    )
    if as_json:
        print(show.as_json(_json(found, seats)))
    else:
        for stage, report in found.items():
            if stage:
                print(f"stage {stage}")
            show_report(report, *seats[stage], config, again)
    if not all(report.ok and not seats[stage][1] for stage, report in found.items()):
        raise typer.Exit(2)


def _json(
    found: dict[str, Report], seats: dict[str, tuple[list[tuple[str, str]], str]]
) -> dict[str, Any]:
    """One report, or those of all stages below "stages" with what is wrong in any of them on top."""
    whole = []
    for stage, report in found.items():
        places, error = seats[stage]
        one = {
            **report.to_json(),
            "placement": [{"role": role, "place": place} for role, place in places],
        }
        if error:
            one["ok"] = False
            one["errors"].append({"key": "cluster", "given": None, "message": error})
        whole.append({"stage_name": stage, **one} if stage else one)
    if "" in found:
        return whole[0]
    both = {
        name: [x for one in whole for x in one[name]]
        for name in ("errors", "warnings", "notes", "needs")
    }
    return {"ok": all(one["ok"] for one in whole), **both, "plan": None, "stages": whole}


def place_roles(plan: Plan | None) -> tuple[list[tuple[str, str]], str]:
    """Who sits where on the declared cluster: (role, place)."""
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
    """Writes to standard output, 140 columns wide where that is no terminal."""
    from rich.console import Console

    fixed = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(highlight=False, soft_wrap=True, width=140 if fixed else None)


def show_report(
    report: Report, seats: list[tuple[str, str]], seat_error: str, path: Path, command: str
) -> None:
    out = console()
    errors = [*map(str, report.errors), *([f"cluster: {seat_error}"] if seat_error else [])]
    if report.ok and not errors and report.plan is not None:
        out.print(f"[bold green]{path} is fine[/], {len(report.warnings)} warning(s); in detail:\n")
        _show_plan(out, report, report.plan, seats)
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
        rest = "; plugins, data and model are looked at when the keys are right" if unseen else ""
        out.print(f"[bold red]{path}: {len(errors)} error(s)[/]{rest}")
    else:
        stage = ""
        if report.schema_only:
            stage = (
                f" (the file and its names; plugins, data and model were not opened): "
                f"{report.outcome}"
            )
        out.print(f"[bold green]{path} is fine[/]{stage}.  Start it with: {escape(command)}")


def _show_plan(out: Any, report: Report, plan: Plan, seats: list[tuple[str, str]]) -> None:
    from rft.config.describe import values

    assert report.config is not None
    print_table(
        out,
        "values that are not the default",
        ("key", "value", "from"),
        [r for r in values(report.config, plan) if r[2] != "default"],
    )
    rows = [("run folder", str(plan.run_dir)), *[(k, v) for k, v in _summary(report, plan)], *seats]
    print_table(out, "what will happen", ("", ""), rows)
    if report.memory:
        print_table(
            out,
            "memory and disk at the peak (docs/concepts/memory.md)",
            ("role", "estimate", "of which"),
            _memory(report),
        )
    for t in report.tasksets:
        for row in t.rows:
            gold = f", gold answer {row.truth!r}" + (
                f" scores {row.gold_reward:g}" if row.gold_reward is not None else ""
            )
            count = f", {row.tokens} tokens" if row.tokens is not None else ""
            out.print(
                f"[bold]{escape(t.name)}\\[{row.index}][/] of "
                f"{t.num_rows}{count}{escape(gold) if row.truth is not None else ''}"
            )
            out.print(
                f"  {escape(row.prompt if len(row.prompt) < 800 else row.prompt[:797] + '...')!s}",
                style="cyan",
            )
        if t.workflows:
            added = escape(", ".join(t.workflows))
            out.print(
                f"  {added} may add to it, or score its runs without the reward; see: rft debug "
                f"workflow --config FILE",
                style="dim",
            )


def _memory(report: Report) -> list[tuple[str, str, str]]:
    """A row for each kind of role; roles that are alike stand together."""
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


def _summary(report: Report, plan: Plan) -> list[tuple[str, str]]:
    from rft.config.check_report import step

    s = step(plan, report.tasksets)
    if plan.trainer.alone:
        return _offline(s, plan) + _model_and_rows(report)
    engine = plan.engines[0]
    tokens = (
        f"at most {s['max_generated_tokens']:,} tokens generated by one model call of each run"
        + (
            f" after about {s['prompt_tokens']:,} tokens of prompts"
            if s["prompt_tokens"] is not None
            else ""
        )
    )
    unknown = (
        "until it is stopped" if plan.serve is not None else "known once the tasksets are opened"
    )
    steps = f"{s['train_steps']} train steps" if s["train_steps"] is not None else unknown
    epochs = (
        f", {s['epochs']:g} epochs in {s['explore_steps']} explore steps"
        if s["epochs"] is not None
        else ""
    )
    found = [
        ("steps", steps + epochs),
        ("each step", f"{s['tasks']} tasks, {s['experiences']} experiences, {tokens}"),
        ("weights", s["sync"]),
        (
            "",
            "\n".join(
                ["if an explore step takes as long as the train steps it feeds:", *s["timeline"]]
            ),
        ),
        ("staleness", _staleness(plan.staleness_bound)),
        (
            "engines",
            f"{len(plan.engines)} x {engine.engine_type} on {engine.device}, {engine.dtype}, "
            f"{engine.max_model_len} tokens",
        ),
        (
            "trainer",
            f"{plan.learner.world_size} rank(s) on {plan.learner.device}, {plan.learner.dtype}, lr "
            f"{plan.learner.optim.lr:g}",
        ),
        (
            "loss",
            f"{plan.learner.algorithm.advantage_fn} advantages, "
            f"{plan.learner.algorithm.policy_loss_fn} loss, KL "
            f"{plan.learner.algorithm.kl_loss_fn}, {plan.learner.algorithm.loss_agg_mode}",
        ),
    ]
    return found + _model_and_rows(report)


def _offline(s: dict[str, Any], plan: Plan) -> list[tuple[str, str]]:
    learner = plan.learner
    epochs = f", {s['epochs']:g} epochs" if s["epochs"] is not None else ""
    tokens = (
        f", about {s['tokens']:,} tokens, {s['trained_tokens']:,} of them trained"
        if s["tokens"] is not None
        else ""
    )
    steps = (
        f"{s['train_steps']} train steps"
        if s["train_steps"] is not None
        else "known once the data set is opened"
    )
    return [
        ("steps", steps + epochs),
        (
            "each step",
            f"{s['rows']} {s['kind']}{tokens}"
            if s["rows"]
            else f"the rows that it used in {plan.trainer.replay_run}",
        ),
        (
            "trainer",
            f"{learner.world_size} rank(s) on {learner.device}, {learner.dtype}, lr "
            f"{learner.optim.lr:g}",
        ),
        (
            "loss",
            f"{learner.algorithm.policy_loss_fn}, KL {learner.algorithm.kl_loss_fn}, "
            f"{learner.algorithm.loss_agg_mode}",
        ),
    ]


def _model_and_rows(report: Report) -> list[tuple[str, str]]:
    found = []
    model = report.model
    if model:
        found.append(
            (
                "model",
                f"{model['type']}, {model['parameters']:,} parameters stored as {model['stored']}",
            )
        )
    if "row_layout" in model:
        found.append(
            (
                "rows",
                f"{model['row_layout']}: {model['row_layout_why']}; compared with plain rows when "
                f"the model is loaded",
            )
        )
    found += [
        (f"{'evaluation' if t.is_eval else 'training'} set", f"{t.name}: {t.num_rows:,} rows")
        for t in report.tasksets
    ]
    return found


def _staleness(bound: int | None) -> str:
    if bound is None:
        return "no bound (synchronizer.max_staleness sets one)"
    return f"at most {bound} train steps" + (" (on-policy)" if bound == 0 else "")


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


if __name__ == "__main__":
    typer.run(check)

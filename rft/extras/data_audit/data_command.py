"""`rft data`: what the tasks of a configuration are like, before anything is trained on them."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from rft.cli.options import Config, Json, Overrides, PluginDirs, planned, tasksets
from rft.errors import ConfigError, raise_all
from rft.secrets import learn_environment, safe

if TYPE_CHECKING:
    from rft.config.plan import Plan
    from rft.extras.data_audit.task_audit import AuditFinding, TasksetAudit
    from rft.taskset.base import Taskset

data = typer.Typer(no_args_is_help=True, callback=lambda: None)


@data.command("audit")
def audit(
    config: Config,
    overrides: Overrides = None,
    rows: Annotated[
        int, typer.Option(min=0, help="rows of each taskset that are read, evenly spread; 0: all")
    ] = 0,
    stage: Annotated[
        str, typer.Option(help="of a configuration with stages", show_default=False)
    ] = "",
    plugin_dir: PluginDirs = None,
    as_json: Json = False,
) -> None:
    """Read every row: gold answers, duplicates, lengths, templates, kinds of tasks.  Exit code 4 if
    something is wrong.
    """
    from rft.cli.show import progress
    from rft.extras.data_audit import task_audit as data_audit
    from rft.preflight.second_stage import policy_files

    learn_environment()
    plan = planned(config, overrides, plugin_dir, stage)
    model = policy_files(plan)
    opened = _opened(plan)
    audits, between = data_audit.audit(plan, opened, model, most=rows, progress=progress())
    wrong = any(f.error for f in (*between, *(f for t in audits for f in t.findings)))
    if as_json:
        print(
            json.dumps(
                {
                    "ok": not wrong,
                    "tasksets": [asdict(t) for t in audits],
                    "between": [asdict(f) for f in between],
                },
                indent=1,
            )
        )
    else:
        _show(audits, between)
        print("something is wrong" if wrong else "nothing is wrong")
    if wrong:
        raise typer.Exit(4)


def _opened(plan: Plan) -> list[Taskset]:
    from rft.config.context import Problems
    from rft.taskset.task_pipeline import opened

    if not (settings_list := tasksets(plan).values()):
        raise ConfigError("has no taskset", key="buffer.explorer_input")
    tasksets_opened = []
    problems = Problems()
    for settings in settings_list:
        with problems.collect_errors():
            tasksets_opened.append(opened(settings, plan.task_pipeline))
    raise_all(problems.errors)
    return tasksets_opened


def _show(audits: list[TasksetAudit], between: list[AuditFinding]) -> None:
    from rft.cli.show import table

    heads = (
        "taskset",
        "for",
        "rows",
        "read",
        "gold answers right",
        "duplicates",
        "nearly",
        "prompt tokens: median, 95 %, most",
        "too long",
    )
    cells = [
        (
            t.name,
            "evaluation" if t.is_eval else "training",
            str(t.rows),
            str(t.read),
            f"{t.gold_full} of {t.gold_checked}" if t.gold_checked else "none checked",
            str(t.duplicates),
            str(t.near_duplicates),
            ", ".join(map(str, t.tokens)) if t.tokens else "not counted",
            str(t.too_long),
        )
        for t in audits
    ]
    print("\n".join(table(heads, cells, (False, False, True, True, True, True, True, True, True))))
    for t in audits:
        print(f"\n{t.name}")
        for kind, count in t.kinds:
            print(f"  {count:6} x {safe(kind)}")
        if t.example:
            print("  a prompt, after the chat template:")
            print(
                "\n".join(f"    {line}" for line in safe(t.example[:800], lines=True).split("\n"))
            )
        _tell(t.findings)
    if between:
        print("\nbetween tasksets")
        _tell(between)
    print()


def _tell(findings: list[AuditFinding]) -> None:
    for f in findings:
        print(
            f"  {'WRONG' if f.error else 'note '}  {safe(f.what)}"
            + (f": {', '.join(map(safe, f.rows))}" if f.rows else "")
        )

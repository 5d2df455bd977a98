"""`rft report`: a run as one HTML file; `rft compare`: two runs and more beside each other.  From
their files alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rft.cli.options import Json, RunDir
from rft.errors import ConfigError
from rft.files.disk import write_whole

if TYPE_CHECKING:
    from rft.api.stored_run import StoredRun
    from rft.extras.view.report_facts import RunFacts

KEYS = (  # of `rft compare`, where a run has them
    "rollout/reward/mean",
    "experience/response_length/mean",
    "actor/loss",
    "actor/entropy",
    "actor/kl_loss",
    "mismatch/abs_diff_mean",
    "experience/staleness/mean",
    "perf/step_s",
)


def report(
    run_dir: RunDir,
    out: Annotated[
        Path, typer.Option("-o", "--output", help="the HTML file; one that exists is replaced")
    ] = Path("report.html"),
) -> None:
    """Write one HTML file about a run: subject, curves, evaluations, answers, cost, alarms,
    settings, versions.
    """
    from rft.api.stored_run import open_run

    missing = write_report(open_run(run_dir), out)
    for line in missing:
        print(f"without   {line}")
    print(f"report    {out}  {out.stat().st_size / 1e3:.0f} kB, to be opened with any browser")


def write_report(run: StoredRun, out: Path) -> list[str]:
    """Write the report to `out` and return what it lacks.  Raises ConfigError."""
    from rft.extras.view.report_facts import collect
    from rft.extras.view.report_page import page

    if out.suffix not in (".html", ".htm"):
        raise ConfigError("must end in .html", key="-o", given=str(out))
    facts = collect(run)
    text = page(facts)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out, text.encode("utf-8"), mode=0o644)
    return facts.missing


def compare(
    runs: Annotated[
        list[Path], typer.Argument(help="folders of two runs or more", show_default=False)
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            help="also an SVG picture of their rewards and evaluations",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show runs beside each other: evaluations with intervals, newest numbers, cost, and every key
    that differs.
    """
    from rft.api.stored_run import open_run
    from rft.cli import show
    from rft.extras.view import report_comparison as comparison

    if out is not None and out.suffix != ".svg":
        raise ConfigError("must end in .svg", key="-o", given=str(out))
    facts = _facts([open_run(r) for r in runs])
    names = comparison.short_names(facts)
    comparison_table = comparison.compared(facts, names, KEYS)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(out, comparison.picture(facts, names).encode(), mode=0o644)
    if as_json:
        print(show.as_json(comparison_table))
        return
    for title, rows in comparison_table.items():
        if rows:
            cells = [[str(name), *(_cell(row.get(n)) for n in names)] for name, row in rows.items()]
            print("\n".join(show.table((title, *names), cells)) + "\n")
    if out is not None:
        print(f"picture  {out}")


def compared(runs: Sequence[StoredRun]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the tables by title: name, then run, to value.  Raises ConfigError."""
    from rft.extras.view import report_comparison as comparison

    facts = _facts(runs)
    return comparison.compared(facts, comparison.short_names(facts), KEYS)


def _facts(runs: Sequence[StoredRun]) -> list[RunFacts]:
    from rft.extras.view.report_facts import collect

    if len(runs) < 2:
        given = " ".join(str(run.run_dir) for run in runs)
        raise ConfigError("give the folders of two runs or more", key="RUNS", given=given)
    return [collect(run, answers=False, keys=KEYS) for run in runs]


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if math.isfinite(value) else str(value)
    return "" if value is None else str(value)

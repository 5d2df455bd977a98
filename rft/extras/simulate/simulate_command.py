"""`rft simulate`: step times, waits and staleness of a configuration on another cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rft.cli.options import Config, Json, Overrides, PluginDirs
from rft.errors import ConfigError


def simulate(
    cluster: Annotated[Path, typer.Argument(help="the cluster's file", show_default=False)],
    overrides: Overrides = None,
    config: Config = ...,  # type: ignore[assignment]
    plugin_dir: PluginDirs = None,
    as_json: Json = False,
) -> None:
    """Forecast step times, waits and staleness on a cluster, and the fastest split there."""
    from rft.cli import show
    from rft.cli.check_command import console, place_roles, print_table, show_report
    from rft.extras.simulate.cluster_file import load
    from rft.extras.simulate.forecast import simulated
    from rft.preflight import check as preflight

    machines = load(cluster)
    report = preflight.check(
        config,
        [*(overrides or ()), *machines.overrides()],
        plugin_dirs=plugin_dir or (),
        schema_only=True,
        facts=machines.facts(),
    )
    if report.plan is None or not report.ok:
        if as_json:
            print(show.as_json(report.to_json()))
        else:
            show_report(report, [], "", config, "")
        raise typer.Exit(ConfigError.exit_code)
    _, error = place_roles(report.plan)
    if error:
        raise ConfigError(error, key="cluster")
    forecast = simulated(machines, report.plan, cluster.parent)
    if as_json:
        print(show.as_json({"warnings": report.warnings, "simulation": forecast.to_json()}))
        return
    out = console()
    for text in report.warnings:
        out.print(f"[yellow]warning[/]  {text}", markup=True)
    print_table(out, "simulated (docs/concepts/simulation.md)", ("", ""), forecast.rows())
    heads = (
        "rows at most",
        "engines",
        "ranks",
        "synchronizer",
        "step s",
        "explorer waits",
        "trainer waits",
    )
    print_table(out, "the fastest split, interval and style there", heads, forecast.choices())

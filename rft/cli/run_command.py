"""`rft run`: train."""

from __future__ import annotations

from typing import Annotated

import typer

from rft.cli.options import Config, Overrides, PluginDirs


def run(
    config: Config,
    overrides: Overrides = None,
    plugin_dir: PluginDirs = None,
    name: Annotated[
        str | None, typer.Option(help="name of the run (same as name=...)", show_default=False)
    ] = None,
    seed: Annotated[int | None, typer.Option(help="same as seed=...", show_default=False)] = None,
    in_process: Annotated[
        bool,
        typer.Option("--in-process", help="one process, no Ray: transformers engine, one rank"),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="start nothing: the same as rft check")
    ] = False,
) -> None:
    """Train: explore, judge, learn, synchronise, until the configured number of steps; resumes
    where it was stopped.
    """
    changes = [
        *(overrides or []),
        *([f"name={name}"] if name else []),
        *([f"seed={seed}"] if seed is not None else []),
    ]
    if dry_run:
        from rft.cli.check_command import check

        check(changes, config, plugin_dir)
        return
    from rft.worker.teller import Teller
    from rft.worker.waiting import works

    with Teller() as teller:
        with works("loading rft"):
            from rft.launch.execute import execute
            from rft.launch.progress import summary

        outcome = execute(
            config, changes, plugin_dirs=plugin_dir or (), in_process=in_process, teller=teller
        )
    summary(outcome.run_dir, outcome.version, outcome.seconds, outcome.resumed_from)

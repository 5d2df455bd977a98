"""`rft ls`: the runs below a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rft.cli.options import JsonArray
from rft.errors import ConfigError


def ls(
    folder: Annotated[Path, typer.Argument(help="folder of runs")] = Path(),
    as_json: JsonArray = False,
) -> None:
    """List the runs below a folder: phase, steps, newest reward and evaluation; the one that
    changed last first.
    """
    from rft.cli import show
    from rft.extras.view.found_runs import FoundRuns

    if not folder.is_dir():
        raise ConfigError("is no folder", key="FOLDER", given=str(folder))
    rows: list[dict[str, Any]] = [
        {
            "run": str(folder / run.path.relative_to(folder.resolve())),
            "phase": run.phase,
            "step": run.step,
            "reward": run.reward,
            "eval": run.evals[0][1] if run.evals else None,
        }
        for run in FoundRuns(folder).lines()
    ]
    if as_json:
        print(show.as_json(rows))
        return
    shown = [
        [
            str(r["run"]),
            str(r["phase"]),
            *("" if (v := r[n]) is None else f"{v:.4g}" for n in ("step", "reward", "eval")),
        ]
        for r in rows
    ]
    print(
        "\n".join(
            show.table(
                ("run", "phase", "step", "reward", "evaluation"),
                shown,
                (False, False, True, True, True),
            )
        )
    )

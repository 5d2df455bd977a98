"""`rft timeline`: a picture of who worked and who waited in a run, from its files alone; the run may still be going on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def timeline(
    run_dir: Annotated[Path, typer.Argument(help="folder of the run", show_default=False)],
    out: Annotated[
        Path | None, typer.Option(help="the SVG file; RUN_DIR/timeline.svg where none is named", show_default=False)
    ] = None,
    last: Annotated[int, typer.Option(help="train steps at the end of the run; 0 draws all of it", min=0)] = 30,
) -> None:
    """Draw explore batches, train steps, weight syncs by phase and evaluations over time, and say who was idle."""
    from rft.errors import ConfigError
    from rft.monitor.timeline import picture

    if not (run_dir / "metrics.jsonl").is_file():
        raise ConfigError(f"{run_dir} is not the folder of a run: it has no metrics.jsonl", key="RUN_DIR", given=str(run_dir))
    path = out or run_dir / "timeline.svg"
    for name, share in picture(run_dir, path, last=last or None).items():
        print(f"{name:16}{share:6.1%}")
    print(f"picture         {path}")

"""What a notebook does with runs: start one, look at its metrics, load what it played.  Thin, over what the command line uses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datasets import Dataset
    from pandas import DataFrame  # type: ignore[import-untyped]

    from rft.launch.drive import Outcome


def run(config: str | Path, *overrides: str, plugin_dirs: Sequence[str | Path] = (), in_process: bool = False) -> Outcome:
    """Trains as `rft run --config CONFIG key=value ...` does.  Raises RftError."""
    from rft.launch.execute import execute

    return execute(Path(config), list(overrides), plugin_dirs=[str(d) for d in plugin_dirs], in_process=in_process)


def metrics(run_dir: str | Path) -> DataFrame:
    """metrics.jsonl of a run, one row for each record: role, step, time, and a column for each metric."""
    from pandas import DataFrame  # type: ignore[import-untyped]

    from rft.monitor.read import read

    records = read(Path(run_dir) / "metrics.jsonl")
    return DataFrame([{"role": r.role, "step": r.step, "time": r.time, **r.values} for r in records])


def rollouts(run_dir: str | Path, where: str = "") -> Dataset:
    """What a run has played, one row for each experience: the columns of v_experiences that fulfil the SQL condition `where`."""
    from datasets import Dataset

    from rft.buffer.experience_export import pages
    from rft.buffer.query import open_run

    def rows() -> Iterator[dict[str, Any]]:
        with open_run(Path(run_dir)) as questions:
            for page in pages(questions, where):
                yield from page

    return Dataset.from_list(list(rows()))

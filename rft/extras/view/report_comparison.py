"""Runs beside each other: what each measured, what it cost, and which keys differ.

Depends on `RunFacts` of each run.  Invariant: a row is there where any of the runs has it, and a
run without it has no cell.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rft.config.save import differing
from rft.extras.view.report_facts import RunFacts, first_and_last, interval
from rft.monitor.curves import Points, main_curves, main_values, sparkline, svg

Rows = dict[str, dict[str, Any]]  # name → run → value


def short_names(runs: Sequence[RunFacts]) -> list[str]:
    """The last parts of the runs' folders, as many as tell them apart."""
    paths = [Path(f.folder).resolve().parts for f in runs]
    longest = max(map(len, paths))
    for n in range(1, longest):
        names = ["/".join(p[-n:]) for p in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{i}: {'/'.join(p[-1:])}" for i, p in enumerate(paths, 1)]


def compared(
    runs: Sequence[RunFacts], names: Sequence[str], keys: Sequence[str]
) -> dict[str, Rows]:
    """Tables by title: evaluations, newest numbers of `keys`, curves, cost, alarms, configuration
    and versions that differ.
    """
    run = dict(zip(names, runs, strict=True))
    return {
        "evaluation": _by(
            {
                n: {p.name: _change_text(p, q) for p, q in first_and_last(f.evals)}
                for n, f in run.items()
            }
        ),
        "difference": _by(differences(run)),
        "newest": _by(
            {
                n: {k: points[-1][1] for k in keys if (points := f.series.points(k))}
                for n, f in run.items()
            }
        ),
        "curve": _by(
            {
                n: {k: sparkline(v, 24) for k, v in main_values(f.series).items()}
                for n, f in run.items()
            }
        ),
        "cost": _by({n: {"steps": f.steps, **dict(f.cost)} for n, f in run.items()}),
        "alarm": _by(
            {
                n: {a.name: f"since step {a.step}" for a in reversed(f.alarms)}
                for n, f in run.items()
            }
        ),
        "configuration": _apart({n: dict(f.changed) for n, f in run.items()}),
        "version": _apart({n: dict(f.versions) for n, f in run.items()}),
    }


def differences(run: dict[str, RunFacts]) -> dict[str, dict[str, str]]:
    """Of each later run's last evaluations to the first run's: the mean over the tasks that the
    samples of both have, with its 95 % interval.
    """
    first, *others = [(n, _task_means(f)) for n, f in run.items()]
    out: dict[str, dict[str, str]] = {first[0]: {}}
    for n, means in others:
        out[n] = {
            name: _paired_text(
                [tasks[t] - first[1][name][t] for t in tasks.keys() & first[1][name]]
            )
            for name, tasks in means.items()
            if name in first[1]
        }
    return out


def _task_means(facts: RunFacts) -> dict[str, dict[int, float]]:
    """Mean reward of each task in the samples of each last evaluation."""
    out: dict[str, dict[int, float]] = {}
    for _, last in first_and_last(facts.evals):
        folder = Path(facts.folder) / "samples"
        name = re.sub(r"[^A-Za-z0-9_.@-]", "_", last.name.rpartition("/")[0])
        file = folder / f"{name}_{last.step}.jsonl"
        rewards: dict[int, list[float]] = {}
        for row in map(json.loads, file.read_text().splitlines() if file.is_file() else ()):
            if row["reward"] is not None:
                rewards.setdefault(row["task"], []).append(row["reward"])
        if rewards:
            out[last.name] = {task: fmean(values) for task, values in rewards.items()}
    return out


def _paired_text(differences: Sequence[float]) -> str:
    n = len(differences)
    if n < 2:
        return f"{n} tasks in both"
    mean = fmean(differences)
    low, high = interval(mean, stdev(differences) / math.sqrt(n), None)
    within = "" if low is None else f" ({low:+.3f} to {high:+.3f})"
    return f"{mean:+.3f}{within}, {n} tasks"


def picture(runs: Sequence[RunFacts], names: Sequence[str]) -> str:
    """The main curves of all runs on one pair of axes."""
    lines: dict[str, Points] = {
        f"{run}: {name}": points
        for run, f in zip(names, runs, strict=True)
        for name, points in main_curves(f.series).items()
    }
    return svg(lines, title="by step", width=900, height=420)


def _change_text(first: Any, last: Any) -> str:
    within = "" if last.low is None else f" ({last.low:.3f} to {last.high:.3f})"
    return f"{first.mean:.3f} → {last.mean:.3f}{within}, step {last.step}"


def _apart(columns: dict[str, dict[str, str]]) -> Rows:
    return {
        key: dict(zip(columns, row, strict=True))
        for key, row in differing(list(columns.values())).items()
    }


def _by(columns: dict[str, dict[str, Any]]) -> Rows:
    """Rows from what each run has."""
    keys = dict.fromkeys(k for values in columns.values() for k in values)
    return {k: {run: values[k] for run, values in columns.items() if k in values} for k in keys}

"""Runs below a folder: where they are, in one line each, and what their configurations differ in.

Depends on files of runs.  Invariant: what an address names is one of the runs found; nothing else
is opened.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rft.errors import ConfigError
from rft.extras.view.metric_curves import Curves, spark
from rft.launch.rundir import STATE, RunDir
from rft.monitor.curves import REWARD, is_evaluation

_DEPTH = 5
_MOST_RUNS = 2000
_INSIDE = {
    "checkpoints",
    "buffer",
    "logs",
    "sync",
    "samples",
    "profile",
    "tensorboard",
    "wandb",
    "mlflow",
    "swanlab",
}


@dataclass(frozen=True)
class RunLine:
    """One run in the table of runs."""

    key: str  # in addresses
    name: str  # its path below the folder
    path: Path
    phase: str
    step: int | None
    reward: float | None
    evals: tuple[tuple[str, float], ...]  # name, newest value
    cost_usd: float | None
    seconds: float | None  # that its processes worked
    changed: float  # seconds since the epoch
    spark: str  # path of its small reward curve
    read: bool = True  # False: its metrics are not read yet


class FoundRuns:
    """The runs below `folder`, or `folder` alone if it is one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.single = _is_run(self.folder) and not (self.folder / "stages.json").exists()
        self.paths: dict[str, Path] = {}
        self._curves: dict[Path, Curves] = {}
        self._lines: dict[Path, tuple[tuple[int, ...], RunLine]] = {}

    def look(self) -> None:
        """Find them anew.  Raises ConfigError where there is none."""
        paths = [self.folder] if self.single else list(_below(self.folder, _DEPTH))[:_MOST_RUNS]
        if not paths:
            raise ConfigError(
                f"there is no run below {self.folder}; give the folder of a run, or one above "
                f"several, such as checkpoint_root_dir",
                key="RUN",
                given=str(self.folder),
            )
        self.paths = {}
        for path in sorted(paths):
            name = "~".join(path.relative_to(self.folder).parts) or path.name or "run"
            # a name that is no text cannot be part of an address
            key = name.encode("utf-8", "replace").decode()
            while key in self.paths:
                key += "~"
            self.paths[key] = path

    def path(self, key: str) -> Path | None:
        if key not in self.paths:
            self.look()
        return self.paths.get(key)

    def lines(self, patience_s: float = math.inf) -> list[RunLine]:
        """One for each run, the one that changed last first; read anew where files have changed.

        After `patience_s` the others are given unread, or as they were read before; the next call
        goes on.
        """
        ends = time.monotonic() + patience_s
        self.look()
        lines = []
        changed = {
            path: max((f.stat().st_mtime for f in _files(path)), default=0.0)
            for path in self.paths.values()
        }
        for key, path in sorted(self.paths.items(), key=lambda item: -changed[item[1]]):
            stamp = _stamp(path)
            cached = self._lines.get(path)
            if cached is not None and cached[0] == stamp:
                lines.append(cached[1])
            elif time.monotonic() < ends:
                lines.append(self._line(key, path, changed[path]))
                self._lines[path] = (stamp, lines[-1])
            else:
                lines.append(
                    self._line(key, path, changed[path], read=False)
                    if cached is None
                    else cached[1]
                )
        return lines

    def _line(self, key: str, path: Path, changed: float, *, read: bool = True) -> RunLine:
        curves = self._curves.setdefault(
            path, Curves(path, lambda name: name in REWARD or is_evaluation(name))
        )
        if read:
            curves.refresh()
        run = RunDir(path)
        last = curves.last
        phase = "damaged"
        seconds = None
        with suppress(ConfigError):
            state = run.read_state()
            phase = run.phase(state)[0]
            seconds = run.worked_s(state)
        rewards = next((curve for n in REWARD if (curve := curves.series.get(n))), None)
        return RunLine(
            key=key,
            name=str(path.relative_to(self.folder)) if path != self.folder else path.name,
            path=path,
            phase=phase,
            step=None if last is None else last.step,
            reward=rewards.values[-1] if rewards else None,
            evals=tuple((e["name"], e["newest"]["value"]) for e in curves.evals()),
            cost_usd=curves.cost_usd(),
            seconds=seconds,
            changed=changed,
            spark=spark(list(rewards.values)) if rewards else "",
            read=read,
        )


def _files(path: Path) -> list[Path]:
    return [f for f in (path / STATE, path / "metrics.jsonl") if f.is_file()]


def _stamp(path: Path) -> tuple[int, ...]:
    return tuple(n for f in _files(path) for n in (f.stat().st_mtime_ns, f.stat().st_size))


def _is_run(path: Path) -> bool:
    return any((path / name).exists() for name in (STATE, "metrics.jsonl", "buffer"))


def _below(folder: Path, depth: int) -> Iterator[Path]:
    """Run folders, those of stages included; links are not followed."""
    try:
        below = [
            e
            for e in os.scandir(folder)
            if e.is_dir(follow_symlinks=False) and not e.name.startswith(".")
        ]
    except OSError:
        return
    if _is_run(folder):
        if not (folder / "stages.json").exists():
            yield folder
            return
        below = [e for e in below if e.name not in _INSIDE]
    if depth:
        for entry in below:
            yield from _below(Path(entry.path), depth - 1)


def differences(folders: Sequence[Path]) -> dict[str, list[str]]:
    """Keys in which the configurations differ, with the value of each run; a run without a
    configuration has changed none.
    """
    from rft.config.save import changed, differing, saved

    changes: list[dict[str, str]] = [{} for _ in folders]
    for i, folder in enumerate(folders):
        with suppress(ConfigError):  # of a run that has not begun, or was not ours
            changes[i] = changed(saved(folder)["tree"])
    return differing(changes)

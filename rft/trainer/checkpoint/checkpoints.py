"""Write `checkpoints/global_step_N` under a temporary name and commit it by renaming its manifest.

Depends on folders and manifests; the ranks write the content.  Invariant: a crash at any moment
leaves every committed checkpoint intact; an unfinished checkpoint has no manifest, and the next
save removes temporary folders.
"""

from __future__ import annotations

import asyncio
import logging
import math
import shutil
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Literal

from msgspec.structs import replace

from rft.errors import CheckpointInvalid, RunFailed, nearest
from rft.fault_injection import fault
from rft.files.disk import sync_path
from rft.monitor.read import MetricTail, Series, begins
from rft.trainer.checkpoint import manifest as manifests
from rft.trainer.checkpoint.manifest import Manifest
from rft.types.ids import Version
from rft.types.metrics import MetricRecord
from rft.types.ports import Consumption

log = logging.getLogger(__name__)
Fill = Callable[[Path], Awaitable[Mapping[str, str]]]
Choose = Callable[[Collection[int]], Collection[int]]


@dataclass
class Checkpoints:
    """The checkpoint folder of a run.

    Keeps the `keep` newest checkpoints (0: all), and the steps that `spare` chooses among all.
    """

    folder: Path
    keep: int
    spare: Choose | None = None

    async def save(
        self, version: Version, parent: Version | None, consumption: Consumption, fill: Fill
    ) -> Manifest:
        """Let `fill` write the files of `version`, commit them, then remove older checkpoints.

        `fill` returns hashes by path inside the folder, of any of its files.
        """
        final = self.folder / manifests.folder_name(version.step)
        aside = final.with_name(f"{final.name}.tmp")
        await asyncio.to_thread(_fresh, aside)
        commit = partial(
            manifests.commit,
            version=version,
            parent=parent,
            consumption=consumption,
            hashes=await fill(aside),
        )
        return await asyncio.to_thread(self._commit, aside, final, commit)

    def _commit(self, aside: Path, final: Path, commit: Callable[[Path], Manifest]) -> Manifest:
        for path in (aside, *aside.rglob("*")):
            sync_path(path)
        old = final.with_name(f"{final.name}{manifests.REPLACED}")
        manifests.recover(self.folder)
        shutil.rmtree(old, ignore_errors=True)
        # a step saved again: the new folder is complete before the old one is removed
        if (final / manifests.NAME).is_file():
            manifest = commit(aside)
            final.rename(old)
            fault("checkpoint.replacing")
            aside.rename(final)
            sync_path(self.folder)
            manifest = replace(manifest, folder=final)
        else:
            shutil.rmtree(final, ignore_errors=True)  # without a manifest: never committed
            aside.rename(final)
            sync_path(self.folder)
            fault("checkpoint.renamed")
            manifest = commit(final)
        manifests.remember(manifest)
        fault("checkpoint.committed")
        shutil.rmtree(old, ignore_errors=True)
        self._prune()
        return manifest

    def _prune(self) -> None:
        if not self.keep:
            return
        folders = sorted(manifests.committed(self.folder), key=age)
        spared = () if self.spare is None else self.spare({manifests.step_of(f) for f in folders})
        for folder in folders[: -self.keep]:
            if manifests.step_of(folder) in spared:
                continue
            log.info("removing old checkpoint %s", folder)
            # the manifest first, so that a half-removed folder does not look committed
            (folder / manifests.NAME).unlink()
            fault("checkpoint.removing")
            shutil.rmtree(folder)


class BestSteps:
    """Finds the best step by a metric during the run; each call reads new lines of the file.

    Raises RunFailed for a damaged line.
    """

    def __init__(self, metrics: Path, name: str, mode: Literal["max", "min"]) -> None:
        self._tail = MetricTail(metrics)
        self._series = Series(name)
        self._name = name
        self._mode = mode
        self._names: set[str] = set()  # names of all metrics
        self._served: int | None = None  # this and `_evaluations`: since the run's last start
        self._evaluations = Evaluations()

    def __call__(self, steps: Collection[int]) -> set[int]:
        """Return the best of `steps` and the steps that may still get a value.

        The latter are the steps under evaluation and the served step, which may be evaluated next.
        """
        best = self.best(steps)
        due = {step for name, step in self._evaluations.due if self._name.startswith(f"{name}/")}
        awaited = {self._served, *due} if self._name.startswith("eval/") else set()
        return {step for step in steps if step == best or step in awaited}

    def best(self, steps: Collection[int]) -> int | None:
        """Return the step with the best value, the later of equals; None if no step has a value."""
        for record in self._tail.new():
            self._read(record)
        if self._tail.problems:
            raise RunFailed(self._tail.problems[0])
        if not (values := dict(self._series.points())):
            near = nearest(self._name, self._names)
            _warn_once(
                f"no checkpoint is the best one: {self._tail.path} has no {self._name} so "
                f"far.{near}"
            )
        sign = 1 if self._mode == "max" else -1
        ranked = [(sign * v, s) for s in steps if math.isfinite(v := values.get(s, math.nan))]
        return max(ranked)[1] if ranked else None

    def _read(self, record: MetricRecord) -> None:
        self._series.take(record)
        self._names |= record.values.keys()
        if begins(record):
            self._served = None
            self._evaluations = Evaluations()
        if "sync/version" in record.values:
            self._served = record.step
        self._evaluations.add(record)


class Evaluations:
    """Evaluations that were announced and have not ended: (prefix of their metrics, train step)."""

    def __init__(self) -> None:
        self.due: set[tuple[str, int]] = set()

    def add(self, record: MetricRecord) -> MetricRecord:
        """Note the start and end of evaluations in the record; return the record."""
        for metric in record.values if record.role == "eval" else ():
            name, _, kind = metric.rpartition("/")
            if kind == "due":
                self.due.add((name, record.step))
            elif kind == "time":
                self.due = {(n, step) for n, step in self.due if n != name or step > record.step}
        return record


@cache
def _warn_once(text: str) -> None:
    log.warning("%s", text)


def age(folder: Path) -> tuple[int, int]:
    """Return (lineage, step), the order of checkpoints; (0, 0) if the manifest is damaged."""
    try:
        version = manifests.read(folder, verify=False).version
    except CheckpointInvalid:
        return 0, 0
    return version.lineage, version.step


def _fresh(folder: Path) -> None:
    for old in folder.parent.glob("*.tmp"):  # of any step: interrupted saves
        if manifests.is_name(old.stem):
            shutil.rmtree(old, ignore_errors=True)
    folder.mkdir(parents=True)

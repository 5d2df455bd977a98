"""Writes `checkpoints/global_step_N` aside, then commits it by renaming its manifest.

Knows folders and manifests; what goes into them is written by the ranks.  Invariant: a crash at any
moment leaves every committed checkpoint as it was; what was half written has no manifest, and what
lies aside is removed by the next save.
"""

from __future__ import annotations

import asyncio
import logging
import math
import shutil
from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Literal

from msgspec.structs import replace

from rft.errors import CheckpointInvalid, RunFailed, nearest
from rft.fault_injection import fault
from rft.files.disk import sync_path
from rft.monitor.read import MetricTail, Series, begins
from rft.trainer import manifest as manifests
from rft.trainer.manifest import Manifest
from rft.types.ids import Version
from rft.types.metrics import MetricRecord
from rft.types.ports import Consumption

log = logging.getLogger(__name__)
Fill = Callable[[Path], Awaitable[Mapping[str, str]]]
Choose = Callable[[Collection[int]], Collection[int]]


class Checkpoints:
    """The checkpoint folder of a run.  `keep` newest are kept, 0 = all, and those that `beside`
    names among the steps there are.
    """

    def __init__(self, folder: Path, *, keep: int, beside: Choose | None = None) -> None:
        self.folder = folder
        self._keep = keep
        self._beside = beside

    async def save(
        self, version: Version, parent: Version | None, consumption: Consumption, fill: Fill
    ) -> Manifest:
        """Let `fill` write the files of `version`, then commit them.  Older ones beyond `keep` are
        removed afterwards.

        `fill` returns `hash_of` files by path for those that it has hashed already.
        """
        final = self.folder / manifests.folder_name(version.step)
        aside = final.with_name(f"{final.name}.tmp")
        await asyncio.to_thread(_fresh, aside)
        hashes = await fill(aside)
        return await asyncio.to_thread(
            self._commit, aside, final, version, parent, consumption, hashes
        )

    def _commit(
        self,
        aside: Path,
        final: Path,
        version: Version,
        parent: Version | None,
        consumption: Consumption,
        hashes: Mapping[str, str],
    ) -> Manifest:
        for path in (aside, *aside.rglob("*")):
            sync_path(path)
        old = final.with_name(f"{final.name}{manifests.REPLACED}")
        manifests.recover(self.folder)
        shutil.rmtree(old, ignore_errors=True)
        # the same step, saved again: the new one is whole before the old one goes
        if (final / manifests.NAME).is_file():
            manifest = manifests.commit(
                aside, version=version, parent=parent, consumption=consumption, hashes=hashes
            )
            final.rename(old)
            fault("checkpoint.replacing")
            aside.rename(final)
            sync_path(self.folder)
            manifest = replace(manifest, folder=final)
        else:
            shutil.rmtree(final, ignore_errors=True)  # one that was never committed
            aside.rename(final)
            sync_path(self.folder)
            fault("checkpoint.renamed")
            manifest = manifests.commit(
                final, version=version, parent=parent, consumption=consumption, hashes=hashes
            )
        manifests.remember(manifest)
        fault("checkpoint.committed")
        shutil.rmtree(old, ignore_errors=True)
        self._prune()
        return manifest

    def _prune(self) -> None:
        if not self._keep:
            return
        folders = sorted(manifests.committed(self.folder), key=age)
        spared = (
            self._beside({manifests.step_of(f) for f in folders})
            if self._beside is not None
            else ()
        )
        for folder in (f for f in folders[: -self._keep] if manifests.step_of(f) not in spared):
            log.info("removing old checkpoint %s", folder)
            # first, so that a half-removed folder does not look committed
            (folder / manifests.NAME).unlink()
            fault("checkpoint.removing")
            shutil.rmtree(folder)


def best_step(
    metrics: Path, name: str, mode: Literal["max", "min"], steps: Collection[int]
) -> int | None:
    """Which of `steps` has the best value of metric `name` in a run's metrics.jsonl, the later one
    of equals; None: none has a value.
    """
    return BestSteps(metrics, name, mode).best(steps)


class BestSteps:
    """Asked again and again while the run writes: it reads what was added to metrics.jsonl since
    the last time.

    Raises RunFailed for a damaged line.
    """

    def __init__(self, metrics: Path, name: str, mode: Literal["max", "min"]) -> None:
        self._tail = MetricTail(metrics)
        self._series = Series(name)
        self._name = name
        self._mode = mode
        self._names: set[str] = set()  # of all metrics
        self._served: int | None = None  # this and the next: of this process of the run
        self._evaluations = Evaluations()

    def __call__(self, steps: Collection[int]) -> set[int]:
        """The best one of `steps`, and those that may get a value yet: steps whose evaluation was
        announced and has not ended, and the one served, as the next may be of it.
        """
        best = self.best(steps)
        due = {step for name, step in self._evaluations.due if self._name.startswith(f"{name}/")}
        awaited = {self._served, *due} if self._name.startswith("eval/") else set()
        return {step for step in steps if step == best or step in awaited}

    def best(self, steps: Collection[int]) -> int | None:
        """See `best_step`."""
        for record in self._tail.new():
            self._take(record)
        if self._tail.problems:
            raise RunFailed(self._tail.problems[0])
        if not (values := dict(self._series.points())):
            near = nearest(self._name, self._names)
            _tell(
                f"no checkpoint is the best one: {self._tail.path} has no {self._name} so "
                f"far.{near}"
            )
        found = [
            (v if self._mode == "max" else -v, s)
            for s in steps
            if math.isfinite(v := values.get(s, math.nan))
        ]
        return max(found)[1] if found else None

    def _take(self, record: MetricRecord) -> None:
        self._series.take(record)
        self._names |= record.values.keys()
        if begins(record):
            self._served = None
            self._evaluations = Evaluations()
        if "sync/version" in record.values:
            self._served = record.step
        self._evaluations.take(record)


class Evaluations:
    """Which were announced and have not ended: (what their metrics begin with, train step).  `take`
    gives a record back.
    """

    def __init__(self) -> None:
        self.due: set[tuple[str, int]] = set()

    def take(self, record: MetricRecord) -> MetricRecord:
        for name, _, what in (
            (n.rpartition("/") for n in record.values) if record.role == "eval" else ()
        ):
            if what == "due":
                self.due.add((name, record.step))
            elif what == "time":
                self.due = {(n, step) for n, step in self.due if n != name or step > record.step}
        return record


@cache
def _tell(text: str) -> None:
    """Once, and not again at each save."""
    log.warning("%s", text)


def age(folder: Path) -> Version:
    """Lineage, then step: what an abandoned lineage left is older, whatever its step."""
    try:
        return manifests.read(folder, verify=False).version
    except CheckpointInvalid:
        return Version(0, 0)


def _fresh(folder: Path) -> None:
    for old in folder.parent.glob("*.tmp"):  # of whatever step: saves that died
        if manifests.is_name(old.stem):
            shutil.rmtree(old, ignore_errors=True)
    folder.mkdir(parents=True)

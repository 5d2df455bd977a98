"""Writes `checkpoints/global_step_N` aside, then commits it by renaming its manifest.

Knows folders and manifests; what goes into them is written by the ranks.  Invariant: a crash at any moment leaves every committed
checkpoint as it was; what was half written has no manifest, and what lies aside is removed by the next save.
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

from rft.disk import sync_path
from rft.errors import CheckpointInvalid, nearest
from rft.faults import fault
from rft.monitor.read import read, series
from rft.trainer import manifest as manifests
from rft.trainer.manifest import Manifest
from rft.types.ids import Version
from rft.types.ports import Consumption

log = logging.getLogger(__name__)
Fill = Callable[[Path], Awaitable[Mapping[str, str]]]
Best = Callable[[Collection[int]], int | None]


class Checkpoints:
    """The checkpoint folder of a run.  `keep` newest are kept, 0 = all, and the one that `best` names among the steps there are."""

    def __init__(self, folder: Path, *, keep: int, best: Best | None = None) -> None:
        self.folder, self._keep, self._best = folder, keep, best

    async def save(self, version: Version, parent: Version | None, consumption: Consumption, fill: Fill) -> Manifest:
        """Let `fill` write the files of `version`, then commit them.  Older ones beyond `keep` are removed afterwards.

        `fill` returns sha256 by path for the files that it has hashed already.
        """
        final = self.folder / manifests.folder_name(version.step)
        aside = final.with_name(f"{final.name}.tmp")
        await asyncio.to_thread(_fresh, aside)
        hashes = await fill(aside)
        return await asyncio.to_thread(self._commit, aside, final, version, parent, consumption, hashes)

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
        if (final / manifests.NAME).is_file():  # the same step, saved again: the new one is whole before the old one goes
            manifest = manifests.commit(aside, version=version, parent=parent, consumption=consumption, hashes=hashes)
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
            manifest = manifests.commit(final, version=version, parent=parent, consumption=consumption, hashes=hashes)
        manifests.remember(manifest)
        fault("checkpoint.committed")
        shutil.rmtree(old, ignore_errors=True)
        self._prune()
        return manifest

    def _prune(self) -> None:
        if not self._keep:
            return
        folders = sorted(manifests.committed(self.folder), key=_age)
        steps = {manifests.step_of(f): f for f in folders}
        best = self._best(steps) if self._best is not None else None
        for folder in folders[: -self._keep]:
            if best is not None and folder == steps[best]:
                continue
            log.info("removing old checkpoint %s", folder)
            (folder / manifests.NAME).unlink()  # first, so that a half-removed folder does not look committed
            fault("checkpoint.removing")
            shutil.rmtree(folder)


def best_step(metrics: Path, name: str, mode: Literal["max", "min"], steps: Collection[int]) -> int | None:
    """Which of `steps` has the best value of metric `name` in a run's metrics.jsonl, the later one of equals; None: none has a value."""
    records = read(metrics) if metrics.is_file() else []
    if not (values := series(records, name)):
        _tell(
            f"no checkpoint is the best one: {metrics} has no {name} so far.{nearest(name, {n for r in records for n in r.values})}"
        )
    found = [(v, s) for s, v in values if s in steps and math.isfinite(v)]
    return max(found, key=lambda x: (x[0] if mode == "max" else -x[0], x[1]))[1] if found else None


@cache
def _tell(text: str) -> None:
    """Once, and not again at each save."""
    log.warning("%s", text)


def _age(folder: Path) -> Version:
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

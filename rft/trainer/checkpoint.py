"""Writes `checkpoints/global_step_N` aside, then commits it by renaming its manifest.

Knows folders and manifests; what goes into them is written by the ranks.  Invariant: a crash at any moment leaves every committed
checkpoint as it was; what was half written has no manifest and is removed by the next save.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from rft.errors import CheckpointInvalid
from rft.trainer import manifest as manifests
from rft.trainer.manifest import Manifest
from rft.types.ids import Version
from rft.types.ports import Consumption

log = logging.getLogger(__name__)
Fill = Callable[[Path], Awaitable[None]]
Run = Callable[..., Awaitable[Any]]


class Checkpoints:
    """The checkpoint folder of a run.  `keep` newest are kept, 0 = all.  `run` does blocking file work off the event loop."""

    def __init__(self, folder: Path, *, keep: int, run: Run) -> None:
        self.folder, self._keep, self._run = folder, keep, run

    async def save(self, version: Version, parent: Version | None, consumption: Consumption, fill: Fill) -> Manifest:
        """Let `fill` write the files of `version`, then commit them.  Older ones beyond `keep` are removed afterwards."""
        final = self.folder / manifests.folder_name(version.step)
        aside = final.with_name(f"{final.name}.tmp")
        await self._run(_fresh, aside)
        await fill(aside)
        manifest: Manifest = await self._run(self._commit, aside, final, version, parent, consumption)
        return manifest

    def _commit(self, aside: Path, final: Path, version: Version, parent: Version | None, consumption: Consumption) -> Manifest:
        for path in (aside, *aside.rglob("*")):
            manifests.fsync_path(path)
        old = None
        if final.exists():  # the same step of an earlier lineage, or one that was never committed
            old = final.with_name(f"{final.name}.old.tmp")
            shutil.rmtree(old, ignore_errors=True)
            final.rename(old)
        aside.rename(final)
        manifests.fsync_path(self.folder)
        manifest = manifests.commit(final, version=version, parent=parent, consumption=consumption)
        if old is not None:
            shutil.rmtree(old)
        self._prune()
        return manifest

    def _prune(self) -> None:
        for folder in sorted(manifests.committed(self.folder), key=_age)[: -self._keep] if self._keep else []:
            log.info("removing old checkpoint %s", folder)
            (folder / manifests.NAME).unlink()  # first, so that a half-removed folder does not look committed
            shutil.rmtree(folder)


def _age(folder: Path) -> tuple[int, int]:
    """Lineage, then step: what an abandoned lineage left is older, whatever its step."""
    try:
        version = manifests.read(folder, verify=False).version
    except CheckpointInvalid:
        return (0, 0)
    return (version.lineage, version.step)


def _fresh(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)

"""Transport through files in the run folder, for engines that share a file system with the trainer
but not its memory.

Invariant: a file under its final name is complete (written aside, fsynced, renamed), and files of
versions that an engine may still read are kept.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import torch

from rft.errors import WeightSyncFailed
from rft.files.disk import sync_path
from rft.sync.transport import blob
from rft.types.ids import Version
from rft.types.ports import TensorSpec, WeightManifest

_KEPT = 2


class CheckpointTransport:
    """See `rft.sync.base.Transport`.  The first stage removes files of an earlier start of the run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()
        self._files: dict[Version, Path] = {}  # oldest first
        self._layout: tuple[TensorSpec, ...] = ()
        self._swept = False

    def stage(
        self, version: Version, tensors: Iterable[tuple[str, torch.Tensor]], tied: dict[str, str]
    ) -> WeightManifest:
        final = self._folder / f"weights-{version.lineage}-{version.step}.bin"
        if version in self._files:
            raise WeightSyncFailed(
                f"version {version} is already staged as {final}; release it first"
            )
        aside = final.with_suffix(".tmp")
        try:
            self._sweep()
            fd = os.open(aside, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                specs = blob.write(fd, version, tensors, tied)
                if self._layout:
                    blob.same_layout(version, specs, self._layout)
                os.fsync(fd)
            finally:
                os.close(fd)
            aside.replace(final)
            sync_path(self._folder)
        except OSError as e:
            raise WeightSyncFailed(
                f"version {version}: writing the weights to {final} failed: {e}"
            ) from e
        finally:
            aside.unlink(missing_ok=True)
        self._layout = specs
        self._files[version] = final
        for old in list(self._files)[: -_KEPT - 1]:
            self.release(old)
        return WeightManifest(
            version=version, transport="checkpoint", path=str(final), tensors=specs, tied=dict(tied)
        )

    def release(self, version: Version) -> None:
        if (file := self._files.pop(version, None)) is not None:
            file.unlink(missing_ok=True)

    def close(self) -> None:
        for version in list(self._files):
            self.release(version)

    def _sweep(self) -> None:
        if self._swept:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        for pattern in ("weights-*.bin", "weights-*.tmp"):
            for file in self._folder.glob(pattern):
                file.unlink(missing_ok=True)
        self._swept = True

"""The interface through which weights leave the trainer: a transport stages a version as bytes that
every engine can read.

Independent of trainer and engine.  Invariant: `stage` never overwrites the last two staged versions,
which engines may still read (the older one is the target of a roll-back), until `release` frees
them.
Tensors are stored row-major and little-endian, each at a multiple of 64 bytes; `WeightManifest` has
the offsets.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rft.plugins import kind
from rft.sync.settings import SyncConfig
from rft.types.ids import Version
from rft.types.ports import WeightManifest

if TYPE_CHECKING:
    import torch

transport = kind("transport")


class Transport(Protocol):
    """Weight transport; called in the trainer's rank 0 process, from one thread at a time."""

    def stage(
        self, version: Version, tensors: Iterable[tuple[str, torch.Tensor]], tied: dict[str, str]
    ) -> WeightManifest:
        """Copy `tensors`: (Hugging Face name, full tensor) pairs, which an iterator may create one
        by one; any device and float type, never converted.

        `tied` maps a name missing in `tensors` to the name of the same tensor.  Raises
        WeightSyncFailed on a non-finite value, a repeated name, or names, types or shapes that
        differ from the previous version.
        """
        ...

    def release(self, version: Version) -> None:
        """Free the bytes of `version`, which no engine reads any more, not even for a roll-back.

        An unknown version has no effect. The caller releases the old version after publishing the
        new one, and the new one after its failure.
        """
        ...

    def close(self) -> None:
        """Free all bytes and invalidate the manifests.  May be called twice."""
        ...


class OwnTransport(Transport, Protocol):
    """A transport plugin, named by `sync_method: pkg.module:Name` or `path/file.py:Name`.

    Constructed with section `synchronizer` and the run's sync folder.
    """

    def __init__(self, settings: SyncConfig, folder: Path) -> None: ...

    @staticmethod
    def fetch(manifest: WeightManifest) -> bytearray | memoryview:
        """Return a version's bytes in the manifest's layout; called in each engine worker.

        The worker compares them with the manifest's hashes.  `manifest.version.published` (without
        the attempt) is the version given to `stage`; a repeated attempt to serve it changes
        `manifest.version` alone.
        """
        ...

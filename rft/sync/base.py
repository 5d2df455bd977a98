"""The seam through which weights leave the trainer: a transport stages a version as bytes that
every engine can read.

Knows neither trainer nor engine. The one invariant: `stage` never writes into bytes of a version
that an engine may still have to read. Those are the version staged last and the one before it (the
roll-back target), unless `release` gave them free.

The blob is the tensors' bytes, row-major and little-endian, each at a multiple of 64;
`WeightManifest` holds the offsets.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rft.plugins import kind
from rft.sync.settings import SyncSettings
from rft.types.ids import Version
from rft.types.ports import WeightManifest

if TYPE_CHECKING:
    import torch

transport = kind("transport")


class Transport(Protocol):
    """Called in the trainer's rank 0 process, from one thread at a time."""

    def stage(
        self, version: Version, tensors: Iterable[tuple[str, torch.Tensor]], tied: dict[str, str]
    ) -> WeightManifest:
        """Copy `tensors` (Hugging Face name, full tensor of any device and float type; an iterator
        may make them one by one).

        `tied` maps a name that is not in `tensors` to the one that is.  The bytes are kept as
        given, never converted. Raises WeightSyncFailed on a non-finite value, a repeated name, or
        other names, types or shapes than the version before.
        """
        ...

    def release(self, version: Version) -> None:
        """No engine reads `version` any more, now or for a roll-back: its bytes may be reused or
        removed.  Unknown: no effect.

        The caller releases the old version after `publish` of the new one returned, and the new one
        after it failed.
        """
        ...

    def close(self) -> None:
        """Give every byte back; manifests are of no use afterwards.  May be called twice."""
        ...


class OwnTransport(Transport, Protocol):
    """One from outside, named by `sync_method: pkg.module:Name` or `path/file.py:Name`; made with
    settings and the run's `sync` folder.
    """

    def __init__(self, settings: SyncSettings, folder: Path) -> None: ...

    @staticmethod
    def fetch(manifest: WeightManifest) -> bytearray | memoryview:
        """In each engine worker's process: the bytes of a version, as `manifest` places them.  They
        are compared with its hashes.

        `manifest.version.published` is the version that was staged; a repeated attempt to serve it
        has another label.
        """
        ...

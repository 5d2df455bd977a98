"""The seam through which weights leave the trainer: a transport stages a version as bytes that every engine can read.

Knows neither trainer nor engine. The one invariant: `stage` never writes into bytes of a version that an engine may
still have to read. Those are the version staged last and the one before it (the roll-back target), unless `release`
gave them free.

The blob is the tensors' bytes, row-major and little-endian, each at a multiple of 64; `WeightManifest` says what lies where.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rft.sync.settings import SyncSettings
from rft.types.ids import Version
from rft.types.ports import WeightManifest

if TYPE_CHECKING:
    import torch


class Transport(Protocol):
    """Called in the trainer's rank 0 process, from one thread at a time."""

    def stage(self, version: Version, tensors: Iterable[tuple[str, torch.Tensor]], tied: dict[str, str]) -> WeightManifest:
        """Copy `tensors` (Hugging Face name, full tensor of any device and float type; an iterator may make them one by one).

        `tied` maps a name that is not in `tensors` to the one that is.  The bytes are kept as given, never converted.
        Raises WeightSyncFailed on a non-finite value, a repeated name, or other names, types or shapes than the version before.
        """
        ...

    def release(self, version: Version) -> None:
        """No engine reads `version` any more, now or for a roll-back: its bytes may be reused or removed.  Unknown: no effect.

        The caller releases the old version after `publish` of the new one returned, and the new one after it failed.
        """
        ...

    def close(self) -> None:
        """Give every byte back; manifests are of no use afterwards.  May be called twice."""
        ...


def make(settings: SyncSettings, folder: Path, host: str = "127.0.0.1") -> Transport:
    """The transport that `settings.method` names.  `folder` is the run's `sync` folder; it is made when first needed.

    `host`: this machine's address for engines that are sent something.
    """
    if settings.method == "memory":
        from rft.sync.transport.memory import MemoryTransport

        return MemoryTransport(folder)
    if settings.method == "nccl":
        from rft.sync.transport.nccl import BroadcastTransport

        return BroadcastTransport(settings, folder, host)
    from rft.sync.transport.checkpoint import CheckpointTransport

    return CheckpointTransport(folder)

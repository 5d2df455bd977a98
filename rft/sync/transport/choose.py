"""Makes the transport that a configuration names: a built-in one, or one from outside."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from rft.plugins import REGISTRY
from rft.sync.base import OwnTransport, Transport
from rft.sync.settings import SyncSettings
from rft.types.ids import Version
from rft.types.ports import WeightManifest

if TYPE_CHECKING:
    import torch


class _Named:
    """A transport from outside; its manifests tell the engines whose `fetch` they need."""

    def __init__(self, name: str, made: OwnTransport) -> None:
        self._name = name
        self._made = made
        self.release = made.release
        self.close = made.close

    def stage(
        self, version: Version, tensors: Iterable[tuple[str, torch.Tensor]], tied: dict[str, str]
    ) -> WeightManifest:
        return replace(self._made.stage(version, tensors, tied), transport=self._name)


def make(settings: SyncSettings, folder: Path, host: str = "127.0.0.1") -> Transport:
    """The transport that `settings.method` names.  `folder` is the run's `sync` folder; it is made
    when first needed.

    `host`: this machine's address for engines that are sent something.
    """
    if settings.method == "memory":
        from rft.sync.transport.memory import MemoryTransport

        return MemoryTransport(folder)
    if settings.method == "nccl":
        from rft.sync.transport.nccl import BroadcastTransport

        return BroadcastTransport(settings, folder, host)
    if ":" in settings.method:
        return _Named(
            settings.method, REGISTRY.get("transport", settings.method).obj(settings, folder)
        )
    from rft.sync.transport.checkpoint import CheckpointTransport

    return CheckpointTransport(folder)

"""Build the transport that a configuration names: a built-in one or a plugin."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from rft.plugins import REGISTRY
from rft.sync.base import OwnTransport, Transport
from rft.sync.settings import Backend, SyncConfig
from rft.types.ids import Version
from rft.types.ports import WeightManifest

if TYPE_CHECKING:
    import torch


class _Named:
    """A transport plugin; its manifests name the plugin, so that engines find its fetch function."""

    def __init__(self, name: str, transport: OwnTransport) -> None:
        self._name = name
        self._transport = transport
        self.release = transport.release
        self.close = transport.close

    def stage(
        self, version: Version, tensors: Iterable[tuple[str, torch.Tensor]], tied: dict[str, str]
    ) -> WeightManifest:
        return replace(self._transport.stage(version, tensors, tied), transport=self._name)


def make(
    config: SyncConfig,
    folder: Path,
    host: str = "127.0.0.1",
    backend: Backend = "gloo",
) -> Transport:
    """Return the transport of `sync_method`.

    `folder`: the run's sync folder, created when first needed.  `host`: this machine's address for
    engines that receive a broadcast; `backend`: of that broadcast.
    """
    method = config.sync_method
    if method == "memory":
        from rft.sync.transport.memory import MemoryTransport

        return MemoryTransport(folder)
    if method == "nccl":
        from rft.sync.transport.nccl import BroadcastTransport

        return BroadcastTransport(config, folder, host, backend)
    if ":" in method:
        return _Named(method, REGISTRY.get("transport", method).obj(config, folder))
    from rft.sync.transport.checkpoint import CheckpointTransport

    return CheckpointTransport(folder)

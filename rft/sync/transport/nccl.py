"""Transport through a broadcast from the trainer's memory to all engine workers, for engines that
share neither memory nor disk with it.

Staging keeps a version, and the one before it, in this process's memory and sends nothing; each
load requests one round of sending (`rft.collective.broadcast`).  Does not know when engines load.
Invariant: that of `rft.sync.base.Transport`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from msgspec.structs import replace

from rft.collective.broadcast import LOOPBACK, TIMEOUT_S, TrainerEnd
from rft.errors import WeightSyncFailed
from rft.sync.settings import Backend, SyncConfig
from rft.sync.transport.memory import MemoryTransport
from rft.types.ids import Version
from rft.types.ports import Broadcast, WeightManifest

NARROW = ("BF16", "F16")  # types in which most values do not change in a step


class BroadcastTransport:
    """See `rft.sync.base.Transport` and `ports.Sender`.  `host`: the trainer's address for workers."""

    def __init__(
        self,
        config: SyncConfig,
        folder: Path,
        host: str = LOOPBACK,
        backend: Backend = "gloo",
    ) -> None:
        self._memory = MemoryTransport(folder, shared=False)
        self._trainer = TrainerEnd(host)
        self._sending = ThreadPoolExecutor(1, thread_name_prefix="sending")
        self._open = Broadcast(
            host=host,
            port=self._trainer.port,
            token=self._trainer.token,
            backend=backend,
            bucket_bytes=config.nccl.bucket_bytes,
            overlap=config.nccl.overlap_broadcast_and_load,
            timeout_s=min(config.sync_timeout, TIMEOUT_S),
        )

    def stage(
        self, version: Version, tensors: Iterable[tuple[str, torch.Tensor]], tied: dict[str, str]
    ) -> WeightManifest:
        manifest = self._memory.stage(version, tensors, tied)
        narrow = sum(t.nbytes for t in manifest.tensors if t.dtype in NARROW)
        return replace(
            manifest,
            transport="nccl",
            broadcast=replace(self._open, changes=2 * narrow > manifest.nbytes),
        )

    async def send(self, manifest: WeightManifest) -> None:
        """Send in a thread, because a restarted engine gets its weights while steps continue."""
        await asyncio.get_running_loop().run_in_executor(self._sending, self._send, manifest)

    async def abort_round(self, round: int, reason: str) -> None:
        await asyncio.to_thread(self._trainer.abort_round, round, reason)

    def _send(self, manifest: WeightManifest) -> None:
        if manifest.broadcast is None or manifest.broadcast.token != self._open.token:
            raise WeightSyncFailed(
                f"version {manifest.version} was not staged by this start of the trainer; publish "
                f"it again"
            )
        version = manifest.version.published
        data = self._bytes(version)
        staged = (
            {str(v): self._bytes(v) for v in self._memory.versions}
            if manifest.broadcast.changes
            else {}
        )
        self._trainer.send(manifest, data, staged)

    def _bytes(self, version: Version) -> torch.Tensor:
        return torch.frombuffer(self._memory.view(version), dtype=torch.uint8)

    def release(self, version: Version) -> None:
        self._memory.release(version)

    def close(self) -> None:
        self._sending.shutdown(wait=False)
        self._trainer.close()
        self._memory.close()

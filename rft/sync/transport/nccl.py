"""Weights through a broadcast from the trainer's memory to all engine workers: for engines that
share neither memory nor disk with it.

Staging keeps a version, and the one before it, in memory of this process and sends nothing; each
load asks for one round of sending (`rft.collective.broadcast`).  Knows nothing of who loads when.
The one invariant is that of `Transport`.
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
from rft.sync.settings import SyncSettings
from rft.sync.transport.memory import MemoryTransport
from rft.types.ids import Version
from rft.types.ports import Broadcast, WeightManifest

NARROW = ("BF16", "F16")  # types in which most values stay as they are in a step


class BroadcastTransport:
    """See `Transport` and `Sender`.  `host`: where the workers find the trainer."""

    def __init__(self, settings: SyncSettings, folder: Path, host: str = LOOPBACK) -> None:
        self._memory = MemoryTransport(folder, shared=False)
        self._trainer = TrainerEnd(host)
        self._sending = ThreadPoolExecutor(1, thread_name_prefix="sending")
        self._open = Broadcast(
            host=host,
            port=self._trainer.port,
            token=self._trainer.token,
            backend=settings.backend,
            bucket_bytes=settings.bucket_bytes,
            overlap=settings.overlap,
            timeout_s=min(settings.timeout_s, TIMEOUT_S),
        )

    def stage(
        self, version: Version, tensors: Iterable[tuple[str, torch.Tensor]], tied: dict[str, str]
    ) -> WeightManifest:
        made = self._memory.stage(version, tensors, tied)
        narrow = sum(t.nbytes for t in made.tensors if t.dtype in NARROW)
        return replace(
            made, transport="nccl", broadcast=replace(self._open, changes=2 * narrow > made.nbytes)
        )

    async def send(self, manifest: WeightManifest) -> None:
        """Runs in a thread, because a restarted engine is sent its weights while steps continue."""
        await asyncio.get_running_loop().run_in_executor(self._sending, self._send, manifest)

    async def abandon(self, round: int, reason: str) -> None:
        await asyncio.to_thread(self._trainer.abandon, round, reason)

    def _send(self, manifest: WeightManifest) -> None:
        if manifest.broadcast is None or manifest.broadcast.token != self._open.token:
            raise WeightSyncFailed(
                f"version {manifest.version} was not staged by this start of the trainer; publish "
                f"it again"
            )
        version = manifest.version.published
        data = self._bytes(version)
        held = (
            {str(v): self._bytes(v) for v in self._memory.held}
            if manifest.broadcast.changes
            else {}
        )
        self._trainer.send(manifest, data, held)

    def _bytes(self, version: Version) -> torch.Tensor:
        return torch.frombuffer(self._memory.view(version), dtype=torch.uint8)

    def release(self, version: Version) -> None:
        self._memory.release(version)

    def close(self) -> None:
        self._sending.shutdown(wait=False)
        self._trainer.close()
        self._memory.close()

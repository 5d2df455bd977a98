"""The trainer's side of a broadcast, for tests of engines: stages weights and sends them to one
engine at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from rft.sync.settings import FixedSync, SyncConfig
from rft.sync.transport.nccl import BroadcastTransport
from rft.sync.update import Rounds
from rft.types.ids import Version
from rft.types.ports import Engine, LoadReport, WeightManifest

if TYPE_CHECKING:
    import torch


class Sending:
    """Sends from this process.  `workers`: of the engine."""

    def __init__(self, folder: Path, workers: int = 1, *, config: SyncConfig | None = None) -> None:
        config = config or FixedSync(sync_method="nccl", sync_timeout=120.0)
        self.transport = BroadcastTransport(config, folder)
        self._rounds, self._workers = Rounds(self.transport, config.sync_timeout), workers

    def stage(
        self,
        version: Version,
        tensors: Iterable[tuple[str, torch.Tensor]],
        tied: dict[str, str] | None = None,
    ) -> WeightManifest:
        return self.transport.stage(version, tensors, tied or {})

    async def load(self, engine: Engine, manifest: WeightManifest) -> LoadReport:
        """One round.  Raises what the engine raises, or WeightSyncFailed."""
        return (
            await self._rounds.load(
                manifest, {0: self._workers}, lambda index, sent: engine.load(sent)
            )
        )[0]

    def close(self) -> None:
        self.transport.close()

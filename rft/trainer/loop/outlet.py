"""Where one set of weights goes: it is staged, and engines load it.

Depends on ranks and a transport, not on which weights are due.  Invariant: the transport holds the version
that engines serve, and no failed one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from rft.errors import WeightSyncFailed
from rft.fault_injection import fault
from rft.sync.base import Transport
from rft.trainer.loop.ranks import Ranks
from rft.types.ids import Version
from rft.types.ports import WeightManifest


@dataclass(eq=False)
class Outlet:
    """Engines that load the policy's weights, or their moving average, by `publish`."""

    transport: Transport
    publish: Callable[[WeightManifest], Awaitable[Any]]
    average: bool = False
    _served: Version | None = None

    async def send(self, ranks: Ranks, version: Version) -> None:
        """Return when the engines serve `version`; free the one before it, or after a failure this."""
        manifest = await ranks.stage(version, self.transport, average=self.average)
        if not self.average:
            fault("trainer.staged")
        try:
            await self.publish(manifest)
        except WeightSyncFailed:
            self.transport.release(version)
            raise
        if self._served is not None:
            self.transport.release(self._served)
        self._served = version

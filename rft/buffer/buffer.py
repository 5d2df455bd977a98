"""The buffer: store the explorers' groups and lease them to the trainer, each row at most
`max_uses` times in an ancestry.

    explorer → append (durable) → close_batch ─┐                    one event loop, one worker thread for the ledger
    trainer  ← lease ← order of closed batches ┘ → use / discard

Depends on neither model nor loss.  Invariant: acked = used + leased + available + discarded, after
every call.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from typing import Any, cast

from rft.buffer.base import Audit, LineageStart
from rft.buffer.explorer_side import ExplorerSide, count_rejected
from rft.buffer.lease_order import LeaseOrder
from rft.buffer.mixing import remember
from rft.buffer.session_side import SessionSide
from rft.buffer.trainer_side import TrainerSide
from rft.types.ids import Version
from rft.types.ports import BufferReader, BufferWriter, Consumption

log = logging.getLogger(__name__)


class Buffer(ExplorerSide, TrainerSide, SessionSide):
    """An experience buffer and its only writer."""

    async def open(self) -> None:
        """Create or check the ledger.

        Raises SetupError on a network file system, BufferFailed if the ledger has another owner.
        """
        await self._run(self._ledger.open)
        if not self._storage.durable:
            log.warning(
                "buffer %s keeps its payload in memory only (path: none): it is not durable",
                self._settings.name,
            )

    async def start_lineage(
        self, parent: Version | None, consumption: Consumption | None, step: int = 0
    ) -> LineageStart:
        """Start a new lineage at the checkpoint `parent` (None: at the base model); fence all
        earlier lineages.

        For a start with another run's weights, `step` is their train step and `consumption` states
        the first batch. Raises BufferFailed if `consumption`, from the checkpoint's manifest,
        differs from the ledger's count for `parent`.
        """
        start, groups = await self._run(self._ledger.start_lineage, parent, consumption, step)
        if self._mix is not None:
            mix = self._mix
            await self._run_fenced(
                start.lineage, lambda tx: remember(tx, start.lineage, mix.name, mix.fingerprint)
            )
        self._lineage = start.lineage
        self._order = LeaseOrder(self._settings, start.cursor, groups, self._clock)
        await self._notify()
        return start

    def writer(self, lineage: int, explorer: int = 0) -> BufferWriter:
        """Return the buffer's interface for explorer number `explorer`."""
        self._check_explorer(explorer)
        return cast(BufferWriter, _Bound(self, lineage, explorer=explorer))

    def reader(self, lineage: int) -> BufferReader:
        """Return the buffer's interface for the trainer of `lineage`."""
        return cast(BufferReader, _Bound(self, lineage))

    async def audit(self) -> Audit:
        """Count the rows of the current lineage, and check that ledger, facts and memory agree."""
        while not self._no_append.is_set():  # then memory has everything that the ledger has stored
            await self._no_append.wait()
        order = self._order
        return await self._run(self._ledger.audit, order.num_leased, order.num_ready)

    async def stats(self) -> dict[str, Any]:
        """Return counts and sizes for display and metrics."""
        audit = await self.audit()
        return {
            "acked": audit.acked,
            "used": audit.used,
            "leased": audit.leased,
            "available": audit.available,
            "waiting": audit.waiting,
            "explained": audit.discarded,
            "waiting_groups": self._order.num_groups,
            "rejected": await self._run(self._ledger.run, count_rejected),
            "bytes": await self._run(self._ledger.run, self._ledger.database.size),
            "lineage": self._lineage,
            "finished": self._order.finished,
        }

    async def close(self) -> None:
        """Store pending appends, wake all waiting calls (they fail), and close the files."""
        if self._closed:
            return
        self._closed = True
        self._closing.set()
        for writing in (self._flusher, self._noting):
            if writing is not None:
                await writing
        await self._notify()
        self._ledger.database.stop()
        await asyncio.get_running_loop().run_in_executor(self._thread, self._reserve.spend)
        await asyncio.get_running_loop().run_in_executor(self._thread, self._ledger.close)
        self._thread.shutdown()


class _Bound:
    """The buffer for one caller: adds its lineage, and an explorer's number, to every call."""

    def __init__(self, buffer: Buffer, lineage: int, **more: int) -> None:
        self._buffer = buffer
        self._lineage = lineage
        self._more = more

    def __getattr__(self, method: str) -> Any:
        return functools.partial(getattr(self._buffer, method), self._lineage, **self._more)

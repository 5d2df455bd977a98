"""One load of a version that is broadcast: the trainer sends while the engines receive, and nobody waits for one that failed.

Knows neither how weights travel nor what a load is good for.  Invariant: when a round ends, in whatever way, everyone in it has been told.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from msgspec.structs import replace

from rft.errors import RftError, WeightSyncFailed
from rft.types.ports import LoadReport, Sender, WeightManifest

log = logging.getLogger(__name__)
Ask = Callable[[int, WeightManifest], Awaitable[LoadReport]]


class Rounds:
    """Numbers the rounds."""

    def __init__(self, sender: Sender | None, timeout_s: float) -> None:
        self._sender, self._timeout_s = sender, timeout_s
        self._number = 0

    async def load(self, manifest: WeightManifest, engines: Mapping[int, int], ask: Ask) -> dict[int, LoadReport]:
        """The reports of `engines` (with the number of workers of each), each of which is asked by `ask`.

        Raises what an engine raised (the first one's), else WeightSyncFailed that says why the trainer could not send.
        """
        if self._sender is None or manifest.broadcast is None:
            raise WeightSyncFailed(f"version {manifest.version} has to be sent, and nobody was named who sends it")
        self._number += 1
        group = replace(manifest.broadcast, round=self._number, engines=tuple(engines), workers=tuple(engines.values()))
        sending = asyncio.ensure_future(self._send(self._sender, replace(manifest, broadcast=group)))
        loading = [
            asyncio.ensure_future(ask(i, replace(manifest, broadcast=replace(group, place=place))))
            for place, i in enumerate(engines)
        ]
        try:
            await self._ended([sending, *loading])
        except asyncio.CancelledError:
            await self._abandon("it was cancelled")
            for task in (sending, *loading):
                task.cancel()
            await asyncio.gather(sending, *loading, return_exceptions=True)
            raise
        for task in loading:
            task.result()
        reports = dict(zip(engines, (task.result() for task in loading), strict=True))
        if (error := sending.exception()) is not None:
            told = "; ".join(f"engine {i}: {r.failed}" for i, r in reports.items() if r.failed)
            raise WeightSyncFailed(f"{error}{f' ({told})' if told else ''}")
        return reports

    async def _ended(self, tasks: list[asyncio.Future[None] | asyncio.Future[LoadReport]]) -> None:
        """All of them; the first that fails ends the meeting of the others."""
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if pending:
            why = next(e for task in done if (e := task.exception()) is not None)
            await self._abandon(str(why))
            await asyncio.wait(pending)

    async def _abandon(self, reason: str) -> None:
        assert self._sender is not None
        try:
            await self._sender.abandon(self._number, reason)
        except RftError as e:  # a trainer that died ends the run by itself; the engines' waits have deadlines of their own
            log.warning("round %d could not be given up: %s", self._number, e)

    async def _send(self, sender: Sender, manifest: WeightManifest) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await sender.send(manifest)
        except TimeoutError:
            raise WeightSyncFailed(f"the trainer did not send {manifest.version} within {self._timeout_s:g} s") from None

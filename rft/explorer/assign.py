"""The one order of explore batches, assigned to explorers: who plays which, and what comes back
from one that has gone.

Knows no tasks and no clock.  Invariant: a batch is with one explorer at a time, the lowest that is
free is assigned first, and which tasks it has does not depend on who plays it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from rft.sync.waits import Waits, race
from rft.types.ids import Version
from rft.types.ports import Assignment

log = logging.getLogger(__name__)
FINISHED = "the trainer is finished"


class Assignments:
    """Batches from `first` on, up to `total` (None: no end); at most `max_inflight` are under way."""

    def __init__(self, first: int, total: int | None, max_inflight: int | None = None) -> None:
        self.total = total
        self._max_inflight = max_inflight
        self._next = first  # all below were assigned
        self._out: dict[int, str] = {}  # with whom
        self._back: set[int] = set()  # assigned, and given back

    @property
    def candidate(self) -> int | None:
        """The batch that is assigned next; None where all are."""
        if self._back:
            return min(self._back)
        return self._next if self.total is None or self._next < self.total else None

    @property
    def over(self) -> bool:
        """All are closed."""
        return self.candidate is None and not self._out

    @property
    def first_open(self) -> int:
        """All below are closed."""
        return min((self._next, *self._out, *self._back))

    def ready(self, lag: int | None) -> bool:
        """May the candidate go to an explorer whose choice of tasks looks back so far (see
        `ExploreGate.next_batch`)?
        """
        if (batch := self.candidate) is None or (
            self._max_inflight is not None and len(self._out) >= self._max_inflight
        ):
            return False
        return lag is None or self.first_open >= batch - lag

    def take(self, owner: str) -> tuple[int, bool]:
        """(the candidate, whether it was assigned before); it is with `owner` now."""
        batch = self.candidate
        assert batch is not None, "asked only when ready"
        again = batch in self._back
        self._back.discard(batch)
        self._next = max(self._next, batch + 1)
        self._out[batch] = owner
        return batch, again

    def close(self, batch: int) -> None:
        self._out.pop(batch, None)

    def give_back(self, owner: str) -> list[int]:
        """The batches of an explorer that has gone are assigned again."""
        found = sorted(b for b, o in self._out.items() if o == owner)
        for batch in found:
            del self._out[batch]
        self._back.update(found)
        return found


class BatchAssigner:
    """Assigns batches once there is `room(batch)` in the buffer and the weights let them begin
    (`may_explore(batch)`).

    Whoever asks first gets the next batch.  `waits` is told of every change and ends all waits with
    the run.
    """

    def __init__(
        self,
        assignments: Assignments,
        room: Callable[[int], Awaitable[None]],
        may_explore: Callable[[int], Awaitable[Version | None]],
        waits: Waits,
    ) -> None:
        self.assignments = assignments
        self._room = room
        self._may_explore = may_explore
        self._waits = waits
        self._turn = asyncio.Lock()  # the first to ask is the first to get one
        self.finished = False

    async def next(
        self, owner: str, lag: int | None, check: Callable[[], object] = lambda: None
    ) -> Assignment | str:
        """See `ExploreGate.next_batch`.  `check` raises where `owner` does not belong to the run
        any more.
        """
        of = self.assignments
        async with self._turn:
            while True:
                await self._waits.without_deadline(
                    lambda: self.finished or of.over or of.ready(lag)
                )
                if self.finished:
                    return FINISHED
                if (candidate := of.candidate) is None:
                    return f"all {of.total} explore batches are in the buffer"
                begins, version = await self._may_begin(candidate)
                if not begins:
                    continue  # one that comes before it was given back
                if version is None:
                    return FINISHED
                check()
                batch, again = of.take(owner)
                log.info(
                    "explore batch %d goes to explorer %s%s",
                    batch,
                    owner,
                    ", again" if again else "",
                )
                return Assignment(batch=batch, version=version, again=again)

    async def close(self, batch: int) -> None:
        """All groups of `batch` are in the buffer."""
        self.assignments.close(batch)
        await self._waits.changed()

    async def finish(self) -> None:
        """The trainer is finished: no batch is assigned any more."""
        self.finished = True
        await self._waits.changed()

    async def _may_begin(self, batch: int) -> tuple[bool, Version | None]:
        """Waits until the batch may begin (True, the version to expect) or another one is to be
        assigned first (False).
        """

        async def may() -> Version | None:
            await self._room(batch)
            return await self._may_explore(batch)

        def other() -> bool:
            return self.finished or self.assignments.candidate != batch

        async with race(may(), self._waits.without_deadline(other)) as (asked, _):
            self._waits.raise_failure()
            if self.finished and not asked.done():
                return True, None
            same = self.assignments.candidate == batch
            return same, asked.result() if same and asked.done() else None

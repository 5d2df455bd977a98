"""Assign explore batches to explorers in one global order, and reassign the batches of lost
explorers.

Depends on no tasks and no clock.
Invariant: a batch belongs to one explorer at a time, the lowest free batch is assigned first, and
its tasks do not depend on the explorer.
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
    """Batches from `first` up to `total` (None: no end), at most `max_inflight` in progress."""

    def __init__(self, first: int, total: int | None, max_inflight: int | None = None) -> None:
        self.total = total
        self._max_inflight = max_inflight
        self._next = first  # all lower batches were assigned
        self._out: dict[int, str] = {}  # batch -> explorer
        self._back: set[int] = set()  # returned batches, to be assigned again

    @property
    def candidate(self) -> int | None:
        """The batch to assign next; None when all are assigned."""
        if self._back:
            return min(self._back)
        return self._next if self.total is None or self._next < self.total else None

    @property
    def over(self) -> bool:
        """Whether all batches are closed."""
        return self.candidate is None and not self._out

    @property
    def first_open(self) -> int:
        """The lowest batch that is not closed."""
        return min((self._next, *self._out, *self._back))

    def ready(self, lag: int | None) -> bool:
        """Return whether the candidate may go to an explorer with this `lag` (see
        `ExploreGate.next_batch`).
        """
        if (batch := self.candidate) is None or (
            self._max_inflight is not None and len(self._out) >= self._max_inflight
        ):
            return False
        return lag is None or self.first_open >= batch - lag

    def take(self, owner: str) -> tuple[int, bool]:
        """Assign the candidate to `owner`; return (batch, whether it was assigned before)."""
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
        """Return the batches of a lost explorer to the pool."""
        batches = sorted(b for b, o in self._out.items() if o == owner)
        for batch in batches:
            del self._out[batch]
        self._back.update(batches)
        return batches


class BatchAssigner:
    """Assigns a batch once the buffer has `room(batch)` and the weights allow it
    (`may_explore(batch)`).

    Requests are served in order.  `waits` is notified of every change and ends all waits with the
    run.
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
        self._turn = asyncio.Lock()  # serves requests in order
        self.finished = False

    async def next(
        self, owner: str, lag: int | None, check: Callable[[], object] = lambda: None
    ) -> Assignment | str:
        """See `ExploreGate.next_batch`.  `check` raises if `owner` no longer belongs to the run."""
        assignments = self.assignments
        async with self._turn:
            while True:
                await self._waits.without_deadline(
                    lambda: self.finished or assignments.over or assignments.ready(lag)
                )
                if self.finished:
                    return FINISHED
                if (candidate := assignments.candidate) is None:
                    return f"all {assignments.total} explore batches are in the buffer"
                begins, version = await self._may_begin(candidate)
                if not begins:
                    continue  # an earlier batch was returned
                if version is None:
                    return FINISHED
                check()
                batch, again = assignments.take(owner)
                log.info(
                    "explore batch %d goes to explorer %s%s",
                    batch,
                    owner,
                    ", again" if again else "",
                )
                return Assignment(batch=batch, version=version, again=again)

    async def close(self, batch: int) -> None:
        """Mark `batch` as closed: all its groups are in the buffer."""
        self.assignments.close(batch)
        await self._waits.changed()

    async def finish(self) -> None:
        """Assign no further batches, because the trainer is finished."""
        self.finished = True
        await self._waits.changed()

    async def _may_begin(self, batch: int) -> tuple[bool, Version | None]:
        """Wait until the batch may begin (True, expected version) or another batch has priority
        (False).
        """

        async def may() -> Version | None:
            await self._room(batch)
            return await self._may_explore(batch)

        def other() -> bool:
            return self.finished or self.assignments.candidate != batch

        async with race(may(), self._waits.without_deadline(other)) as (answered, _):
            self._waits.raise_failure()
            if self.finished and not answered.done():
                return True, None
            same = self.assignments.candidate == batch
            return same, answered.result() if same and answered.done() else None

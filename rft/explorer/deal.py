"""The one order of explore batches, dealt to several explorers: who plays which, and what comes back from one that has gone.

Knows no weights, no tasks and no clock; who waits asks again after every change.  Invariant: a batch is with one explorer at a time, the
lowest that is free is dealt first, and which tasks it has does not depend on who plays it.
"""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct

from rft.types.ids import Version


class Begun(Struct, frozen=True, kw_only=True):
    """A batch to play now.  `again`: somebody has begun it before, so the buffer may hold some of its groups."""

    batch: int
    version: Version  # to expect
    again: bool = False


class Dealer(Protocol):
    """Where an explorer that is one of several gets its batches from."""

    async def begin(self, lag: int | None, fingerprint: str) -> Begun | str:
        """Wait for the next batch that may begin; a text says why none is left.

        `lag`: all batches but so many before it are closed by then, because the choice of its tasks depends on them; None: it does not.
        `fingerprint`: of the order of the tasks, which all explorers share.  Raises ConfigError when another one has another.
        """
        ...

    async def evaluates(self) -> bool:
        """Whether this explorer is the one that evaluates the final weights."""
        ...


class Deal:
    """Batches from `first` on, up to `total` (None: without end); at most `max_inflight` are out at a time."""

    def __init__(self, first: int, total: int | None, max_inflight: int | None = None) -> None:
        self.total = total
        self._max_inflight = max_inflight
        self._next = first  # all below were dealt
        self._out: dict[int, str] = {}  # with whom
        self._back: set[int] = set()  # dealt, and given back

    @property
    def candidate(self) -> int | None:
        """The batch that is dealt next; None where all are dealt."""
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
        """May the candidate be dealt to one whose choice of tasks looks back so far (see `Dealer.begin`)?"""
        if (batch := self.candidate) is None or (self._max_inflight is not None and len(self._out) >= self._max_inflight):
            return False
        return lag is None or self.first_open >= batch - lag

    def take(self, owner: str) -> tuple[int, bool]:
        """(the candidate, whether it was dealt before); it is with `owner` now."""
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
        """The batches of an explorer that has gone are dealt again."""
        found = sorted(b for b, o in self._out.items() if o == owner)
        for batch in found:
            del self._out[batch]
        self._back.update(found)
        return found

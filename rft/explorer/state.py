"""Where an explore batch stands: which groups it still needs, what was rejected, when it may be closed.  No IO.

A batch has `size` places.  Place i is filled by task i; each time its group is rejected, the next candidate is the task numbered
`size` higher.  So which row replaces which does not depend on timing, and a resumed batch goes on with the same candidates.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from rft.errors import RunFailed
from rft.types.metrics import Metric
from rft.types.ports import HeldGroup
from rft.workflow.group import Group


class Batch:
    """One explore batch in flight."""

    def __init__(self, number: int, size: int, max_refill: int, held: Iterable[HeldGroup] = ()) -> None:
        self.number = number
        self.size = size
        self.played: list[Group] = []  # by this process, with their rewards from before the operators
        self.pipeline: list[Metric] = []  # what operators reported
        self.accepted = 0
        self.reasons: Counter[str] = Counter()
        self.submitted = asyncio.Event()  # every first run of every place has begun
        self.closed = asyncio.Event()
        self.began = time.monotonic()
        self._refills_left = max_refill
        self._held = {h.task: h.accepted for h in held}
        self._waiting = 0

    def first(self, place: int) -> int | None:
        """The task number to play first at `place`: what the buffer holds is not played again.  None = nothing (more) to play."""
        number: int | None = place
        while number is not None and number in self._held:
            if self._held[number]:
                self.accepted += 1
                return None
            self.reasons["held"] += 1
            number = self.after(number)
        return number

    def after(self, number: int) -> int | None:
        """The task number that replaces the rejected `number`; None when the refills are used up."""
        if self._refills_left == 0:
            return None
        self._refills_left -= 1
        return number + self.size

    def add(self, group: Group, played: Group) -> None:
        """`group` is stored; it was `played` before operators had it."""
        self.played.append(replace(played, accepted=group.accepted, reason=group.reason))
        if group.accepted:
            self.accepted += 1
        else:
            by = sorted({r.reason for r in group.rows if r.status != "failed" and r.reason})
            self.reasons[f"{group.reason} by {', '.join(by)}" if by else group.reason] += 1

    def expect(self, runs: int) -> None:
        """`runs` runs will begin; the batch counts as submitted when they all have."""
        self._waiting = runs
        if runs == 0:
            self.submitted.set()

    def begun(self) -> None:
        self._waiting -= 1
        if self._waiting == 0:
            self.submitted.set()

    @property
    def wall_s(self) -> float:
        return time.monotonic() - self.began


class Breaker:
    """Stops a run in which nothing works: `limit` groups in a row whose runs all failed."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._row = 0
        self.last = ""  # what the last failed run said

    def see(self, group: Group) -> None:
        """Raises RunFailed, with the traceback of user code, at the limit."""
        failures = [r for r in group.rows if r.status == "failed"]
        if failures:
            self.last = f"{failures[0].id}: {failures[0].reason}\n{failures[0].info.get('traceback', '')}"
        if not group.wholly_failed:
            self._row = 0
            return
        self._row += 1
        if self._row >= self._limit:
            raise RunFailed(f"{self._row} groups in a row failed wholly, so the run stops.  The last failed run was {self.last}")

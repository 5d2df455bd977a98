"""Where an explore batch stands: which groups it still needs, what was rejected, when it may be
closed; what all share.  No IO.

A batch has `size` places.  Place i is filled by task i; each time its group is rejected, the next
candidate is the task numbered `size` higher.  So which row replaces which does not depend on
timing, and a resumed batch goes on with the same candidates.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from rft.errors import RunFailed
from rft.explorer.settings import ExplorerSettings
from rft.types.metrics import Metric
from rft.types.ports import StoredGroup
from rft.worker.waiting import idles
from rft.workflow.group import REJECTED_WEIGHTS, Ending, PlayedGroup


class Batch:
    """One explore batch in flight; the buffer has the groups `held` of it."""

    def __init__(
        self, number: int, settings: ExplorerSettings, held: Iterable[StoredGroup] = ()
    ) -> None:
        s = settings
        self.number = number
        self.size = s.batch_size
        self.ending = Ending(partial=s.keep_partial)
        self._enough = (
            math.ceil(s.batch_size * (1 - s.over_rollout)) if s.over_rollout > 0 else None
        )
        self._wait_after_s = s.wait_after_s
        self._timer: asyncio.TimerHandle | None = None
        # by this process, with their rewards from before the operators
        self.played: list[PlayedGroup] = []
        self.pipeline: list[Metric] = []  # what operators reported
        self.accepted = 0
        self.reasons: Counter[str] = Counter()
        self.unplayed = False  # the trainer was finished before all of it began
        self.submitted = asyncio.Event()  # every first run of every place has begun
        self.closed = asyncio.Event()
        self.began = time.monotonic()
        self.max_refill = self._refills_left = (
            3 * s.batch_size if s.max_refill is None else s.max_refill
        )
        self._held = {h.task: h.accepted for h in held}
        self._waiting = 0

    def first(self, place: int) -> int | None:
        """The task number to play first at `place`: what the buffer holds is not played again.
        None = nothing (more) to play.
        """
        number: int | None = place
        while number is not None and number in self._held:
            if self._held[number]:
                self._accept()
                return None
            self.reasons["held"] += 1
            number = self.after(number)
        return number

    def after(self, number: int) -> int | None:
        """The task number that replaces the rejected `number`; None when the refills are used up or
        the batch has ended.
        """
        if self._refills_left == 0 or self.ending.why:
            return None
        self._refills_left -= 1
        return number + self.size

    def add(self, group: PlayedGroup, played: PlayedGroup) -> None:
        """`group` is stored; it was `played` before operators had it."""
        self.played.append(replace(played, accepted=group.accepted, reason=group.reason))
        if group.accepted:
            self._accept()
        else:
            by = sorted({r.reason for r in group.rows if r.status != "failed" and r.reason})
            self.reasons[f"{group.reason} by {', '.join(by)}" if by else group.reason] += 1

    def _accept(self) -> None:
        self.accepted += 1
        if self.accepted == self._enough and self.accepted < self.size:
            self._timer = asyncio.get_running_loop().call_later(
                self._wait_after_s, self.ending.end, "over_rollout"
            )

    def close(self) -> None:
        """It is complete: the next batch may be closed."""
        if self._timer is not None:
            self._timer.cancel()
        self.closed.set()

    def expect(self, runs: int) -> None:
        """`runs` runs will begin; the batch counts as submitted when they all have."""
        self._waiting = runs
        if runs == 0:
            self.submitted.set()

    def begun(self, runs: int) -> None:
        self._waiting -= runs
        if self._waiting == 0 and runs:
            self.submitted.set()

    def __str__(self) -> str:
        """How far it is, for people."""
        rejected = f", {sum(self.reasons.values())} rejected" if self.reasons else ""
        return f"explore step {self.number + 1}: {self.accepted} of {self.size} groups{rejected}"

    @property
    def wall_s(self) -> float:
        return time.monotonic() - self.began


class Breaker:
    """Stops a run in which nothing works: `limit` groups in a row whose runs all failed, or none of
    which got a reward.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._row = 0
        self.last = ""  # what the last failed run said

    def see(self, group: PlayedGroup) -> None:
        """Raises RunFailed, with the traceback of user code, at the limit."""
        if group.reason in ("over_rollout", REJECTED_WEIGHTS):
            return  # it was slow, or its weights were broken; its workflow is not
        failures = [r for r in group.rows if r.status == "failed"]
        if group.reason == "unscored":
            self.last = f"{group.rows[0].id}: {group.why}"
        elif (
            failures
        ):  # a run that was ended because others of its task had failed does not say why
            told = next((r for r in failures if not r.reason.startswith("ended: ")), failures[0])
            self.last = f"{told.id}: {told.reason}\n{told.info.get('traceback', '')}"
        if not group.wholly_failed and group.reason != "unscored":
            self._row = 0
            return
        self._row += 1
        if self._row >= self._limit:
            how = "failed completely" if group.wholly_failed else "got no reward"
            raise RunFailed(
                f"{self._row} groups in a row {how}, so the run stops.  The last failed run was "
                f"{self.last}"
            )


class RunTimes:
    """How long a run may take: `max_s`, or after `warmup` batches `ratio` times the mean of all
    runs so far, if that is less.

    A run that passed its deadline counts with the time that it had; else the limit would sink from
    batch to batch.
    """

    def __init__(self, max_s: float, ratio: float | None, warmup: int) -> None:
        self._max_s = max_s
        self._ratio = ratio
        self._warmup = warmup
        self._batches = self._runs = 0
        self._total_s = 0.0

    @property
    def limit_s(self) -> float:
        if self._ratio is None or self._batches < self._warmup or not self._runs:
            return self._max_s
        return min(self._max_s, self._ratio * self._total_s / self._runs)

    def see(self, groups: Iterable[PlayedGroup]) -> None:
        """The groups of one batch that is over."""
        self._batches += 1
        for run in (r for g in groups for r in g.runs):
            if not run.failed or run.ended == "timeout":
                self._runs += 1
                self._total_s += run.run_s + run.reward_s


class Slots:
    """Room for `limit` runs at a time.  Who came first goes first, except that those who ask with
    `behind` let all others pass.
    """

    def __init__(self, limit: int) -> None:
        self.limit = self.free = limit
        self._lines: tuple[deque[_Ticket], deque[_Ticket]] = (deque(), deque())

    @property
    def waiting(self) -> int:
        """Runs that wait for room."""
        return sum(
            ticket.count for line in self._lines for ticket in line if not ticket.turn.done()
        )

    @asynccontextmanager
    async def take(self, count: int = 1, *, behind: bool = False) -> AsyncIterator[None]:
        """Room for `count` runs at once; more than there is counts as all there is."""
        count = min(count, self.limit)
        if self.free >= count and not self._lines[0] and not (behind and self._lines[1]):
            self.free -= count
        else:
            with idles(
                f"runs wait for room beside {self.limit} others (explorer.max_concurrent_runs)"
            ):
                await self._wait(
                    _Ticket(count, asyncio.get_running_loop().create_future()), self._lines[behind]
                )
        try:
            yield
        finally:
            self._give(count)

    async def _wait(self, ticket: _Ticket, line: deque[_Ticket]) -> None:
        line.append(ticket)
        try:
            await ticket.turn
        except asyncio.CancelledError:
            granted = ticket.turn.done() and not ticket.turn.cancelled()
            self._give(ticket.count if granted else 0)
            raise

    def _give(self, count: int) -> None:
        self.free += count
        for line in self._lines:
            while line and (line[0].turn.done() or line[0].count <= self.free):
                ticket = line.popleft()
                if not ticket.turn.done():  # else its run was cancelled
                    self.free -= ticket.count
                    ticket.turn.set_result(None)
            if line:
                return


@dataclass(eq=False)
class _Ticket:
    count: int
    turn: asyncio.Future[None]

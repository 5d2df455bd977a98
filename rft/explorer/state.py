"""State of an explore batch (missing groups, rejections, closing), and limits shared by all
batches.  No IO.

A batch has `size` places, one for each group.  The first candidate for place i is task i; each time
a group is rejected, the next candidate is the task numbered `size` higher.  Replacements therefore
do not depend on timing, and a resumed batch continues with the same candidates.
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
    """One explore batch in flight; `stored`: its groups that are already in the buffer."""

    def __init__(
        self, number: int, settings: ExplorerSettings, stored: Iterable[StoredGroup] = ()
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
        # groups run by this process, with their rewards before the operators
        self.played: list[PlayedGroup] = []
        self.pipeline: list[Metric] = []  # metrics of the operators
        self.accepted = 0
        self.reasons: Counter[str] = Counter()
        self.cut_short = False  # the trainer finished before all groups began
        self.all_begun = asyncio.Event()  # set when the first group of every place has begun
        self.closed = asyncio.Event()
        self.began = time.monotonic()
        self.max_refill = self._refills_left = (
            3 * s.batch_size if s.max_refill is None else s.max_refill
        )
        self._stored = {h.task: h.accepted for h in stored}
        self._waiting = 0

    def first_task(self, place: int) -> int | None:
        """Return the task number to run first at `place`, skipping stored groups; None = nothing
        to run.
        """
        number: int | None = place
        while number is not None and number in self._stored:
            if self._stored[number]:
                self._accept()
                return None
            self.reasons["held"] += 1
            number = self.replacement(number)
        return number

    def replacement(self, number: int) -> int | None:
        """Return the task number that replaces the rejected `number`; None when the refills are
        used up or the batch has ended.
        """
        if self._refills_left == 0 or self.ending.reason:
            return None
        self._refills_left -= 1
        return number + self.size

    def add(self, group: PlayedGroup, played: PlayedGroup) -> None:
        """Count the stored `group`; `played` is the group before the operators."""
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
        """Mark the batch as complete, so that the next batch may be closed."""
        if self._timer is not None:
            self._timer.cancel()
        self.closed.set()

    def expect_runs(self, runs: int) -> None:
        """Set the number of runs that will begin; `all_begun` is set then."""
        self._waiting = runs
        if runs == 0:
            self.all_begun.set()

    def note_begun(self, runs: int) -> None:
        """Count `runs` as begun or skipped."""
        self._waiting -= runs
        if self._waiting == 0 and runs:
            self.all_begun.set()

    def __str__(self) -> str:
        """Describe the progress of the batch."""
        rejected = f", {sum(self.reasons.values())} rejected" if self.reasons else ""
        return f"explore step {self.number + 1}: {self.accepted} of {self.size} groups{rejected}"

    @property
    def wall_s(self) -> float:
        return time.monotonic() - self.began


class Breaker:
    """Stops a run after `limit` consecutive groups whose runs all failed, or without any reward."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._consecutive = 0
        self.last = ""  # description of the last failed run

    def check(self, group: PlayedGroup) -> None:
        """Raise RunFailed at the limit, with the traceback of user code."""
        if group.reason in ("over_rollout", REJECTED_WEIGHTS):
            return  # slow runs or broken weights are not errors of the workflow
        failures = [r for r in group.rows if r.status == "failed"]
        if group.reason == "unscored":
            self.last = f"{group.rows[0].id}: {group.detail}"
        elif failures:  # prefer a run that was not ended because others of its task failed
            failure = next((r for r in failures if not r.reason.startswith("ended: ")), failures[0])
            self.last = f"{failure.id}: {failure.reason}\n{failure.info.get('traceback', '')}"
        if not group.wholly_failed and group.reason != "unscored":
            self._consecutive = 0
            return
        self._consecutive += 1
        if self._consecutive >= self._limit:
            how = "failed completely" if group.wholly_failed else "got no reward"
            raise RunFailed(
                f"{self._consecutive} groups in a row {how}, so the run stops.  The last failed "
                f"run was {self.last}"
            )


class RunTimes:
    """Time limit of a run: `max_s`, or after `warmup` batches `ratio` times the mean of all runs so
    far if that is less.

    A timed-out run counts with its elapsed time; otherwise the limit would shrink from batch to
    batch.
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

    def add(self, groups: Iterable[PlayedGroup]) -> None:
        """Add the groups of a finished batch."""
        self._batches += 1
        for run in (r for g in groups for r in g.runs):
            if not run.failed or run.ended == "timeout":
                self._runs += 1
                self._total_s += run.run_s + run.reward_s


class Slots:
    """Semaphore for `limit` concurrent runs: FIFO, but requests with `behind` wait for all others."""

    def __init__(self, limit: int) -> None:
        self.limit = self.free = limit
        self._lines: tuple[deque[_Ticket], deque[_Ticket]] = (deque(), deque())

    @property
    def waiting(self) -> int:
        """Number of runs that wait for a slot."""
        return sum(
            ticket.count for line in self._lines for ticket in line if not ticket.turn.done()
        )

    @asynccontextmanager
    async def take(self, count: int = 1, *, behind: bool = False) -> AsyncIterator[None]:
        """Hold `count` slots at once, at most `limit`."""
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
                if not ticket.turn.done():  # otherwise its run was cancelled
                    self.free -= ticket.count
                    ticket.turn.set_result(None)
            if line:
                return


@dataclass(eq=False)
class _Ticket:
    count: int
    turn: asyncio.Future[None]

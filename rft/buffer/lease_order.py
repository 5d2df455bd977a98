"""Which rows are trained next: decided in memory, from what the ledger stored, without input or
output.

Batches are closed by the explorer; up to the first one that is still open, in order (batch,
explorer), their groups are handed to the selector, which picks for each lease.  A lease never
passes a group that is still being explored. The one invariant: a row is either waiting or in one
lease, and a lease that cannot be filled any more ends by name.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from rft.buffer.row_selectors import (
    REMEDY,
    Clock,
    ClosedBatch,
    Key,
    LeaseRequest,
    Selection,
    WaitingGroup,
    WaitingRow,
    make_selector,
    shortage,
)
from rft.buffer.settings import BufferSettings
from rft.errors import ShortBatch
from rft.types.ports import EndOfData, NeedMore


@dataclass(frozen=True, slots=True)
class Wait:
    """A lease cannot be filled now; `until` (of the selector's clock) something that rests may be
    used again.
    """

    until: float | None = None


class LeaseOrder:
    """All waiting groups of one lineage, and the leases that are out."""

    def __init__(
        self,
        settings: BufferSettings,
        cursor: int,
        groups: list[WaitingGroup],
        clock: Clock = time.monotonic,
    ) -> None:
        self._policy = settings.on_short_batch
        self._num_explorers = settings.num_explorers
        self._selector = make_selector(settings, clock)
        self._next: Key = (cursor, 0)  # the first batch that is not closed
        # groups of batches that are not reached yet
        self._pending: dict[Key, dict[str, WaitingGroup]] = {}
        # batch -> explorers that this run does not have any more
        self._strangers: dict[int, set[int]] = {}
        self._closed: dict[Key, ClosedBatch] = {}
        self._last = cursor - 1  # newest batch that anything is known of
        self._short: deque[str] = deque(maxlen=3)
        # open batches: accepted and rejected groups so far
        self._arrived: dict[Key, list[int]] = {}
        self._finished: dict[int, str] = {}
        self._groups: dict[str, WaitingGroup] = {}
        self.leases: dict[int, Selection] = {}
        self.num_groups = 0  # accepted, and not yet trained in full
        self.num_bytes = 0  # of their payload
        self.num_waiting = 0  # rows
        self.num_leased = 0  # rows
        for group in groups:
            self.add(group.key, group)
        self._advance()

    # ------------------------------------------------------------ what the explorer reports

    def add(self, key: Key, group: WaitingGroup | None) -> None:
        """A group was stored; None = it has nothing to train."""
        if key >= self._next:
            self._arrived.setdefault(key, [0, 0])[group is None] += 1
        if group is None:
            return
        self._groups[group.id] = group
        group.fresh = any(r.uses == 0 for r in group.waiting)
        self.num_groups += group.fresh
        self.num_bytes += group.fresh * group.num_bytes
        self.num_waiting += len(group.waiting)
        if key < self._next:  # of a batch before the cursor: closed in an earlier life
            self._offer(group, group.waiting)
            return
        self._pending.setdefault(key, {})[group.id] = group
        self._last = max(self._last, key[0])
        if key[1] >= self._num_explorers:
            self._strangers.setdefault(key[0], set()).add(key[1])

    def close(self, key: Key, closed: ClosedBatch) -> None:
        # an explorer that began again closes batches that were passed long ago
        if key >= self._next:
            self._closed[key] = closed
            self._last = max(self._last, key[0])
            self._arrived.pop(key, None)
            self._advance()

    def finish(self, explorer: int, reason: str) -> None:
        self._finished[explorer] = reason
        self._advance()

    @property
    def finished(self) -> str | None:
        """Why no more rows come; None while some explorer goes on."""
        done = [self._finished.get(e) for e in range(self._num_explorers)]
        return None if None in done else "; ".join(dict.fromkeys(r for r in done if r))

    # ------------------------------------------------------------ what the trainer asks for

    def lease(self, wanted: LeaseRequest) -> Selection | Wait:
        """The rows of a step, leased to it, or Wait as long as more is to come.  Raises ShortBatch,
        EndOfData, NeedMore.
        """
        choice = self._selector.pick(wanted)
        try:
            found = self._judge(wanted, choice)
        except BaseException:
            self._selector.undo(choice)
            raise
        if isinstance(found, Wait):
            self._selector.undo(choice)
            return found
        choice.missing += choice.gaps
        for group, rows in choice.dropped_rows:
            self._out(group, rows)
            self._settle(group)
        for group, rows in choice.picked:
            self._out(group, rows)
            group.leased += len(rows)
            self.num_leased += len(rows)
        self.leases[wanted.step] = choice
        return choice

    def give_back(self, step: int) -> None:
        """The lease could not be handed out: everything is as it was before."""
        choice = self.leases.pop(step)
        for group, rows in choice.picked:
            group.leased -= len(rows)
            self.num_leased -= len(rows)
        for group, rows in (*choice.picked, *choice.dropped_rows):
            self._in(group, rows)
        self._selector.undo(choice)

    def done(self, step: int, *, max_uses: int | None) -> list[WaitingGroup]:
        """The lease of `step` was used (or, with max_uses None, explained); the groups that are
        wholly done with.
        """
        over = []
        for group, rows in self.leases.pop(step).picked:
            group.leased -= len(rows)
            self.num_leased -= len(rows)
            for row in rows:
                row.uses += 1
            again = [] if max_uses is None else [r for r in rows if r.uses < max_uses]
            if again:
                self._in(group, again)
                self._offer(group, again, rested=False)
            if self._settle(group):
                over.append(group)
        return over

    def lose(self, step: int, names: set[str]) -> None:
        """The payload of these groups is gone: the lease of `step` goes on without them."""
        choice = self.leases[step]
        for group, rows in [p for p in choice.picked if p[0].id in names]:
            choice.picked.remove((group, rows))
            group.leased -= len(rows)
            self.num_leased -= len(rows)
            self._settle(group)
        choice.taken = [p for p in choice.taken if p.group is None or p.group.id not in names]
        choice.split = [p for p in choice.split if p.group is None or p.group.id not in names]

    # ------------------------------------------------------------ what people ask

    @property
    def open_batch(self) -> Key:
        """The first batch that is not closed; no lease goes past it."""
        return self._next

    def missing(self, wanted: LeaseRequest) -> str:
        """Who a lease waits for, in words."""
        try:
            choice = self._selector.pick(wanted)
        except ShortBatch as e:
            return str(e)
        self._selector.undo(choice)
        return self._words(wanted, choice.missing)

    # ------------------------------------------------------------ inside

    def _words(self, wanted: LeaseRequest, missing: int) -> str:
        resting = self._selector.resting(wanted)[1]
        have = f"step {wanted.step} has {wanted.amount - missing} of {wanted.amount} {wanted.unit}"
        have += f" ({resting} more rest until their cool-down is over)" if resting else ""
        if self.finished is not None and self._next[0] > self._last:
            return f"{have}; the explorer has finished"
        batch, explorer = self._next
        accepted, rejected = self._arrived.get(self._next, [0, 0])
        who = (
            f"batch {batch} of explorer {explorer} is still open with {accepted + rejected} "
            f"groups stored"
        )
        return f"{have}; {who} ({accepted} accepted, {rejected} rejected)"

    def _judge(self, wanted: LeaseRequest, choice: Selection) -> Selection | Wait:
        if not choice.missing:
            if choice.picked:
                return choice
            raise ShortBatch(
                f"step {wanted.step} has no group to train: the batch's groups were all rejected. "
                f"{REMEDY}"
            )
        ready_at, resting = self._selector.resting(wanted)
        if self.finished is None and (wanted.until is None or self._next[0] < wanted.until):
            return Wait(ready_at)
        if resting >= choice.missing:
            return Wait(ready_at)
        if self.finished is not None:
            return self._rest(wanted, choice)
        if self._policy == "carry":
            raise NeedMore(self._next[0])
        if self._policy == "train" and choice.picked:
            return choice
        raise ShortBatch(
            f"step {wanted.step} cannot be filled: it has {wanted.amount - choice.missing} of "
            f"{wanted.amount} {wanted.unit}, and batch "
            f"{self._next[0]} is explored only after it was trained{self._why()}. {REMEDY}"
        )

    def _rest(self, wanted: LeaseRequest, choice: Selection) -> Selection:
        left = self.num_waiting
        stale = sum(len(rows) for _, rows in choice.dropped.get("stale", ()))
        if not left or (not choice.picked and stale == left):
            raise EndOfData(f"nothing is left for step {wanted.step}: {self.finished}")
        if self._policy == "train" and choice.picked:
            return choice
        if self._policy == "carry" or not any(g.fresh for g in self._groups.values()):
            raise EndOfData(
                f"{self.finished}; {self._words(wanted, choice.missing)}, "
                f"so {left} experiences stay in the buffer, too few for a step"
            )
        raise ShortBatch(
            f"no more rows come ({self.finished}), but "
            f"{self._words(wanted, choice.missing)}{self._why()}. {REMEDY}"
        )

    def _why(self) -> str:
        short = [
            *self._short,
            *(shortage(k, c) for k, c in sorted(self._closed.items()) if c.short),
        ]
        return f"; {'; '.join(short[:3])}" if short else ""

    def _advance(self) -> None:
        """Hands the groups of closed batches to the selector, in order, up to the first batch that
        is open.
        """
        while self.finished is None or self._next[0] <= self._last:
            batch, explorer = self._next
            if explorer < self._num_explorers:
                if (closed := self._closed.pop(self._next, None)) is None:
                    return
                if closed.short:
                    self._short.append(shortage(self._next, closed))
                self._reach(self._next, closed)
                self._next = (batch, explorer + 1)
            else:  # an explorer that is not there any more has closed all its batches
                for stranger in sorted(self._strangers.pop(batch, ())):
                    self._reach((batch, stranger), ClosedBatch(0, 0, {}))
                self._next = (batch + 1, 0)

    def _reach(self, key: Key, closed: ClosedBatch) -> None:
        self._selector.closed(key, closed)
        self._arrived.pop(key, None)
        for group in sorted(self._pending.pop(key, {}).values(), key=lambda g: (g.task, g.id)):
            self._offer(group, group.waiting)

    def _offer(self, group: WaitingGroup, rows: list[WaitingRow], *, rested: bool = True) -> None:
        """Rows of a group wait for the selector; those used equally often stay together."""
        by_uses: dict[int, list[WaitingRow]] = {}
        for row in rows:
            by_uses.setdefault(row.uses, []).append(row)
        for uses, part in by_uses.items():
            self._selector.put(group, part, rested=rested and not uses)

    def _in(self, group: WaitingGroup, rows: list[WaitingRow]) -> None:
        group.waiting = sorted([*rows, *group.waiting], key=lambda r: r.id)
        self.num_waiting += len(rows)
        self._settle(group)

    def _out(self, group: WaitingGroup, rows: list[WaitingRow]) -> None:
        gone = {r.id for r in rows}
        group.waiting = [r for r in group.waiting if r.id not in gone]
        self.num_waiting -= len(rows)

    def _settle(self, group: WaitingGroup) -> bool:
        """Keeps `num_groups` right; True when the group is wholly done with."""
        fresh = any(r.uses == 0 for r in group.waiting) or (group.fresh and group.leased > 0)
        self.num_groups += fresh - group.fresh
        self.num_bytes += (fresh - group.fresh) * group.num_bytes
        group.fresh = fresh
        if group.waiting or group.leased:
            self._groups[group.id] = group
            return False
        self._groups.pop(group.id, None)
        return True

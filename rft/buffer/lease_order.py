"""The order in which stored rows are trained, in memory and without input or output.

The explorer closes batches; up to the first open batch, in order (batch, explorer), their groups go
to the selector, which picks rows for each lease.  A lease never passes a group still being
explored. Invariant: a row is either ready or in one lease, and a lease that can never be filled
ends with a named error.
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
    ReadyGroup,
    ReadyRow,
    Selection,
    make_selector,
    shortage,
)
from rft.buffer.settings import BufferSettings
from rft.errors import ShortBatch
from rft.types.ports import EndOfData, NeedMore


@dataclass(frozen=True, slots=True)
class Wait:
    """A lease cannot be filled now; at `until` (selector's clock) resting rows may be used again."""

    until: float | None = None


class LeaseOrder:
    """All ready groups of one lineage, and the open leases."""

    def __init__(
        self,
        settings: BufferSettings,
        cursor: int,
        groups: list[ReadyGroup],
        clock: Clock = time.monotonic,
    ) -> None:
        self._policy = settings.on_short_batch
        self._num_explorers = settings.num_explorers
        self._selector = make_selector(settings, clock)
        self._next: Key = (cursor, 0)  # the first open batch
        # groups of batches beyond it
        self._pending: dict[Key, dict[str, ReadyGroup]] = {}
        # batch -> explorers that this run no longer has
        self._strangers: dict[int, set[int]] = {}
        self._closed: dict[Key, ClosedBatch] = {}
        self._last = cursor - 1  # newest known batch
        self._short: deque[str] = deque(maxlen=3)
        # open batches: [accepted, rejected] groups so far
        self._arrived: dict[Key, list[int]] = {}
        self._finished: dict[int, str] = {}
        self._groups: dict[str, ReadyGroup] = {}
        self.leases: dict[int, Selection] = {}
        self.num_groups = 0  # accepted, not yet fully trained
        self.num_bytes = 0  # of their payload
        self.num_ready = 0  # rows
        self.num_leased = 0  # rows
        for group in groups:
            self.add(group.key, group)
        self._advance()

    # ------------------------------------------------------------ what the explorer reports

    def add(self, key: Key, group: ReadyGroup | None) -> None:
        """Add a stored group; None = a group without a trainable row."""
        if key >= self._next:
            self._arrived.setdefault(key, [0, 0])[group is None] += 1
        if group is None:
            return
        self._groups[group.id] = group
        group.fresh = any(r.uses == 0 for r in group.ready)
        self.num_groups += group.fresh
        self.num_bytes += group.fresh * group.num_bytes
        self.num_ready += len(group.ready)
        if key < self._next:  # its batch was closed in an earlier lineage
            self._offer(group, group.ready)
            return
        self._pending.setdefault(key, {})[group.id] = group
        self._last = max(self._last, key[0])
        if key[1] >= self._num_explorers:
            self._strangers.setdefault(key[0], set()).add(key[1])

    def close(self, key: Key, closed: ClosedBatch) -> None:
        # a restarted explorer may close batches that were passed before
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
        """Return why no more rows come; None while an explorer is running."""
        done = [self._finished.get(e) for e in range(self._num_explorers)]
        return None if None in done else "; ".join(dict.fromkeys(r for r in done if r))

    # ------------------------------------------------------------ what the trainer asks for

    def lease(self, request: LeaseRequest) -> Selection | Wait:
        """Lease the rows of a step, or return Wait while more groups can come.

        Raises ShortBatch, EndOfData, NeedMore.
        """
        choice = self._selector.pick(request)
        try:
            selection = self._check(request, choice)
        except BaseException:
            self._selector.undo(choice)
            raise
        if isinstance(selection, Wait):
            self._selector.undo(choice)
            return selection
        choice.missing += choice.gaps
        for group, rows in choice.dropped_rows:
            self._take_out(group, rows)
            self._settle(group)
        for group, rows in choice.picked:
            self._take_out(group, rows)
            group.leased += len(rows)
            self.num_leased += len(rows)
        self.leases[request.step] = choice
        return choice

    def give_back(self, step: int) -> None:
        """Undo a lease that was not handed out."""
        choice = self.leases.pop(step)
        for group, rows in choice.picked:
            group.leased -= len(rows)
            self.num_leased -= len(rows)
        for group, rows in (*choice.picked, *choice.dropped_rows):
            self._put_back(group, rows)
        self._selector.undo(choice)

    def finish_lease(self, step: int, *, max_uses: int | None) -> list[ReadyGroup]:
        """Finish the lease of `step`, used or (max_uses None) discarded; return finished groups."""
        over = []
        for group, rows in self.leases.pop(step).picked:
            group.leased -= len(rows)
            self.num_leased -= len(rows)
            for row in rows:
                row.uses += 1
            again = [] if max_uses is None else [r for r in rows if r.uses < max_uses]
            if again:
                self._put_back(group, again)
                self._offer(group, again, rested=False)
            if self._settle(group):
                over.append(group)
        return over

    def drop_groups(self, step: int, names: set[str]) -> None:
        """Remove groups without payload from the lease of `step`."""
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
        """Return the first open batch; no lease goes past it."""
        return self._next

    def missing(self, request: LeaseRequest) -> str:
        """Describe what a lease waits for."""
        try:
            choice = self._selector.pick(request)
        except ShortBatch as e:
            return str(e)
        self._selector.undo(choice)
        return self._describe_missing(request, choice.missing)

    # ------------------------------------------------------------ inside

    def _describe_missing(self, request: LeaseRequest, missing: int) -> str:
        resting = self._selector.resting(request)[1]
        have = (
            f"step {request.step} has {request.amount - missing} of {request.amount} {request.unit}"
        )
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

    def _check(self, request: LeaseRequest, choice: Selection) -> Selection | Wait:
        if not choice.missing:
            if choice.picked:
                return choice
            raise ShortBatch(
                f"step {request.step} has no group to train: the batch's groups were all rejected. "
                f"{REMEDY}"
            )
        ready_at, resting = self._selector.resting(request)
        if self.finished is None and (request.until is None or self._next[0] < request.until):
            return Wait(ready_at)
        if resting >= choice.missing:
            return Wait(ready_at)
        if self.finished is not None:
            return self._last_rows(request, choice)
        if self._policy == "carry":
            raise NeedMore(self._next[0])
        if self._policy == "train" and choice.picked:
            return choice
        raise ShortBatch(
            f"step {request.step} cannot be filled: it has {request.amount - choice.missing} of "
            f"{request.amount} {request.unit}, and batch "
            f"{self._next[0]} is explored only after it was trained{self._shortages()}. {REMEDY}"
        )

    def _last_rows(self, request: LeaseRequest, choice: Selection) -> Selection:
        remaining = self.num_ready
        stale = sum(len(rows) for _, rows in choice.dropped.get("stale", ()))
        if not remaining or (not choice.picked and stale == remaining):
            raise EndOfData(f"nothing is left for step {request.step}: {self.finished}")
        if self._policy == "train" and choice.picked:
            return choice
        if self._policy == "carry" or not any(g.fresh for g in self._groups.values()):
            raise EndOfData(
                f"{self.finished}; {self._describe_missing(request, choice.missing)}, "
                f"so {remaining} experiences stay in the buffer, too few for a step"
            )
        raise ShortBatch(
            f"no more rows come ({self.finished}), but "
            f"{self._describe_missing(request, choice.missing)}{self._shortages()}. {REMEDY}"
        )

    def _shortages(self) -> str:
        short = [
            *self._short,
            *(shortage(k, c) for k, c in sorted(self._closed.items()) if c.short),
        ]
        return f"; {'; '.join(short[:3])}" if short else ""

    def _advance(self) -> None:
        """Offer the groups of closed batches to the selector, in order, up to the first open batch."""
        while self.finished is None or self._next[0] <= self._last:
            batch, explorer = self._next
            if explorer < self._num_explorers:
                if (closed := self._closed.pop(self._next, None)) is None:
                    return
                if closed.short:
                    self._short.append(shortage(self._next, closed))
                self._reach(self._next, closed)
                self._next = (batch, explorer + 1)
            else:  # a former explorer has closed all its batches
                for stranger in sorted(self._strangers.pop(batch, ())):
                    self._reach((batch, stranger), ClosedBatch(0, 0, {}))
                self._next = (batch + 1, 0)

    def _reach(self, key: Key, closed: ClosedBatch) -> None:
        self._selector.closed(key, closed)
        self._arrived.pop(key, None)
        for group in sorted(self._pending.pop(key, {}).values(), key=lambda g: (g.task, g.id)):
            self._offer(group, group.ready)

    def _offer(self, group: ReadyGroup, rows: list[ReadyRow], *, rested: bool = True) -> None:
        """Put rows of a group into the selector; rows used equally often stay together."""
        by_uses: dict[int, list[ReadyRow]] = {}
        for row in rows:
            by_uses.setdefault(row.uses, []).append(row)
        for uses, part in by_uses.items():
            self._selector.put(group, part, rested=rested and not uses)

    def _put_back(self, group: ReadyGroup, rows: list[ReadyRow]) -> None:
        group.ready = sorted([*rows, *group.ready], key=lambda r: r.id)
        self.num_ready += len(rows)
        self._settle(group)

    def _take_out(self, group: ReadyGroup, rows: list[ReadyRow]) -> None:
        ids = {r.id for r in rows}
        group.ready = [r for r in group.ready if r.id not in ids]
        self.num_ready -= len(rows)

    def _settle(self, group: ReadyGroup) -> bool:
        """Update `num_groups` and `num_bytes`; return whether the group is finished."""
        fresh = any(r.uses == 0 for r in group.ready) or (group.fresh and group.leased > 0)
        self.num_groups += fresh - group.fresh
        self.num_bytes += (fresh - group.fresh) * group.num_bytes
        group.fresh = fresh
        if group.ready or group.leased:
            self._groups[group.id] = group
            return False
        self._groups.pop(group.id, None)
        return True

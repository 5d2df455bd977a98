"""Select rows of closed batches for leases: oldest first, or by priority with replay.  Also defines
the records for it.

Depends on neither the ledger nor input or output; time comes from a clock.  Invariant: `undo`
restores the previous order.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from msgspec import Struct

from rft.buffer.priority import Candidate, PriorityFn
from rft.buffer.settings import BufferSettings, ReplaySettings
from rft.errors import BufferFailed, ShortBatch
from rft.plugins import REGISTRY
from rft.types.ports import GroupStats

Clock = Callable[[], float]  # monotonic seconds
Key = tuple[int, int]  # (batch, explorer)
DAMAGED = "payload_damaged"
# reasons with which a lease explains rows that it drops
DROPPED = ("stale", "evicted", DAMAGED)


# ReadyRow, ReadyGroup and Portion may be very many; none is part of a reference cycle, so the
# garbage collector can skip them


class ReadyRow(Struct, gc=False):
    id: str
    position: int  # in the group's block
    oldest_step: int | None
    uses: int = 0
    # reward when stored; an edit is seen by the lease, not here
    reward: float | None = None


class ReadyGroup(Struct, gc=False):
    """An accepted group with rows that are ready (for a lease) or leased."""

    id: str
    batch: int
    explorer: int
    task: int
    locator: str
    ready: list[ReadyRow]
    leased: int = 0
    num_bytes: int = 0  # of its payload
    fresh: bool = True  # whether some row is untrained
    frozen: GroupStats | None = None  # statistics of its first lease, reused by later ones

    @property
    def key(self) -> Key:
        return (self.batch, self.explorer)


@dataclass(slots=True)
class ClosedBatch:
    """The explorer's report on a batch; `accepted` is the ledger's count."""

    accepted: int
    expected: int
    reasons: dict[str, int]

    @property
    def short(self) -> int:
        return max(0, self.expected - self.accepted)


class Portion(Struct, gc=False):
    """Rows of one group that a selector hands out together; without a group: `gaps` missing groups
    of a batch.
    """

    group: ReadyGroup | None
    rows: list[ReadyRow]
    batch: Key
    gaps: int = 0
    dead: bool = False  # replaced or taken; skip its entry in a heap
    priority: float = 0.0


@dataclass(slots=True)
class Selection:
    """Rows for one train batch, in order, and rows that were dropped on the way."""

    picked: list[tuple[ReadyGroup, list[ReadyRow]]] = field(default_factory=list)
    # by reason, see DROPPED
    dropped: dict[str, list[tuple[ReadyGroup, list[ReadyRow]]]] = field(default_factory=dict)
    missing: int = 0  # number of missing groups or rows
    taken: list[Portion] = field(default_factory=list)  # for the selector's `undo`
    split: list[Portion] = field(default_factory=list)
    gaps: int = 0
    num_rows: int = 0
    _places: dict[str, int] = field(default_factory=dict)

    def add(self, group: ReadyGroup, rows: list[ReadyRow]) -> None:
        """Add rows of a group; a group already in the selection counts once."""
        self.num_rows += len(rows)
        if (i := self._places.setdefault(group.id, len(self.picked))) < len(self.picked):
            rows = sorted([*self.picked[i][1], *rows], key=lambda r: r.id)
            self.picked[i] = (group, rows)
        else:
            self.picked.append((group, rows))

    def drop(self, reason: str, group: ReadyGroup, rows: list[ReadyRow]) -> None:
        self.dropped.setdefault(reason, []).append((group, rows))

    @property
    def dropped_rows(self) -> list[tuple[ReadyGroup, list[ReadyRow]]]:
        return [part for parts in self.dropped.values() for part in parts]


@dataclass(frozen=True, slots=True)
class LeaseRequest:
    """Arguments of a lease.

    `until`: the first explore batch that cannot begin before the step is trained (None: unknown).
    """

    step: int
    groups: int | None
    rows: int | None
    max_staleness: int | None
    until: int | None = None

    def __post_init__(self) -> None:
        amount = self.groups if self.rows is None else self.rows
        if (
            (self.groups is None) == (self.rows is None)
            or amount is None
            or amount < 1
            or self.step < 1
        ):
            raise BufferFailed(
                f"lease of step {self.step} for groups={self.groups}, rows={self.rows}: steps "
                f"count from 1, "
                "and exactly one of groups and rows must be given, at least 1"
            )

    def lacks(self, rows: int, groups: int) -> int:
        """Return how many are missing besides these, in the lease's unit."""
        return max(0, self.amount - (groups if self.rows is None else rows))

    @property
    def unit(self) -> str:
        return "rows" if self.rows is not None else "groups"

    @property
    def amount(self) -> int:
        return self.rows or self.groups or 0

    def stale(self, row: ReadyRow) -> bool:
        """Return whether the row is too old: optimizer steps before this one, minus the row's
        oldest train step.
        """
        if self.max_staleness is None or row.oldest_step is None:
            return False
        return (self.step - 1) - row.oldest_step > self.max_staleness

    def split(self, rows: list[ReadyRow]) -> tuple[list[ReadyRow], list[ReadyRow]]:
        """Return (fresh rows, stale rows)."""
        if self.max_staleness is None:
            return rows, []
        fresh = [r for r in rows if not self.stale(r)]
        return fresh, ([r for r in rows if self.stale(r)] if len(fresh) < len(rows) else [])


REMEDY = "Raise buffer.max_refill, ease the filters, or set buffer.on_short_batch to train or carry"


def make_selector(settings: BufferSettings, clock: Clock = time.monotonic) -> RowSelector:
    """Return the selector that the settings ask for."""
    return (
        Fifo(settings) if settings.replay is None else ByPriority(settings, settings.replay, clock)
    )


class RowSelector:
    """Holds the rows that wait to be read, in a heap of portions by `_rank`."""

    def __init__(self) -> None:
        self._heap: list[tuple[Any, int, Portion]] = []
        self._heaps: list[list[Any]] = [self._heap]
        self._killed = 0  # since dead portions were last removed from the heaps
        self._numbers = count()

    def closed(self, key: Key, closed: ClosedBatch) -> None:
        """Note a closed batch, whose groups follow by `put`; batches come in order."""

    def put(self, group: ReadyGroup, rows: list[ReadyRow], *, rested: bool = True) -> None:
        """Make rows of a group available; `rested` False: the rows were just trained."""
        raise NotImplementedError

    def pick(self, request: LeaseRequest) -> Selection:
        """Take rows out, as many as available.

        Raises ShortBatch, taking nothing, for a batch that must not be passed.
        """
        choice = Selection(missing=request.amount)
        while choice.missing and self._heap:
            portion = heapq.heappop(self._heap)[2]
            if not portion.dead:
                self._take(choice, portion)
                self._choose(request, choice, portion)
        return choice

    def undo(self, choice: Selection) -> None:
        """Put back the rows that `pick` took."""
        # remainders of taken portions; a remainder may have been evicted since
        rests = {id(p) for p in choice.split}
        for portion in [p for p in choice.split if not p.dead]:
            self._kill(portion)
        for portion in [p for p in choice.taken if id(p) not in rests]:
            self._add(
                Portion(
                    portion.group,
                    portion.rows,
                    portion.batch,
                    portion.gaps,
                    priority=portion.priority,
                )
            )

    def resting(self, request: LeaseRequest) -> tuple[float | None, int]:
        """Return (when the first resting rows may be used again, how many groups or rows rest)."""
        return None, 0

    def _rank(self, portion: Portion) -> Any:
        raise NotImplementedError

    def _add(self, portion: Portion) -> None:
        heapq.heappush(self._heap, (self._rank(portion), next(self._numbers), portion))

    def _take(self, choice: Selection, portion: Portion) -> None:
        choice.taken.append(portion)
        self._kill(portion)

    def _kill(self, portion: Portion) -> None:
        """Mark a portion as deleted; compact the heaps once about half of the entries may be dead."""
        portion.dead = True
        self._killed += 1
        if 4 * self._killed > 256 + sum(map(len, self._heaps)):
            self._killed = 0
            for heap in self._heaps:
                heap[:] = [entry for entry in heap if not entry[-1].dead]
                heapq.heapify(heap)

    def _choose(self, request: LeaseRequest, choice: Selection, portion: Portion) -> None:
        """Move fitting rows of a portion into the choice; drop stale rows, keep the surplus."""
        group = portion.group
        assert group is not None
        fresh, stale = request.split(portion.rows)
        if stale:
            choice.drop("stale", group, stale)
        part = fresh[: choice.missing] if request.rows is not None else fresh
        if part:
            choice.add(group, part)
        if len(part) < len(fresh):
            rest = Portion(group, fresh[len(part) :], portion.batch, priority=portion.priority)
            choice.split.append(rest)
            self._add(rest)
        choice.missing = request.lacks(choice.num_rows, len(choice.picked) + choice.gaps)


class Fifo(RowSelector):
    """Oldest first: batches in order (batch, explorer), groups in order of their task, rows in
    order of their id.

    So the same stored groups give the same train batches, whatever their speed of arrival.  Rows do
    not rest: rows with a further use return to their previous place.
    """

    def __init__(self, settings: BufferSettings) -> None:
        super().__init__()
        self._policy = settings.on_short_batch
        self._short: dict[Key, ClosedBatch] = {}

    def closed(self, key: Key, closed: ClosedBatch) -> None:
        if closed.short and self._policy != "carry":
            self._short[key] = closed
            self._add(Portion(None, [], key, gaps=closed.short))

    def put(self, group: ReadyGroup, rows: list[ReadyRow], *, rested: bool = True) -> None:
        self._add(Portion(group, rows, group.key))

    def _rank(self, portion: Portion) -> tuple[int, int, int, int, str, str]:
        batch, explorer = portion.batch
        if portion.group is None:
            return (batch, explorer, 0 if self._policy == "stop" else 2, 0, "", "")
        return (batch, explorer, 1, portion.group.task, portion.group.id, portion.rows[0].id)

    def _choose(self, request: LeaseRequest, choice: Selection, portion: Portion) -> None:
        if portion.group is not None:
            super()._choose(request, choice, portion)
            return
        closed = self._short[portion.batch]
        if self._policy == "stop":
            self.undo(choice)
            raise ShortBatch(
                f"step {request.step} cannot be filled: {shortage(portion.batch, closed)}. {REMEDY}"
            )
        # a short batch shortens the step that trains its groups, or any step if it has no groups
        has_groups = any(g.key == portion.batch for g, _ in choice.picked)
        if request.rows is None and (has_groups or closed.accepted == 0):
            choice.gaps += portion.gaps
            choice.missing = request.lacks(choice.num_rows, len(choice.picked) + choice.gaps)


class ByPriority(RowSelector):
    """Highest priority first, with replay: a group may be trained again, after a rest, up to
    `max_uses` times.

    Between two uses of a row at least `cooldown_s` seconds pass; a new process restarts the count.
    At most `capacity` groups are kept for another use; the lowest beyond it are evicted.  A short
    batch does not matter; only a lease that cannot be filled does.
    """

    def __init__(self, settings: BufferSettings, replay: ReplaySettings, clock: Clock) -> None:
        super().__init__()
        plugin = REGISTRY.get("priority", replay.priority_fn)
        args = plugin.args(**replay.priority_fn_args) if plugin.args is not None else None
        self._name = replay.priority_fn
        self._fn: PriorityFn = plugin.obj(args, replay.seed)
        self._cooldown = replay.cooldown_s or 0.0
        self._capacity = settings.capacity
        self._clock = clock
        self._resting: list[tuple[float, int, Portion]] = []  # soonest first
        # ready or resting, and used before: lowest first
        self._used: list[tuple[float, str, int, Portion]] = []
        self._heaps += [self._resting, self._used]
        self._num_used = 0

    def put(self, group: ReadyGroup, rows: list[ReadyRow], *, rested: bool = True) -> None:
        portion = Portion(group, rows, group.key, priority=self._priority(group, rows))
        if rested:
            self._add(portion)
            return
        heapq.heappush(
            self._resting, (self._clock() + self._cooldown, next(self._numbers), portion)
        )
        self._count(portion)

    def pick(self, request: LeaseRequest) -> Selection:
        now = self._clock()
        while self._resting and self._resting[0][0] <= now:
            portion = heapq.heappop(self._resting)[2]
            if not portion.dead:
                super()._add(portion)
        choice = super().pick(request)
        if not choice.missing:
            self._evict(choice)
        return choice

    def resting(self, request: LeaseRequest) -> tuple[float | None, int]:
        alive = [(at, p) for at, _, p in self._resting if not p.dead]
        fresh = [len(request.split(p.rows)[0]) for _, p in alive]
        first = min((at for at, _ in alive), default=None)
        return first, sum(fresh) if request.rows is not None else sum(bool(n) for n in fresh)

    def _priority(self, group: ReadyGroup, rows: list[ReadyRow]) -> float:
        x = Candidate(
            group=group.id,
            batch=group.batch,
            task=group.task,
            model_version=min(
                (r.oldest_step for r in rows if r.oldest_step is not None), default=0
            ),
            use_count=max(r.uses for r in rows),
            rewards=tuple(r.reward for r in rows),
        )
        try:
            priority = float(self._fn(x))
        except Exception as e:  # a plugin may raise anything; the message names it
            raise BufferFailed(
                f"priority function {self._name!r} failed on {x}: {type(e).__name__}: {e}"
            ) from e
        if math.isnan(priority):
            raise BufferFailed(
                f"priority function {self._name!r} gave NaN for {x}; it must give a number"
            )
        return priority

    def _rank(self, portion: Portion) -> tuple[float, str]:
        return (-portion.priority, portion.rows[0].id)

    def _add(self, portion: Portion) -> None:
        super()._add(portion)
        self._count(portion)

    def _count(self, portion: Portion) -> None:
        if portion.rows[0].uses:
            self._num_used += 1
            heapq.heappush(
                self._used, (portion.priority, portion.rows[0].id, next(self._numbers), portion)
            )

    def _kill(self, portion: Portion) -> None:
        super()._kill(portion)
        self._num_used -= portion.rows[0].uses > 0

    def _evict(self, choice: Selection) -> None:
        while self._num_used > self._capacity:
            portion = heapq.heappop(self._used)[3]
            if not portion.dead:
                assert portion.group is not None
                self._take(choice, portion)
                choice.drop("evicted", portion.group, portion.rows)


def shortage(key: Key, closed: ClosedBatch) -> str:
    """Describe a short batch."""
    reasons = (
        ", ".join(f"{n} {r}" for r, n in sorted(closed.reasons.items())) or "no group was rejected"
    )
    return (
        f"batch {key[0]} of explorer {key[1]} has {closed.accepted} of {closed.expected} groups "
        f"that can be trained ({reasons})"
    )

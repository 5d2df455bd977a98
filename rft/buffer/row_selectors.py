"""In which order the rows of closed batches are read: oldest first, or by priority with replay.
And the records that tell of them.

Knows neither the ledger nor input or output; time comes from a clock.  The one invariant: what
`undo` gives back stands where it stood.
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

Clock = Callable[[], float]  # seconds that only go forward
Key = tuple[int, int]  # (batch, explorer)
DAMAGED = "payload_damaged"
# reasons by which a lease explains rows that it does not take
DROPPED = ("stale", "evicted", DAMAGED)


# of these three there may be very many; none refers to itself by a circle, so the garbage collector
# need not walk over them


class WaitingRow(Struct, gc=False):
    id: str
    position: int  # in the group's block
    oldest_step: int | None
    uses: int = 0
    # as it came; an edit before the lease is seen by the lease, not here
    reward: float | None = None


class WaitingGroup(Struct, gc=False):
    """An accepted group with rows that wait or are leased."""

    id: str
    batch: int
    explorer: int
    task: int
    locator: str
    waiting: list[WaitingRow]
    leased: int = 0
    num_bytes: int = 0  # of its payload
    fresh: bool = True  # some row was not trained yet
    frozen: GroupStats | None = None  # statistics of its first lease; they hold for later ones

    @property
    def key(self) -> Key:
        return (self.batch, self.explorer)


@dataclass(slots=True)
class ClosedBatch:
    """What the explorer said about a batch; `accepted` as the ledger counts it."""

    accepted: int
    wanted: int
    reasons: dict[str, int]

    @property
    def short(self) -> int:
        return max(0, self.wanted - self.accepted)


class Portion(Struct, gc=False):
    """Rows of one group that a selector hands out together; without a group it stands for `gaps`
    missing ones of a batch.
    """

    group: WaitingGroup | None
    rows: list[WaitingRow]
    batch: Key
    gaps: int = 0
    dead: bool = False  # was put together anew; what is left of it in a heap is passed over
    priority: float = 0.0


@dataclass(slots=True)
class Selection:
    """Rows for one train batch, in order, and those that are left out for good on the way."""

    picked: list[tuple[WaitingGroup, list[WaitingRow]]] = field(default_factory=list)
    # by reason, see DROPPED
    dropped: dict[str, list[tuple[WaitingGroup, list[WaitingRow]]]] = field(default_factory=dict)
    missing: int = 0  # groups or rows fewer than asked for
    taken: list[Portion] = field(default_factory=list)  # for the selector's `undo`
    split: list[Portion] = field(default_factory=list)
    gaps: int = 0
    num_rows: int = 0
    _places: dict[str, int] = field(default_factory=dict)

    def add(self, group: WaitingGroup, rows: list[WaitingRow]) -> None:
        """Rows of a group; a group that is here already counts once."""
        self.num_rows += len(rows)
        if (i := self._places.setdefault(group.id, len(self.picked))) < len(self.picked):
            rows = sorted([*self.picked[i][1], *rows], key=lambda r: r.id)
            self.picked[i] = (group, rows)
        else:
            self.picked.append((group, rows))

    def drop(self, reason: str, group: WaitingGroup, rows: list[WaitingRow]) -> None:
        self.dropped.setdefault(reason, []).append((group, rows))

    @property
    def dropped_rows(self) -> list[tuple[WaitingGroup, list[WaitingRow]]]:
        return [part for parts in self.dropped.values() for part in parts]


@dataclass(frozen=True, slots=True)
class LeaseRequest:
    """What one lease asks for.  `until`: the first explore batch that cannot begin before the step
    is trained (None: not known).
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
        """How many are missing beside these, in the lease's unit."""
        return max(0, self.amount - (groups if self.rows is None else rows))

    @property
    def unit(self) -> str:
        return "rows" if self.rows is not None else "groups"

    @property
    def amount(self) -> int:
        return self.rows or self.groups or 0

    def stale(self, row: WaitingRow) -> bool:
        """Staleness = optimizer steps finished before this one, less the row's oldest train step."""
        if self.max_staleness is None or row.oldest_step is None:
            return False
        return (self.step - 1) - row.oldest_step > self.max_staleness

    def split(self, rows: list[WaitingRow]) -> tuple[list[WaitingRow], list[WaitingRow]]:
        """(those that may be trained, those too old)."""
        if self.max_staleness is None:
            return rows, []
        fresh = [r for r in rows if not self.stale(r)]
        return fresh, ([r for r in rows if self.stale(r)] if len(fresh) < len(rows) else [])


REMEDY = "Raise buffer.max_refill, ease the filters, or set buffer.on_short_batch to train or carry"


def make_selector(settings: BufferSettings, clock: Clock = time.monotonic) -> RowSelector:
    """The order of reading that the settings ask for."""
    return (
        Fifo(settings) if settings.replay is None else ByPriority(settings, settings.replay, clock)
    )


class RowSelector:
    """Holds what waits to be read, in a heap of portions by `_rank`."""

    def __init__(self) -> None:
        self._heap: list[tuple[Any, int, Portion]] = []
        self._heaps: list[list[Any]] = [self._heap]
        self._killed = 0  # since dead portions were last taken out of the heaps
        self._numbers = count()

    def closed(self, key: Key, closed: ClosedBatch) -> None:
        """All groups of this batch follow by `put`; batches come in order."""

    def put(self, group: WaitingGroup, rows: list[WaitingRow], *, rested: bool = True) -> None:
        """Rows of a group may be picked; `rested` False: they have just been trained."""
        raise NotImplementedError

    def pick(self, wanted: LeaseRequest) -> Selection:
        """Takes rows out, as many as there are.  Raises ShortBatch (and takes nothing) for a batch
        that must not be passed.
        """
        choice = Selection(missing=wanted.amount)
        while choice.missing and self._heap:
            portion = heapq.heappop(self._heap)[2]
            if not portion.dead:
                self._take(choice, portion)
                self._choose(wanted, choice, portion)
        return choice

    def undo(self, choice: Selection) -> None:
        """What `pick` took is there again."""
        # of portions that were taken; one may have been taken (evicted) itself since
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

    def resting(self, wanted: LeaseRequest) -> tuple[float | None, int]:
        """(when the first resting rows may be used again, how many groups or rows rest)."""
        return None, 0

    def _rank(self, portion: Portion) -> Any:
        raise NotImplementedError

    def _add(self, portion: Portion) -> None:
        heapq.heappush(self._heap, (self._rank(portion), next(self._numbers), portion))

    def _take(self, choice: Selection, portion: Portion) -> None:
        choice.taken.append(portion)
        self._kill(portion)

    def _kill(self, portion: Portion) -> None:
        """What is left of it in a heap is passed over, or taken out with others once they may be
        half of it.
        """
        portion.dead = True
        self._killed += 1
        if 4 * self._killed > 256 + sum(map(len, self._heaps)):
            self._killed = 0
            for heap in self._heaps:
                heap[:] = [entry for entry in heap if not entry[-1].dead]
                heapq.heapify(heap)

    def _choose(self, wanted: LeaseRequest, choice: Selection, portion: Portion) -> None:
        """Moves what fits of a portion into the choice: stale rows are left out, rows beyond what
        is missing wait again.
        """
        group = portion.group
        assert group is not None
        fresh, stale = wanted.split(portion.rows)
        if stale:
            choice.drop("stale", group, stale)
        part = fresh[: choice.missing] if wanted.rows is not None else fresh
        if part:
            choice.add(group, part)
        if len(part) < len(fresh):
            rest = Portion(group, fresh[len(part) :], portion.batch, priority=portion.priority)
            choice.split.append(rest)
            self._add(rest)
        choice.missing = wanted.lacks(choice.num_rows, len(choice.picked) + choice.gaps)


class Fifo(RowSelector):
    """Oldest first: batches in order (batch, explorer), groups in order of their task, rows in
    order of their id.

    So the same stored groups give the same train batches, however fast each of them came.  Nothing
    rests: rows that came back (a further use) stand again where they stood before.
    """

    def __init__(self, settings: BufferSettings) -> None:
        super().__init__()
        self._policy = settings.on_short_batch
        self._short: dict[Key, ClosedBatch] = {}

    def closed(self, key: Key, closed: ClosedBatch) -> None:
        if closed.short and self._policy != "carry":
            self._short[key] = closed
            self._add(Portion(None, [], key, gaps=closed.short))

    def put(self, group: WaitingGroup, rows: list[WaitingRow], *, rested: bool = True) -> None:
        self._add(Portion(group, rows, group.key))

    def _rank(self, portion: Portion) -> tuple[int, int, int, int, str, str]:
        batch, explorer = portion.batch
        if portion.group is None:
            return (batch, explorer, 0 if self._policy == "stop" else 2, 0, "", "")
        return (batch, explorer, 1, portion.group.task, portion.group.id, portion.rows[0].id)

    def _choose(self, wanted: LeaseRequest, choice: Selection, portion: Portion) -> None:
        if portion.group is not None:
            super()._choose(wanted, choice, portion)
            return
        closed = self._short[portion.batch]
        if self._policy == "stop":
            self.undo(choice)
            raise ShortBatch(
                f"step {wanted.step} cannot be filled: {shortage(portion.batch, closed)}. {REMEDY}"
            )
        # a short batch leaves its step short, if that step trains the batch's groups, or if the
        # batch has none
        mine = any(g.key == portion.batch for g, _ in choice.picked)
        if wanted.rows is None and (mine or closed.accepted == 0):
            choice.gaps += portion.gaps
            choice.missing = wanted.lacks(choice.num_rows, len(choice.picked) + choice.gaps)


class ByPriority(RowSelector):
    """Highest priority first, with replay: a group may be trained again, after a rest, until it was
    used `max_uses` times.

    Between two uses of a row lie at least `cooldown_s` seconds of the clock; a new process counts
    them anew.  At most `capacity` groups are kept for another use; beyond it the lowest are
    evicted.  A short batch is no matter here: only a lease that cannot be filled is.
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

    def put(self, group: WaitingGroup, rows: list[WaitingRow], *, rested: bool = True) -> None:
        portion = Portion(group, rows, group.key, priority=self._priority(group, rows))
        if rested:
            self._add(portion)
            return
        heapq.heappush(
            self._resting, (self._clock() + self._cooldown, next(self._numbers), portion)
        )
        self._count(portion)

    def pick(self, wanted: LeaseRequest) -> Selection:
        now = self._clock()
        while self._resting and self._resting[0][0] <= now:
            portion = heapq.heappop(self._resting)[2]
            if not portion.dead:
                super()._add(portion)
        choice = super().pick(wanted)
        if not choice.missing:
            self._evict(choice)
        return choice

    def resting(self, wanted: LeaseRequest) -> tuple[float | None, int]:
        alive = [(at, p) for at, _, p in self._resting if not p.dead]
        fresh = [len(wanted.split(p.rows)[0]) for _, p in alive]
        first = min((at for at, _ in alive), default=None)
        return first, sum(fresh) if wanted.rows is not None else sum(bool(n) for n in fresh)

    def _priority(self, group: WaitingGroup, rows: list[WaitingRow]) -> float:
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
            found = float(self._fn(x))
        except Exception as e:  # whatever a plugin raises, the message names it
            raise BufferFailed(
                f"priority function {self._name!r} failed on {x}: {type(e).__name__}: {e}"
            ) from e
        if math.isnan(found):
            raise BufferFailed(
                f"priority function {self._name!r} gave NaN for {x}; it must give a number"
            )
        return found

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
    """What a short batch has, in words."""
    reasons = (
        ", ".join(f"{n} {r}" for r, n in sorted(closed.reasons.items())) or "no group was rejected"
    )
    return (
        f"batch {key[0]} of explorer {key[1]} has {closed.accepted} of {closed.wanted} groups "
        f"that can be trained ({reasons})"
    )

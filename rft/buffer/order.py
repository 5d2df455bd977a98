"""Which rows are trained next: the choice is made in memory, from what the ledger stored, and does no input or output.

Batches are taken in order (batch, explorer), groups in order of their task, and only from closed batches: a lease never passes a
group that is still being explored, so the same stored groups give the same train batches however fast each of them came.
The one invariant: a row is either waiting or in one lease.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from rft.buffer.settings import BufferSettings
from rft.errors import BufferFailed, ShortBatch
from rft.types.ports import EndOfData

Key = tuple[int, int]  # (batch, explorer)


@dataclass(slots=True)
class Row:
    id: str
    position: int  # in the group's block
    oldest_step: int | None
    uses: int = 0


@dataclass(slots=True)
class Group:
    """An accepted group with rows that wait or are leased."""

    id: str
    batch: int
    explorer: int
    task: int
    locator: str
    waiting: list[Row]
    leased: int = 0
    num_bytes: int = 0  # of its payload

    @property
    def key(self) -> Key:
        return (self.batch, self.explorer)


@dataclass(slots=True)
class Closed:
    """What the explorer said about a batch; `accepted` as the ledger counts it."""

    accepted: int
    wanted: int
    reasons: dict[str, int]


@dataclass(slots=True)
class Choice:
    """Rows for one train batch, in order, and those found too old on the way."""

    picked: list[tuple[Group, list[Row]]] = field(default_factory=list)
    stale: list[tuple[Group, list[Row]]] = field(default_factory=list)
    passed: list[Key] = field(default_factory=list)  # batches that were gone through to their end

    @property
    def num_rows(self) -> int:
        return sum(len(rows) for _, rows in self.picked)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What one lease asks for."""

    step: int
    groups: int | None
    rows: int | None
    max_staleness: int | None

    def __post_init__(self) -> None:
        amount = self.groups if self.rows is None else self.rows
        if (self.groups is None) == (self.rows is None) or amount is None or amount < 1 or self.step < 1:
            raise BufferFailed(
                f"lease of step {self.step} for groups={self.groups}, rows={self.rows}: steps count from 1, "
                "and exactly one of groups and rows must be given, at least 1"
            )

    def missing(self, choice: Choice, gaps: int) -> int:
        have = choice.num_rows if self.rows is not None else len(choice.picked) + gaps
        return max(0, (self.rows or self.groups or 0) - have)

    @property
    def unit(self) -> str:
        return "rows" if self.rows is not None else "groups"

    @property
    def amount(self) -> int:
        return self.rows or self.groups or 0

    def stale(self, row: Row) -> bool:
        """Staleness = optimizer steps finished before this one, less the row's oldest train step."""
        if self.max_staleness is None or row.oldest_step is None:
            return False
        return (self.step - 1) - row.oldest_step > self.max_staleness


class Order:
    """All waiting groups of one lineage, and the leases that are out."""

    def __init__(self, settings: BufferSettings, cursor: int, groups: list[Group]) -> None:
        self._policy = settings.on_short_batch
        self._num_explorers = settings.num_explorers
        self._base = min([cursor, *(g.batch for g in groups)])
        self._groups: dict[Key, dict[str, Group]] = {}
        self._closed: dict[Key, Closed] = {}
        self._passed: set[Key] = set()
        self._arrived: dict[Key, list[int]] = {}  # open batches: accepted and rejected groups so far
        self._finished: dict[int, str] = {}
        self.leases: dict[int, Choice] = {}
        self.num_groups = 0  # accepted and not wholly used
        self.num_bytes = 0  # of their payload
        for group in groups:
            self.add(group.key, group)

    # ------------------------------------------------------------ what the explorer reports

    def add(self, key: Key, group: Group | None) -> None:
        """A group was stored; None = it has nothing to train."""
        self._arrived.setdefault(key, [0, 0])[group is None] += 1
        if group is not None:
            self._put(group)

    def close(self, key: Key, closed: Closed) -> None:
        if key[0] >= self._base:  # an explorer that began again closes batches that were trained long ago
            self._closed[key] = closed
        self._arrived.pop(key, None)

    def finish(self, explorer: int, reason: str) -> None:
        self._finished[explorer] = reason

    @property
    def finished(self) -> str | None:
        """Why no more rows come; None while some explorer goes on."""
        done = [self._finished.get(e) for e in range(self._num_explorers)]
        return None if None in done else "; ".join(dict.fromkeys(r for r in done if r))

    # ------------------------------------------------------------ what the trainer asks for

    def choose(self, wanted: Wanted) -> Choice | None:
        """The rows of a lease, or None as long as more is to come.  Raises ShortBatch, EndOfData."""
        choice, gaps = Choice(), 0
        for key in self._keys():
            closed = self._state(key)
            if closed is None or not wanted.missing(choice, gaps):
                break
            short = max(0, closed.wanted - closed.accepted) if key not in self._passed else 0
            if short and self._policy == "stop":
                raise ShortBatch(f"step {wanted.step} cannot be filled: {_short(key, closed)}. {_REMEDY}")
            had = any(g.waiting for g in self._groups.get(key, {}).values())
            if self._collect(key, wanted, choice, gaps):
                choice.passed.append(key)
                if self._policy == "train" and wanted.rows is None and (had or short == closed.wanted):
                    gaps += short
        if not wanted.missing(choice, gaps):
            if not choice.picked:
                raise ShortBatch(f"step {wanted.step} has no group to train: the batch's groups were all rejected. {_REMEDY}")
            return choice
        if self.finished is None:
            return None
        return self._rest(wanted, choice)

    def take(self, step: int, choice: Choice) -> None:
        """The choice is leased to `step`; its stale rows are out of the order."""
        for group, rows in choice.stale:
            self._out(group, rows)
            self._forget(group)
        for group, rows in choice.picked:
            self._out(group, rows)
            group.leased += len(rows)
        self._passed.update(choice.passed)
        self.leases[step] = choice

    def give_back(self, step: int) -> None:
        """The lease could not be handed out (its stale rows stay explained)."""
        for group, rows in self.leases.pop(step).picked:
            group.leased -= len(rows)
            group.waiting = sorted([*rows, *group.waiting], key=lambda r: r.id)
        self._passed.clear()  # a batch passed by this lease alone has to be gone through again

    def done(self, step: int, *, max_uses: int | None) -> list[Group]:
        """The lease of `step` was used (or, with max_uses None, explained); the groups that are wholly done with."""
        over = []
        for group, rows in self.leases.pop(step).picked:
            group.leased -= len(rows)
            for row in rows:
                row.uses += 1
            again = [] if max_uses is None else [r for r in rows if r.uses < max_uses]
            group.waiting = sorted([*group.waiting, *again], key=lambda r: r.id)
            if self._forget(group):
                over.append(group)
        self._advance()
        return over

    # ------------------------------------------------------------ what people ask

    @property
    def num_leased(self) -> int:
        return sum(c.num_rows for c in self.leases.values())

    @property
    def num_waiting(self) -> int:
        return sum(len(g.waiting) for gs in self._groups.values() for g in gs.values())

    def missing(self, wanted: Wanted) -> str:
        """Who a lease waits for, in words."""
        closed = waiting = 0
        for key in self._keys():
            if self._state(key) is None:
                batch, explorer = key
                accepted, rejected = self._arrived.get(key, [0, 0])
                open_batch = f"batch {batch} of explorer {explorer} is still open with {accepted + rejected} groups stored"
                open_batch += f" ({accepted} accepted, {rejected} rejected)"
                break
            groups = self._groups.get(key, {}).values()
            closed += bool(groups)
            waiting += sum(len(g.waiting) if wanted.rows is not None else bool(g.waiting) for g in groups)
        else:
            open_batch = "the explorer has finished"
        return f"step {wanted.step} has {waiting} of {wanted.amount} {wanted.unit} from {closed} closed batches; {open_batch}"

    # ------------------------------------------------------------ inside

    def _keys(self) -> Iterator[Key]:
        """Batches in order.  Ends only where every explorer has finished and nothing waits further on."""
        last = max((k[0] for k in (*self._groups, *self._closed)), default=self._base - 1)
        batch = self._base
        while batch <= last or self.finished is None:
            explorers = {e for b, e in self._groups if b == batch} if self._strangers else set()
            for explorer in sorted({*range(self._num_explorers), *explorers}):
                yield (batch, explorer)
            batch += 1

    @property
    def _strangers(self) -> bool:
        """Whether rows of an explorer wait that this run does not have any more."""
        return any(e >= self._num_explorers for _, e in self._groups)

    def _state(self, key: Key) -> Closed | None:
        """None = still open.  An explorer that is not there any more has closed all its batches."""
        return Closed(0, 0, {}) if key[1] >= self._num_explorers else self._closed.get(key)

    def _collect(self, key: Key, wanted: Wanted, choice: Choice, gaps: int) -> bool:
        """Adds rows of one batch; True if the batch has nothing more to give."""
        for group in sorted(self._groups.get(key, {}).values(), key=lambda g: (g.task, g.id)):
            room = wanted.missing(choice, gaps)
            if not room:
                return not any(g.waiting for g in self._groups[key].values() if (g.task, g.id) >= (group.task, group.id))
            fresh = [r for r in group.waiting if not wanted.stale(r)]
            if len(fresh) < len(group.waiting):
                choice.stale.append((group, [r for r in group.waiting if wanted.stale(r)]))
            part = fresh[:room] if wanted.rows is not None else fresh
            if part:
                choice.picked.append((group, part))
            if len(part) < len(fresh):
                return False
        return True

    def _rest(self, wanted: Wanted, choice: Choice) -> Choice:
        """No more rows come and the lease is not full."""
        left = self.num_waiting
        if not left or (not choice.picked and choice.stale and left == sum(len(r) for _, r in choice.stale)):
            raise EndOfData(f"nothing is left for step {wanted.step}: {self.finished}")
        if self._policy == "train" and choice.picked:
            return choice
        short = [_short(k, c) for k, c in sorted(self._closed.items()) if c.accepted < c.wanted]
        why = f"; {'; '.join(short[:3])}" if short else ""
        raise ShortBatch(f"no more rows come ({self.finished}), but {self.missing(wanted)}{why}. {_REMEDY}")

    def _put(self, group: Group) -> None:
        self._groups.setdefault(group.key, {})[group.id] = group
        self.num_groups += 1
        self.num_bytes += group.num_bytes

    def _out(self, group: Group, rows: list[Row]) -> None:
        gone = {r.id for r in rows}
        group.waiting = [r for r in group.waiting if r.id not in gone]

    def _forget(self, group: Group) -> bool:
        if group.waiting or group.leased:
            return False
        groups = self._groups[group.key]
        if groups.pop(group.id, None) is not None:
            self.num_groups -= 1
            self.num_bytes -= group.num_bytes
        if not groups:
            del self._groups[group.key]
        return True

    def _advance(self) -> None:
        """Forget batches that are closed, passed and empty; so a long run walks over few of them."""
        explorers = range(self._num_explorers)
        while all((self._base, e) in self._passed for e in explorers) and all(b != self._base for b, _ in self._groups):
            for e in explorers:
                self._passed.discard((self._base, e))
                self._closed.pop((self._base, e), None)
            self._base += 1


_REMEDY = "Raise buffer.max_refill, ease the filters, or set buffer.on_short_batch to train or carry"


def _short(key: Key, closed: Closed) -> str:
    batch, explorer = key
    return (
        f"batch {batch} of explorer {explorer} has {closed.accepted} of {closed.wanted} groups that can be trained"
        f" ({reasons_text(closed.reasons)})"
    )


def reasons_text(reasons: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {r}" for r, n in sorted(reasons.items())) or "no group was rejected"

"""The ledger: ids, states, uses and typed columns of every experience, in one SQLite database.  Synchronous; one thread uses it.

It does not know who waits for what.  The one invariant: each method that writes is one transaction, durable when it returns as
`durability` says (process: WAL, survives kill -9; power: synced before the return).
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import URL, Connection, and_, create_engine, event, exists, func, insert, not_, or_, select, update
from sqlalchemy.dialects.sqlite import insert as upsert
from sqlalchemy.engine import Engine
from sqlalchemy.exc import SQLAlchemyError

from rft.buffer.ancestry import chain, counted_uses, digest, orphaned_groups, states
from rft.buffer.base import LineageStart, Storage
from rft.buffer.folder import OwnerLock, refuse_network
from rft.buffer.intake import Intake, read
from rft.buffer.order import Choice, Group, Row
from rft.buffer.schema import FORMAT, batches, experiences, explanations, groups, lineages, meta, metadata, rejections, uses
from rft.buffer.settings import BufferSettings
from rft.errors import BufferFailed, Fenced, FrameRejected, IdConflict
from rft.faults import fault
from rft.types.block import content_hash, decode, encode
from rft.types.ids import Version
from rft.types.ports import AppendResult, Consumption, GroupStats, HeldGroup

_PART = 500  # bound values of one IN (...)


class Offer(msgspec.Struct):
    """A frame that wants to be stored."""

    lineage: int
    frame: bytes
    accepted: bool
    reason: str
    explorer: int


class Stored(msgspec.Struct):
    """What became of an offer; `group` is None when it has nothing to train or was there already."""

    result: AppendResult
    key: tuple[int, int] | None = None  # (batch, explorer), None for a repeated append
    group: Group | None = None


class Ledger:
    """`path` is the SQLite file; `storage` keeps the payload."""

    def __init__(self, settings: BufferSettings, path: Path, storage: Storage) -> None:
        self._settings = settings
        self._path = path
        self._storage = storage
        self._lock = OwnerLock(path.with_name(path.name + ".lock"))
        self._engine: Engine | None = None
        self._connection: Connection | None = None
        self._ancestry: dict[int, int] = {}
        self._blocks: set[str] = set()  # locators of this process, where the storage forgets them with it
        self._closed: set[tuple[int, int]] = set()
        self.lineage = 0
        self.cursor = 0
        self.newest_step = 0  # newest optimizer step whose weights can exist in this lineage

    # ------------------------------------------------------------ opening

    def open(self) -> None:
        """Raises SetupError on a network file system, BufferFailed when another process has it or the format is unknown."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        refuse_network(self._path.parent)
        self._lock.acquire()
        try:
            self._engine = connect(self._path, durability=self._settings.durability)
            self._connection = self._engine.connect()
            with self._transaction() as tx:
                metadata.create_all(tx)
                self._check_meta(tx)
                self.lineage = tx.scalar(select(func.max(lineages.c.lineage))) or 0
            self._storage.open()
        except BaseException:
            self.close()
            raise

    def _check_meta(self, tx: Connection) -> None:
        s = self._settings
        now = {"format": str(FORMAT), "storage_type": s.storage_type, "storage_path": s.storage_path or ""}
        then = {r.key: r.value for r in tx.execute(select(meta))}
        for key, value in now.items():
            if key not in then:
                tx.execute(insert(meta).values(key=key, value=value))
            elif then[key] != value:
                raise BufferFailed(
                    f"{self._path} was made with {key} {then[key]!r}, this run has {value!r}. "
                    "Go on with what it was made with, or give the run another name."
                )
        for key, value in (("max_uses", str(s.max_uses)), ("resume_rows", s.resume_rows)):
            statement = upsert(meta).values(key=key, value=value)
            tx.execute(statement.on_conflict_do_update(index_elements=["key"], set_={"value": value}))

    def close(self) -> None:
        self._storage.close()
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._engine is not None:
            self._engine.dispose()
            self._engine = None
        self._lock.release()

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        if self._connection is None:
            raise BufferFailed(f"the buffer {self._path} is closed")
        try:
            with self._connection.begin():
                yield self._connection
        except (SQLAlchemyError, OSError) as e:
            cause = getattr(e, "orig", None) or e
            raise BufferFailed(
                f"the buffer {self._path} could not be written or read: {cause}. Nothing of the last call is stored."
            ) from e

    # ------------------------------------------------------------ lineages

    def start_lineage(self, parent: Version | None, consumption: Consumption | None) -> tuple[LineageStart, list[Group]]:
        """The next lineage; everything that does not descend from `parent` stops counting."""
        s = self._settings
        with self._transaction() as tx:
            fault("buffer.lineage")
            if parent is not None and consumption is not None:
                self._verify(tx, parent, consumption)
            lineage = max(tx.scalar(select(func.max(lineages.c.lineage))) or 0, parent.lineage if parent else 0) + 1
            cursor = consumption.cursor if consumption else 0
            step = parent.step if parent else 0
            tx.execute(
                insert(lineages).values(
                    lineage=lineage,
                    parent_lineage=parent.lineage if parent else None,
                    parent_step=parent.step if parent else None,
                    cursor=cursor,
                    created=time.time(),
                )
            )
            ancestry = chain(tx, Version(lineage, step), whole=True)
            derive_states(tx, ancestry, s.max_uses, s.resume_rows)
            self._forget_lost(tx)
            waiting = self._waiting(tx, ancestry)
            orphaned = tx.scalar(select(func.count()).where(experiences.c.explained == "orphaned")) or 0
            available = tx.scalar(select(func.count()).where(experiences.c.state == "available")) or 0
        self.lineage, self.cursor, self.newest_step, self._ancestry = lineage, cursor, step, ancestry
        self._closed = set()
        return LineageStart(lineage=lineage, orphaned=orphaned, available=available, cursor=cursor), waiting

    def _verify(self, tx: Connection, parent: Version, given: Consumption) -> None:
        counted = [(u.experience, u.lineage, u.step) for u in tx.execute(counted_uses(chain(tx, parent)))]
        if (len(counted), digest(counted)) != (given.num_uses, given.digest):
            raise BufferFailed(
                f"the checkpoint {parent} was made after {given.num_uses} uses (digest {given.digest}), "
                f"but the buffer {self._path} knows {len(counted)} ({digest(counted)}). "
                "Checkpoint and buffer are not of the same run, or one was replaced: "
                "restore the buffer folder that belongs to it, or start a new run from its weights."
            )

    def _forget_lost(self, tx: Connection) -> None:
        """Rows whose payload went with an earlier process are no longer available."""
        if self._storage.durable:
            return
        waiting = select(groups.c.id, groups.c.locator).where(
            exists().where(and_(experiences.c.group_id == groups.c.id, experiences.c.state == "available"))
        )
        for lost in parts([g.id for g in tx.execute(waiting) if g.locator not in self._blocks]):
            gone = and_(experiences.c.group_id.in_(lost), experiences.c.state == "available")
            tx.execute(update(experiences).where(gone).values(state="explained", explained="not_durable"))
            tx.execute(update(groups).where(groups.c.id.in_(lost)).values(held=False))

    def _waiting(self, tx: Connection, ancestry: dict[int, int]) -> list[Group]:
        e, g = experiences.c, groups.c
        counts: Counter[str] = Counter()
        if self._settings.max_uses > 1:
            counts.update(u.experience for u in tx.execute(counted_uses(ancestry)))
        rows = tx.execute(
            select(e.id, e.group_id, e.position, e.oldest_step, g.batch, g.explorer, g.task, g.locator, g.num_bytes)
            .join(groups, g.id == e.group_id)
            .where(e.state == "available")
            .order_by(e.group_id, e.id)
        )
        found = []
        for name, members in groupby(rows, key=lambda r: r.group_id):
            first, *rest = members
            waiting = [Row(r.id, r.position, r.oldest_step, counts[r.id]) for r in (first, *rest)]
            found.append(Group(name, first.batch, first.explorer, first.task, first.locator, waiting, num_bytes=first.num_bytes))
        return found

    def fence(self, lineage: int) -> None:
        """Raises Fenced for a caller of another lineage than the current one."""
        if lineage != self.lineage:
            raise Fenced(f"lineage {lineage} no longer owns the buffer: lineage {self.lineage} has taken over")

    # ------------------------------------------------------------ the explorer's side

    def append(self, offers: Sequence[Offer]) -> list[Stored | BufferFailed]:
        """All offers in one transaction; each is stored, a repetition, or refused by itself."""
        ready: list[Intake | BufferFailed] = [self._read(offer) for offer in offers]
        names = [x.group["id"] for x in ready if isinstance(x, Intake)]
        with self._transaction() as tx:
            fault("buffer.append.before")
            known: dict[str, str] = {}
            for part in parts(names):
                known.update(r for r in tx.execute(select(groups.c.id, groups.c.content_hash).where(groups.c.id.in_(part))))
            answers = [x if isinstance(x, BufferFailed) else self._admit(x, known) for x in ready]
            new = [x for x in answers if isinstance(x, Intake)]
            locators = self._storage.put([x.frame for x in new], tx) if new else []
            if new:
                tx.execute(insert(groups), [{**x.group, "locator": at} for x, at in zip(new, locators, strict=True)])
                tx.execute(insert(experiences), [row for x in new for row in x.rows])
            self._count_rejections(tx, answers)
            fault("buffer.append.stored")
        fault("buffer.append.after")
        if not self._storage.durable:
            self._blocks.update(locators)
        places = iter(locators)
        return [_stored(x, next(places)) if isinstance(x, Intake) else x for x in answers]

    def _read(self, offer: Offer) -> Intake | BufferFailed:
        try:
            self.fence(offer.lineage)
            ancestry = {**self._ancestry, self.lineage: self.newest_step}
            intake = read(
                offer.frame,
                lineage=self.lineage,
                accepted=offer.accepted,
                reason=offer.reason,
                ancestry=ancestry,
                max_row_bytes=self._settings.max_row_bytes,
            )
            if intake.group["explorer"] != offer.explorer:
                raise FrameRejected(f"foreign_explorer: group {intake.group['id']} was appended by explorer {offer.explorer}")
        except BufferFailed as e:
            return e
        return intake

    def _admit(self, x: Intake, known: dict[str, str]) -> Intake | Stored | BufferFailed:
        name, content = x.group["id"], x.group["content_hash"]
        if (old := known.get(name)) is not None:
            if old == content:
                return Stored(AppendResult(appended=0, duplicates=len(x.rows)))
            return IdConflict(f"group {name} is stored with other content ({old}, now {content}); ids are never used again")
        if (x.group["batch"], x.group["explorer"]) in self._closed:
            return FrameRejected(f"closed_batch: group {name} came after its batch was closed")
        known[name] = content
        return x

    def _count_rejections(self, tx: Connection, answers: Sequence[object]) -> None:
        counts = Counter(str(x).split(":")[0] for x in answers if isinstance(x, FrameRejected))
        counts.update("id_conflict" for x in answers if isinstance(x, IdConflict))
        counts.update("fenced" for x in answers if isinstance(x, Fenced))
        for reason, n in counts.items():
            statement = upsert(rejections).values(lineage=self.lineage, reason=reason, count=n)
            keys = ["lineage", "reason"]
            tx.execute(statement.on_conflict_do_update(index_elements=keys, set_={"count": rejections.c["count"] + n}))

    def close_batch(self, lineage: int, explorer: int, batch: int, *, accepted: int, wanted: int, reasons: dict[str, int]) -> int:
        """How many groups of the batch can be (or were) trained, as the ledger knows it."""
        g = groups.c
        with self._transaction() as tx:
            self.fence(lineage)
            fault("buffer.close_batch")
            values = {"accepted": accepted, "wanted": wanted, "reasons": json.dumps(reasons, sort_keys=True)}
            statement = upsert(batches).values(lineage=lineage, explorer=explorer, batch=batch, **values)
            tx.execute(statement.on_conflict_do_update(index_elements=["lineage", "explorer", "batch"], set_=values))
            good = and_(g.batch == batch, g.explorer == explorer, g.accepted, g.num_eligible > 0, g.held)
            count = tx.scalar(select(func.count()).where(good)) or 0
        self._closed.add((batch, explorer))
        return count

    def held(self, lineage: int, explorer: int, first_batch: int) -> list[HeldGroup]:
        g = groups.c
        with self._transaction() as tx:
            self.fence(lineage)
            rows = tx.execute(
                select(g.batch, g.task, and_(g.accepted, g.num_eligible > 0).label("good"))
                .where(g.batch >= first_batch, g.explorer == explorer, g.held)
                .order_by(g.batch, g.task)
            )
            return [HeldGroup(r.batch, r.task, bool(r.good)) for r in rows]

    # ------------------------------------------------------------ the trainer's side

    def lease(self, lineage: int, step: int, choice: Choice) -> tuple[bytes, tuple[GroupStats, ...]]:
        """Payload and frozen statistics of the chosen rows; the stale ones are explained."""
        names = [g.id for g, _ in choice.picked]
        with self._transaction() as tx:
            self.fence(lineage)
            fault("buffer.lease")
            self._explain(tx, lineage, step, [r.id for _, rows in choice.stale for r in rows], "stale")
            blocks = self._storage.get([g.locator for g, _ in choice.picked], tx)
            e = experiences.c
            headers = [
                r
                for part in parts(names)
                for r in tx.execute(select(e.id, e.group_id, e.reward, e.content_hash).where(e.group_id.in_(part)).order_by(e.id))
            ]
        rewards = {h.id: h.reward for h in headers}
        hashes = {h.id: h.content_hash for h in headers}
        scored: dict[str, list[float]] = {}
        for h in headers:
            if h.reward is not None:
                scored.setdefault(h.group_id, []).append(h.reward)
        found = []
        for (group, rows), block in zip(choice.picked, blocks, strict=True):
            members = decode(block)
            for row in rows:
                x = members[row.position]
                if str(x.id) != row.id or content_hash(x) != hashes[row.id]:
                    raise BufferFailed(f"payload {group.locator} does not hold {row.id} as it was stored; the buffer is damaged")
                # the ledger's reward holds, so that a row and its group's statistics never disagree
                found.append(x if x.reward == rewards[row.id] else msgspec.structs.replace(x, reward=rewards[row.id]))
        found.sort(key=lambda x: (x.id.batch, x.id.explorer, x.id.task, x.id.run, x.id.attempt, x.id.step))
        return encode(found), tuple(_statistics(name, scored[name]) for name in names)

    def use(self, lineage: int, step: int, ids: Sequence[str], used: Sequence[str]) -> None:
        """One use of each of `ids`; `used` are those that reach max_uses with it."""
        with self._transaction() as tx:
            self.fence(lineage)
            fault("buffer.use.before")
            tx.execute(insert(uses), [{"experience": x, "lineage": lineage, "step": step} for x in ids])
            for part in parts(used):
                tx.execute(update(experiences).where(experiences.c.id.in_(part)).values(state="used"))
        fault("buffer.use.after")

    def explain(self, lineage: int, step: int, ids: Sequence[str], reason: str) -> None:
        with self._transaction() as tx:
            self.fence(lineage)
            fault("buffer.explain")
            self._explain(tx, lineage, step, ids, reason)

    def _explain(self, tx: Connection, lineage: int, step: int, ids: Sequence[str], reason: str) -> None:
        if ids:
            tx.execute(insert(explanations), [{"experience": x, "lineage": lineage, "step": step, "reason": reason} for x in ids])
        for part in parts(ids):
            tx.execute(update(experiences).where(experiences.c.id.in_(part)).values(state="explained", explained=reason))

    def settled(self, lineage: int, step: int) -> str | None:
        """What became of the lease of `step`: "used", the reason it was explained by, or None."""
        with self._transaction() as tx:
            self.fence(lineage)
            if tx.scalar(select(uses.c.step).where(uses.c.lineage == lineage, uses.c.step == step).limit(1)) is not None:
                return "used"
            x = explanations.c
            return tx.scalar(select(x.reason).where(x.lineage == lineage, x.step == step, x.reason != "stale").limit(1))

    def drop(self, over: Sequence[Group]) -> None:
        """Groups that are wholly done with: free what only memory holds.  Durable payload stays."""
        if not self._storage.durable and over:
            with self._transaction() as tx:
                self._storage.drop([g.locator for g in over], tx)
            self._blocks.difference_update(g.locator for g in over)

    def consumption(self, lineage: int, step: int) -> Consumption:
        with self._transaction() as tx:
            self.fence(lineage)
            counted = [(u.experience, u.lineage, u.step) for u in tx.execute(counted_uses(chain(tx, Version(lineage, step))))]
            return Consumption(num_uses=len(counted), digest=digest(counted), cursor=self._cursor(tx, lineage, step))

    def _cursor(self, tx: Connection, lineage: int, step: int) -> int:
        e = experiences.c
        later = [e.id.in_(select(t.c.experience).where(t.c.lineage == lineage, t.c.step > step)) for t in (uses, explanations)]
        first = tx.scalar(select(func.min(e.batch)).where(or_(e.state == "available", *later)))
        found = [self._first_open(tx, lineage, explorer) for explorer in range(self._settings.num_explorers)]
        return int(min([*found, *([] if first is None else [first])]))

    def _first_open(self, tx: Connection, lineage: int, explorer: int) -> int:
        b = batches.c
        mine = select(b.batch).where(b.lineage == lineage, b.explorer == explorer, b.batch >= self.cursor).order_by(b.batch)
        for expected, closed in enumerate(tx.scalars(mine), start=self.cursor):
            if closed != expected:
                return expected
        return self.cursor + (tx.scalar(select(func.count()).select_from(mine.subquery())) or 0)

    # ------------------------------------------------------------ looking

    def look(self) -> tuple[Connection, dict[int, int]]:
        """For audits: the connection (inside no transaction) and what counts now."""
        if self._connection is None:
            raise BufferFailed(f"the buffer {self._path} is closed")
        return self._connection, self._ancestry

    def stored_states(self) -> dict[str, tuple[str, str | None]]:
        """(state, explained) of every row as it was last written; inside the caller's transaction."""
        assert self._connection is not None
        e = experiences.c
        return {r.id: (r.state, r.explained) for r in self._connection.execute(select(e.id, e.state, e.explained))}

    def rejections(self) -> dict[str, int]:
        """Refused frames by reason, over all lineages."""
        with self._transaction() as tx:
            r = rejections.c
            return {
                k: int(n) for k, n in tx.execute(select(r.reason, func.sum(r["count"])).group_by(r.reason).order_by(r.reason))
            }

    def size(self) -> int:
        """Bytes of the database file and its log."""
        return sum(p.stat().st_size for p in self._path.parent.glob(self._path.name + "*"))


def connect(path: Path, *, durability: str = "process", read_only: bool = False) -> Engine:
    """An engine on the SQLite file: WAL, foreign writers waited for, every transaction begun as a writing one."""
    query = {"mode": "ro", "uri": "true"} if read_only else {}
    database = f"file:{path}" if read_only else str(path)
    engine = create_engine(
        URL.create("sqlite", database=database, query=query), connect_args={"timeout": 30.0, "check_same_thread": False}
    )

    @event.listens_for(engine, "connect")
    def prepare(raw: Any, _: object) -> None:
        raw.isolation_level = None  # transactions are begun below, not by the driver
        if not read_only:
            raw.execute("PRAGMA page_size = 8192")
            raw.execute("PRAGMA journal_mode = WAL")
            raw.execute(f"PRAGMA synchronous = {'FULL' if durability == 'power' else 'NORMAL'}")
            raw.execute("PRAGMA wal_autocheckpoint = 2000")
            raw.execute("PRAGMA temp_store = MEMORY")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN" if read_only else "BEGIN IMMEDIATE")

    return engine


def derive_states(tx: Connection, ancestry: dict[int, int], max_uses: int, resume_rows: str) -> None:
    """Write `state` and `explained` of every row, and `held` of every group, as `ancestry` sees them."""
    now = states(ancestry, max_uses=max_uses, resume_rows=resume_rows).subquery("now")
    e = experiences.c
    changed = or_(e.state != now.c.state, e.explained.is_distinct_from(now.c.explained))
    tx.execute(update(experiences).where(e.id == now.c.id, changed).values(state=now.c.state, explained=now.c.explained))
    unwritten = not_(exists().where(and_(e.group_id == groups.c.id, e.newest_lineage.is_not(None))))
    gone = and_(groups.c.num_eligible == 0, unwritten)  # every run failed: a new lineage tries the task again
    if resume_rows == "orphan":
        gone = or_(gone, groups.c.id.in_(orphaned_groups(ancestry)))
    tx.execute(update(groups).values(held=not_(gone)))


def parts(values: Sequence[str]) -> Iterator[Sequence[str]]:
    """`values` in pieces that fit into one statement."""
    for start in range(0, len(values), _PART):
        yield values[start : start + _PART]


def _stored(x: Intake, locator: str) -> Stored:
    g = x.group
    key = (g["batch"], g["explorer"])
    waiting = [
        Row(r["id"], r["position"], r["oldest_step"]) for r in sorted(x.rows, key=lambda r: r["id"]) if r["dropped"] is None
    ]
    group = Group(g["id"], g["batch"], g["explorer"], g["task"], locator, waiting, num_bytes=g["num_bytes"]) if waiting else None
    return Stored(AppendResult(appended=len(x.rows), duplicates=0), key, group)


def _statistics(name: str, rewards: list[float]) -> GroupStats:
    n = len(rewards)
    mean = sum(rewards) / n
    std = (sum((r - mean) ** 2 for r in rewards) / (n - 1)) ** 0.5 if n > 1 else 0.0
    return GroupStats(group=name, rewards=tuple(rewards), mean=mean, std=std)

"""The ledger: ids, states, uses and typed columns of every experience, in one SQLite or PostgreSQL database.  One thread uses it.

It does not know who waits for what.  The one invariant: each method that writes is one transaction, durable when it returns as
`durability` says (process: survives kill -9 of every process; power: also of the machine).
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter

import msgspec
from sqlalchemy import Connection, and_, exists, func, insert, or_, select, update

from rft.buffer.ancestry import chain, counted_uses, digest
from rft.buffer.base import REMEDY, Audit, LineageStart, Storage
from rft.buffer.count import count
from rft.buffer.database import Database
from rft.buffer.intake import COLUMNS, GROUP_COLUMNS, TEXT_COLUMNS, Intake, clean, read
from rft.buffer.migrate import prepare
from rft.buffer.mix import Mix, remember
from rft.buffer.mix import counted as counted_mixed
from rft.buffer.order import DAMAGED, DROPPED, Choice, Group, Row
from rft.buffer.outcomes import outcomes, same_tasksets
from rft.buffer.schema import (
    ask,
    batches,
    checkpoints,
    experiences,
    explanations,
    groups,
    leases,
    lineages,
    mixed_uses,
    put_many,
    rejections,
    texts,
    uses,
)
from rft.buffer.settings import BufferSettings
from rft.buffer.standing import derive_states, has_used_rows, move, parts, waiting_groups
from rft.errors import BufferFailed, Fenced, FrameRejected, IdConflict, PayloadDamaged
from rft.faults import fault
from rft.types.block import bundle, contents
from rft.types.ids import Version
from rft.types.ports import AppendResult, Consumption, GroupStats, HeldGroup, TaskOutcome

log = logging.getLogger(__name__)
_GROUP_COLUMNS = (*GROUP_COLUMNS, "locator")
_USE_COLUMNS = ("experience", "lineage", "step", "created")  # of leases, too
_BATCH_COLUMNS = ("lineage", "explorer", "batch", "accepted", "wanted", "reasons")
_BATCH_AGAIN = "ON CONFLICT (lineage, explorer, batch) DO UPDATE SET " + ", ".join(
    f"{c} = excluded.{c}" for c in ("accepted", "wanted", "reasons")
)
_COUNT_GOOD = "SELECT count(*) FROM groups WHERE batch = ? AND explorer = ? AND accepted AND num_eligible > 0 AND held"
_HEADERS = "SELECT id, group_id, reward, content_hash, run, step, num_response_tokens FROM experiences WHERE group_id IN (??) ORDER BY id"


_Member = tuple[float, int, int, int]  # reward, run, step, response tokens
_id = attrgetter("id")


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
    """`storage` keeps the payload; `place` is where the ledger is, for messages."""

    def __init__(self, settings: BufferSettings, storage: Storage) -> None:
        self._settings = settings
        self._storage = storage
        self._database = Database(settings)
        self._run = self._database.run
        self.place = self._database.place
        self._ancestry: dict[int, int] = {}
        self._blocks: set[str] = set()  # locators of this process, where the storage forgets them with it
        self._garbage: list[str] = []  # locators that no group refers to; freed with the next append
        self._closed: set[tuple[int, int]] = set()
        self.lineage = 0
        self.cursor = 0
        self.newest_step = 0  # newest optimizer step whose weights can exist in this lineage

    # ------------------------------------------------------------ opening

    def open(self) -> None:
        """Raises SetupError on a network file system or without the server, BufferFailed for another owner or an unknown format."""

        def work(tx: Connection) -> int:
            prepare(tx, self._settings, self.place, self._storage)
            return tx.scalar(select(func.max(lineages.c.lineage))) or 0

        try:
            self.lineage = self._database.open(work)
            self._storage.open()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._storage.close()
        self._database.close()

    def stop(self) -> None:
        """From another thread: a call that waits for a lost server gives up."""
        self._database.stop()

    # ------------------------------------------------------------ lineages

    def start_lineage(self, parent: Version | None, consumption: Consumption | None) -> tuple[LineageStart, list[Group]]:
        """The next lineage; everything that does not descend from `parent` stops counting."""
        s = self._settings
        step = parent.step if parent else 0
        cursor = consumption.cursor if consumption else 0

        def work(tx: Connection) -> tuple[LineageStart, dict[int, int], list[Group]]:
            fault("buffer.lineage")
            if parent is not None and consumption is not None:
                self._verify(tx, parent, consumption)
                _checkpoint(tx, parent, consumption)
            lineage = max(tx.scalar(select(func.max(lineages.c.lineage))) or 0, parent.lineage if parent else 0) + 1
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
            waiting = waiting_groups(tx, ancestry, s.max_uses)
            if s.on_damaged_payload == "explain":
                waiting = [g for g in waiting if not self._given_up(tx, g)]
            orphaned = tx.scalar(select(func.count()).where(experiences.c.explained == "orphaned")) or 0
            available = tx.scalar(select(func.count()).where(experiences.c.state == "available")) or 0
            return LineageStart(lineage=lineage, orphaned=orphaned, available=available, cursor=cursor), ancestry, waiting

        start, self._ancestry, waiting = self._run(work)
        self.lineage, self.cursor, self.newest_step = start.lineage, cursor, step
        self._closed = set()
        if not self._storage.durable:
            self._forget(self._blocks - {g.locator for g in waiting})
        return start, waiting

    def _forget(self, locators: Iterable[str]) -> None:
        """Nothing will ask for these blocks, which only memory holds."""
        self._garbage += locators
        self._blocks.difference_update(self._garbage)

    def _verify(self, tx: Connection, parent: Version, given: Consumption) -> None:
        counted = [(u.experience, u.lineage, u.step) for u in tx.execute(counted_uses(chain(tx, parent)))]
        if (mixed := counted_mixed(tx, chain(tx, parent))) != given.mixed:
            raise BufferFailed(
                f"the checkpoint {parent} was made after {given.mixed or 'no'} uses of mixed-in rows, but the buffer {self.place} knows "
                f"{mixed or 'none'}: restore the buffer folder that belongs to it, or start a new run from its weights."
            )
        if (len(counted), digest(counted)) != (given.num_uses, given.digest):
            raise BufferFailed(
                f"the checkpoint {parent} was made after {given.num_uses} uses (digest {given.digest}), "
                f"but the buffer {self.place} knows {len(counted)} ({digest(counted)}). "
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

    def _given_up(self, tx: Connection, group: Group) -> bool:
        """Whether the payload of a waiting group is gone: then its rows are never trained, and its task is explored again."""
        why = self._damage(tx, group, group.waiting)
        if why is None:
            return False
        log.error("group %s is given up (%s): %s", group.id, DAMAGED, why)
        lost = experiences.c.id.in_([r.id for r in group.waiting])
        tx.execute(update(experiences).where(lost).values(dropped=DAMAGED, state="explained", explained=DAMAGED))
        tx.execute(update(groups).where(groups.c.id == group.id, ~has_used_rows()).values(held=False))
        return True

    def _damage(self, tx: Connection, group: Group, rows: Sequence[Row]) -> str | None:
        """What is wrong with the payload of these rows."""
        e = experiences.c
        hashes = {r.id: r.content_hash for r in tx.execute(select(e.id, e.content_hash).where(e.group_id == group.id))}
        try:
            (block,) = self._storage.get([group.locator], tx)
            _verify(group, rows, block, hashes)
        except PayloadDamaged as error:
            return str(error)
        return None

    def mix_in(self, lineage: int, mixed: Mix) -> None:
        """See `mix.remember`."""

        def work(tx: Connection) -> None:
            self.fence(lineage)
            remember(tx, lineage, mixed.name, mixed.fingerprint)

        self._run(work)

    def fence(self, lineage: int) -> None:
        """Raises Fenced for a caller of another lineage than the current one."""
        if lineage != self.lineage:
            raise Fenced(f"lineage {lineage} no longer owns the buffer: lineage {self.lineage} has taken over")

    # ------------------------------------------------------------ the explorer's side

    def append(self, offers: Sequence[Offer]) -> list[Stored | BufferFailed]:
        """All offers in one transaction; each is stored, a repetition, or refused by itself."""
        ready: list[Intake | BufferFailed] = [self._read(offer) for offer in offers]
        names = [x.id for x in ready if isinstance(x, Intake)]

        def work(tx: Connection) -> tuple[list[Intake | Stored | BufferFailed], list[str]]:
            fault("buffer.append.before")
            known: dict[str, str] = {}
            for part in parts(names):
                known.update(
                    (x, content) for x, content in ask(tx, "SELECT id, content_hash FROM groups WHERE id IN (??)", many=part)
                )
            answers = [x if isinstance(x, BufferFailed) else self._admit(x, known) for x in ready]
            new = [x for x in answers if isinstance(x, Intake)]
            self._storage.drop(self._garbage, tx)
            self._garbage = locators = self._storage.put([x.frame for x in new], tx) if new else []
            put_many(tx, groups, _GROUP_COLUMNS, [(*x.group, at) for x, at in zip(new, locators, strict=True)])
            put_many(tx, experiences, COLUMNS, [row for x in new for row in x.rows])
            put_many(tx, texts, TEXT_COLUMNS, [row for x in new for row in x.texts])
            self._count_rejections(tx, answers)
            fault("buffer.append.stored")
            return answers, locators

        answers, locators = self._run(work, size=sum(len(x.frame) for x in ready if isinstance(x, Intake)))
        self._garbage = []
        fault("buffer.append.after")
        if not self._storage.durable:
            self._blocks.update(locators)
            new = [x for x in answers if isinstance(x, Intake)]
            self._forget([at for x, at in zip(new, locators, strict=True) if not x.waiting])
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
                vocab_size=self._settings.vocab_size,
            )
            if intake.explorer != offer.explorer:
                raise FrameRejected(f"foreign_explorer: group {intake.id} was appended by explorer {offer.explorer}")
        except BufferFailed as e:
            return e
        return intake

    def _admit(self, x: Intake, known: dict[str, str]) -> Intake | Stored | BufferFailed:
        name, content = x.id, x.content_hash
        if (old := known.get(name)) is not None:
            if old == content:
                return Stored(AppendResult(appended=0, duplicates=len(x.rows)))
            return IdConflict(f"group {name} is stored with other content ({old}, now {content}); ids are never used again")
        if (x.batch, x.explorer) in self._closed:
            return FrameRejected(f"closed_batch: group {name} came after its batch was closed")
        known[name] = content
        return x

    def _count_rejections(self, tx: Connection, answers: Sequence[object]) -> None:
        counts = Counter(str(x).split(":")[0] for x in answers if isinstance(x, FrameRejected))
        counts.update("id_conflict" for x in answers if isinstance(x, IdConflict))
        counts.update("fenced" for x in answers if isinstance(x, Fenced))
        put_many(
            tx,
            rejections,
            ("lineage", "reason", "count"),
            [(self.lineage, reason, n) for reason, n in counts.items()],
            again='ON CONFLICT (lineage, reason) DO UPDATE SET "count" = rejections."count" + excluded."count"',
        )

    def close_batch(self, lineage: int, explorer: int, batch: int, *, accepted: int, wanted: int, reasons: dict[str, int]) -> int:
        """How many groups of the batch can be (or were) trained, as the ledger knows it."""

        def work(tx: Connection) -> int:
            self.fence(lineage)
            fault("buffer.close_batch")
            row = (lineage, explorer, batch, accepted, wanted, json.dumps(reasons, sort_keys=True))
            put_many(tx, batches, _BATCH_COLUMNS, [row], again=_BATCH_AGAIN)
            return int(ask(tx, _COUNT_GOOD, (batch, explorer)).scalar_one())

        count = self._run(work)
        self._closed.add((batch, explorer))
        return count

    def held(self, lineage: int, explorer: int, first_batch: int) -> list[HeldGroup]:
        g = groups.c

        def work(tx: Connection) -> list[HeldGroup]:
            self.fence(lineage)
            rows = tx.execute(
                select(g.batch, g.task, and_(g.accepted, g.num_eligible > 0).label("good"))
                .where(g.batch >= first_batch, g.explorer == explorer, g.held)
                .order_by(g.batch, g.task)
            )
            return [HeldGroup(r.batch, r.task, bool(r.good)) for r in rows]

        return self._run(work)

    def outcomes(self, lineage: int, explorer: int, first_batch: int, end_batch: int) -> list[TaskOutcome]:
        self.fence(lineage)
        return self._run(lambda tx: outcomes(tx, explorer, first_batch, end_batch))

    def same_tasksets(self, lineage: int, explorer: int, fingerprints: dict[str, str]) -> None:
        self.fence(lineage)
        self._run(lambda tx: same_tasksets(tx, lineage, explorer, fingerprints))

    # ------------------------------------------------------------ the trainer's side

    def lease(self, lineage: int, step: int, choice: Choice, mixed: Mix | None = None) -> tuple[bytes, tuple[GroupStats, ...]]:
        """Payload and frozen statistics of the chosen rows, and behind them those of `mixed`; rows left out for good are explained."""
        names = [g.id for g, _ in choice.picked]

        def work(tx: Connection) -> tuple[bytes, dict[str, list[_Member]]]:
            self.fence(lineage)
            fault("buffer.lease")
            for reason, dropped in choice.dropped.items():
                self._explain(tx, step, [r.id for _, rows in dropped for r in rows], reason)
            blocks = self._storage.get([g.locator for g, _ in choice.picked], tx)
            # locked, where the database locks rows: an edit of a reward comes before this lease or is refused
            locked = _HEADERS if tx.dialect.name == "sqlite" else f"{_HEADERS} FOR UPDATE"
            rewards: dict[str, float | None] = {}
            hashes: dict[str, str] = {}
            scored: dict[str, list[_Member]] = {}
            for part in parts(names):
                for name, of, reward, content, run, turn, length in ask(tx, locked, many=part).all():
                    rewards[name], hashes[name] = reward, content
                    if reward is not None:
                        scored.setdefault(of, []).append((reward, run, turn, length))
            chosen = []
            for (group, rows), block in sorted(zip(choice.picked, blocks, strict=True), key=_place):
                rows = sorted(rows, key=_id)
                _verify(group, rows, block, hashes)
                # the ledger's rewards hold, so that a row and its group's statistics never disagree
                chosen.append((block, [r.position for r in rows], [rewards[r.id] for r in rows]))
            self._lease_rows(tx, step, [r.id for _, rows in choice.picked for r in rows])
            return bundle([*chosen, *further]), scored

        further = [(block, range(len(rewards)), rewards) for block, rewards in ([mixed.block(step)] if mixed else [])]
        frame, scored = self._run(work)
        for group, _ in choice.picked:
            group.frozen = group.frozen or _statistics(group.id, scored[group.id])
        return frame, tuple(g.frozen for g, _ in choice.picked if g.frozen is not None)

    def _lease_rows(self, tx: Connection, step: int, ids: Sequence[str]) -> None:
        """From here on their rewards stand, see `rft.buffer.views`."""
        now = time.time()
        again = (
            "ON CONFLICT (experience) DO UPDATE SET lineage = excluded.lineage, step = excluded.step, created = excluded.created"
        )
        put_many(tx, leases, _USE_COLUMNS, [(x, self.lineage, step, now) for x in ids], again=again)

    def damaged(self, choice: Choice) -> dict[str, str]:
        """Groups of a lease whose payload is gone or changed: {id: what is wrong}."""

        def work(tx: Connection) -> dict[str, str]:
            found = ((group.id, self._damage(tx, group, rows)) for group, rows in choice.picked)
            return {name: why for name, why in found if why is not None}

        return self._run(work)

    def use(self, lineage: int, step: int, ids: Sequence[str], used: Sequence[str], mixed: Mix | None = None) -> None:
        """One use of each of `ids`, and of those that `mixed` gave; `used` are those that reach max_uses with it."""

        def work(tx: Connection) -> None:
            self.fence(lineage)
            fault("buffer.use.before")
            now = time.time()
            put_many(tx, uses, _USE_COLUMNS, [(x, lineage, step, now) for x in ids])
            if mixed is not None:
                columns = ("source", "experience", "lineage", "step")
                put_many(tx, mixed_uses, columns, [(mixed.name, x, lineage, step) for x in mixed.ids(step)])
            move(tx, used, "used")

        self._run(work)
        fault("buffer.use.after")

    def explain(self, lineage: int, step: int, ids: Sequence[str], reason: str) -> None:
        """These rows are not trained, by `step`.  Repeating it is a no-op."""

        def work(tx: Connection) -> None:
            self.fence(lineage)
            fault("buffer.explain")
            self._explain(tx, step, ids, reason)

        self._run(work)

    def _explain(self, tx: Connection, step: int, ids: Sequence[str], reason: str) -> None:
        reason = clean(reason)
        columns = ("experience", "lineage", "step", "reason")
        put_many(tx, explanations, columns, [(x, self.lineage, step, reason) for x in ids], again="ON CONFLICT DO NOTHING")
        move(tx, ids, "explained", explained=reason)

    def settled(self, lineage: int, step: int) -> str | None:
        """What became of the lease of `step`: "used", the reason it was explained by, or None."""

        def work(tx: Connection) -> str | None:
            self.fence(lineage)
            if tx.scalar(select(uses.c.step).where(uses.c.lineage == lineage, uses.c.step == step).limit(1)) is not None:
                return "used"
            x = explanations.c
            of_step = and_(x.lineage == lineage, x.step == step, x.reason.not_in(DROPPED))
            found: str | None = tx.scalar(select(x.reason).where(of_step).limit(1))
            return found

        return self._run(work)

    def drop(self, over: Sequence[Group]) -> None:
        """Groups that are wholly done with: free what only memory holds.  Durable payload stays."""
        if not self._storage.durable and over:
            self._run(lambda tx: self._storage.drop([g.locator for g in over], tx))
            self._blocks.difference_update(g.locator for g in over)

    def consumption(self, lineage: int, step: int) -> Consumption:
        """What the manifest of `step` has to say; it is also written down here, for `v_lineage`."""

        def work(tx: Connection) -> Consumption:
            self.fence(lineage)
            ancestry = chain(tx, Version(lineage, step))
            counted = [(u.experience, u.lineage, u.step) for u in tx.execute(counted_uses(ancestry))]
            found = Consumption(
                num_uses=len(counted),
                digest=digest(counted),
                cursor=self._cursor(tx, lineage, step),
                mixed=counted_mixed(tx, ancestry),
            )
            _checkpoint(tx, Version(lineage, step), found)
            return found

        found = self._run(work)
        self._database.sync()  # a manifest must not outlive the uses that it rests on
        return found

    def _cursor(self, tx: Connection, lineage: int, step: int) -> int:
        e = experiences.c
        later = [e.id.in_(select(t.c.experience).where(t.c.lineage == lineage, t.c.step > step)) for t in (uses, explanations)]
        waiting = e.state == "available"
        if self._settings.max_uses > 1:  # rows that wait for another use do not hold the cursor back
            used = counted_uses(self._ancestry).subquery("used")
            waiting = and_(waiting, e.id.not_in(select(used.c.experience)))
        first = tx.scalar(select(func.min(e.batch)).where(or_(waiting, *later)))
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
        """The connection (inside no transaction) and what counts now."""
        return self._database.connection, self._ancestry

    def audit(self, leased: int, waiting: int) -> Audit:
        """What the facts say of the current lineage, and whether the stored states and the `leased` + `waiting` rows agree."""
        s = self._settings
        version = f"{self.lineage}:{self.newest_step}"
        e = experiences.c

        def work(tx: Connection) -> tuple[Audit, dict[str, tuple[str, str | None]], dict[str, tuple[str, str | None]]]:
            facts, derived = count(tx, self._ancestry, max_uses=s.max_uses, resume_rows=s.resume_rows, version=version)
            return facts, derived, {r.id: (r.state, r.explained) for r in tx.execute(select(e.id, e.state, e.explained))}

        facts, derived, stored = self._run(work)
        problems = list(facts.problems)
        lost = {x for x, (_, reason) in stored.items() if reason == "not_durable"}
        wrong = [x for x, state in derived.items() if stored.get(x) != state and x not in lost]
        if wrong:
            problems.append(
                f"{wrong[0]} is stored as {stored.get(wrong[0])}, but is {derived[wrong[0]]} ({len(wrong)} such rows)"
            )
        available = facts.available - len(lost)
        if available != leased + waiting:
            problems.append(f"{available} rows can be trained by the ledger, {leased} leased + {waiting} waiting in memory")
        explained = {**facts.explained, **({"not_durable": len(lost)} if lost else {})}
        return msgspec.structs.replace(
            facts, leased=leased, available=available - leased, explained=explained, problems=tuple(problems)
        )

    def rejections(self) -> dict[str, int]:
        """Refused frames by reason, over all lineages."""
        r = rejections.c
        query = select(r.reason, func.sum(r["count"])).group_by(r.reason).order_by(r.reason)
        return self._run(lambda tx: {k: int(n) for k, n in tx.execute(query)})

    def size(self) -> int:
        """Bytes of the database."""
        return self._run(self._database.size)


def _checkpoint(tx: Connection, version: Version, stated: Consumption) -> None:
    columns = ("lineage", "step", "num_uses", "digest", "cursor", "created")
    row = (version.lineage, version.step, stated.num_uses, stated.digest, stated.cursor, time.time())
    again = "num_uses = excluded.num_uses, digest = excluded.digest, cursor = excluded.cursor, created = excluded.created"
    put_many(tx, checkpoints, columns, [row], again=f"ON CONFLICT (lineage, step) DO UPDATE SET {again}")


def _stored(x: Intake, locator: str) -> Stored:
    group = None
    if x.waiting:
        group = Group(x.id, x.batch, x.explorer, x.task, locator, x.waiting, num_bytes=len(x.frame))
    return Stored(AppendResult(appended=len(x.rows), duplicates=0), (x.batch, x.explorer), group)


def _place(part: tuple[tuple[Group, list[Row]], bytes]) -> tuple[int, int, int]:
    """Order in a lease."""
    (group, _), _ = part
    return (group.batch, group.explorer, group.task)


def _verify(group: Group, rows: Sequence[Row], block: bytes, hashes: Mapping[str, str]) -> None:
    """Raises PayloadDamaged where one of these rows is not in the block as it was stored."""
    try:
        found = contents(block, [r.position for r in rows])
    except (ValueError, TypeError, KeyError, IndexError, OverflowError, msgspec.MsgspecError) as e:
        raise PayloadDamaged(f"payload {group.locator} of group {group.id} cannot be read: {e}. {REMEDY}") from e
    for row, content in zip(rows, found, strict=True):
        if content.hash != hashes[row.id]:
            raise PayloadDamaged(f"payload {group.locator} does not hold {row.id} as it was stored. {REMEDY}")


def _statistics(name: str, members: Sequence[_Member]) -> GroupStats:
    """Of the scored members."""
    rewards, runs, steps, lengths = zip(*members, strict=True)
    n = len(rewards)
    mean = sum(rewards) / n
    std = (sum((r - mean) ** 2 for r in rewards) / (n - 1)) ** 0.5 if n > 1 else 0.0
    return GroupStats(group=name, rewards=rewards, mean=mean, std=std, runs=runs, steps=steps, lengths=lengths)

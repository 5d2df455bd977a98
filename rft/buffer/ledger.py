"""The ledger: ids, states, uses and typed columns of every experience, in an SQLite or PostgreSQL
database.  One thread uses it.

Does not know which calls wait.  Invariant: each writing method is one transaction, durable when it
returns as `durability` says (process: survives kill -9 of every process; power: also a failure of
the machine).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import msgspec
from sqlalchemy import Connection, and_, exists, func, select, update

from rft.buffer.base import Audit, LineageStart
from rft.buffer.database import Database
from rft.buffer.derived_state import (
    LOST,
    NO_LIMIT,
    UseCounts,
    chain,
    count,
    count_uses,
    derive_states,
    has_used_rows,
    misplaced,
    ready_groups,
    strays,
)
from rft.buffer.image_files import any_stored, files_of, keep_only
from rft.buffer.mixing import MixedCounts
from rft.buffer.row_selectors import DAMAGED, ReadyGroup, ReadyRow
from rft.buffer.schema import checkpoints, experiences, groups, lineages, parts, put_many
from rft.buffer.settings import BufferSettings
from rft.buffer.storage.base import REMEDY, Storage
from rft.buffer.tables import prepare
from rft.errors import BufferFailed, Fenced, PayloadDamaged
from rft.fault_injection import fault
from rft.types.block import UNREADABLE, contents
from rft.types.ids import Version
from rft.types.ports import Consumption

log = logging.getLogger(__name__)
R = TypeVar("R")


class Ledger:
    """The ledger and its payload `storage`; `location` is for messages."""

    def __init__(self, settings: BufferSettings, storage: Storage) -> None:
        self.settings = settings
        self.storage = storage
        self.database = Database(settings)
        self.run = self.database.run
        self.location = self.database.location
        self.ancestry: dict[int, int] = {}
        # locators of this process, for a storage that loses them with it
        self.blocks: set[str] = set()
        self.garbage: list[str] = []  # locators without a group; freed with the next append
        self.closed: set[tuple[int, int]] = set()
        self.images = False  # whether rows may show images
        self.lineage = 0
        self.cursor = 0
        # the last checkpoint's step and counts
        self.counted: tuple[int, int, int, dict[str, int]] | None = None
        self.none_before = 0  # explore batch: all rows of earlier batches were used or explained
        self.first_open: dict[int, int] = {}  # explorer -> its first batch that may be open
        self.newest_step = 0  # newest optimizer step whose weights can exist in this lineage

    # ------------------------------------------------------------ opening

    def open(self) -> None:
        """Open or create the ledger.

        Raises SetupError on a network file system or without the server, BufferFailed for another
        owner or an unknown format.
        """

        def work(tx: Connection) -> int:
            prepare(tx, self.settings, self.location)
            self.images = any_stored(tx)
            return tx.scalar(select(func.max(lineages.c.lineage))) or 0

        try:
            self.lineage = self.database.open(work)
            self.storage.open()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self.storage.close()
        self.database.close()

    # ------------------------------------------------------------ lineages

    def start_lineage(
        self, parent: Version | None, consumption: Consumption | None, step: int = 0
    ) -> tuple[LineageStart, list[ReadyGroup]]:
        """Start the next lineage; facts that do not descend from `parent` stop counting.

        `step`: first step without a parent.
        """
        s = self.settings
        step = parent.step if parent else step
        cursor = consumption.cursor if consumption else 0

        def work(tx: Connection) -> tuple[LineageStart, dict[int, int], list[ReadyGroup]]:
            fault("buffer.lineage")
            if parent is not None and consumption is not None:
                self._verify(tx, parent, consumption)
                note_checkpoint(tx, parent, consumption)
            lineage = (
                max(
                    tx.scalar(select(func.max(lineages.c.lineage))) or 0,
                    parent.lineage if parent else 0,
                )
                + 1
            )
            begun = (parent.lineage, parent.step) if parent else (None, None)
            put_many(tx, lineages, [(lineage, *begun, cursor, time.time())])
            ancestry = chain(tx, Version(lineage, step), all_steps=True)
            derive_states(tx, ancestry, s.max_uses, s.resume_rows)
            self._forget_lost(tx)
            ready = ready_groups(tx, ancestry, s.max_uses)
            if not self.storage.durable and self.images:
                self.garbage += keep_only(tx, [g.id for g in ready])
            if s.on_damaged_payload == "explain":
                ready = [g for g in ready if not self._given_up(tx, g)]
            orphaned = (
                tx.scalar(select(func.count()).where(experiences.c.explained == "orphaned")) or 0
            )
            available = (
                tx.scalar(select(func.count()).where(experiences.c.state == "available")) or 0
            )
            return (
                LineageStart(
                    lineage=lineage, orphaned=orphaned, available=available, cursor=cursor
                ),
                ancestry,
                ready,
            )

        start, self.ancestry, ready = self.run(work)
        self.lineage = start.lineage
        self.cursor = cursor
        self.newest_step = step
        self.closed = set()
        self.counted = None
        self.none_before = 0
        self.first_open = {}
        if not self.storage.durable:
            self.forget(self.blocks - {g.locator for g in ready})
        return start, ready

    def forget(self, locators: Iterable[str]) -> None:
        """Mark blocks that only memory holds as garbage."""
        self.garbage += locators
        self.blocks.difference_update(self.garbage)

    def _verify(self, tx: Connection, parent: Version, stated: Consumption) -> None:
        ancestry = chain(tx, parent)
        num_uses, digest = count_uses(ancestry, UseCounts(tx))
        if (mixed := MixedCounts(tx).within(ancestry)) != stated.mixed:
            raise BufferFailed(
                f"the checkpoint {parent} was made after {stated.mixed or 'no'} uses of mixed-in "
                f"rows, but the buffer {self.location} knows "
                f"{mixed or 'none'}: restore the buffer folder that belongs to it, or start a new "
                f"run from its weights."
            )
        if (num_uses, digest) != (stated.num_uses, stated.digest):
            raise BufferFailed(
                f"the checkpoint {parent} was made after {stated.num_uses} uses (digest "
                f"{stated.digest}), "
                f"but the buffer {self.location} knows {num_uses} ({digest}). "
                "Checkpoint and buffer belong to different runs, or one was replaced: "
                "restore the buffer folder that belongs to it, or start a new run from its weights."
            )

    def _forget_lost(self, tx: Connection) -> None:
        """Mark rows whose payload was lost with an earlier process as no longer available."""
        if self.storage.durable:
            return
        waiting = select(groups.c.id, groups.c.locator).where(
            exists().where(
                and_(experiences.c.group_id == groups.c.id, experiences.c.state == "available")
            )
        )
        for lost in parts([g.id for g in tx.execute(waiting) if g.locator not in self.blocks]):
            lost_rows = and_(experiences.c.group_id.in_(lost), experiences.c.state == "available")
            tx.execute(
                update(experiences).where(lost_rows).values(state="explained", explained=LOST)
            )
            tx.execute(update(groups).where(groups.c.id.in_(lost)).values(held=False))

    def _given_up(self, tx: Connection, group: ReadyGroup) -> bool:
        """Return whether the payload of a ready group is lost.

        Then its rows are never trained and its task is explored again.
        """
        problem = self.damage(tx, group, group.ready)
        if problem is None:
            return False
        log.error("group %s is given up (%s): %s", group.id, DAMAGED, problem)
        lost = experiences.c.id.in_([r.id for r in group.ready])
        tx.execute(
            update(experiences)
            .where(lost)
            .values(dropped=DAMAGED, state="explained", explained=DAMAGED)
        )
        tx.execute(
            update(groups).where(groups.c.id == group.id, ~has_used_rows()).values(held=False)
        )
        return True

    def damage(self, tx: Connection, group: ReadyGroup, rows: Sequence[ReadyRow]) -> str | None:
        """Return the problem of these rows' payload, or None."""
        e = experiences.c
        hashes = {
            r.id: r.content_hash
            for r in tx.execute(select(e.id, e.content_hash).where(e.group_id == group.id))
        }
        try:
            (block,) = self.storage.get([group.locator], tx)
            verify(group.locator, block, [(r.id, r.position, hashes[r.id]) for r in rows])
            files_of(tx, self.storage, [group.id] if self.images else [])
        except PayloadDamaged as error:
            return str(error)
        return None

    def run_for(
        self, lineage: int, work: Callable[[Connection], R], point: str = "", *, size: int = 0
    ) -> R:
        """Run `work` in one transaction for the trainer of `lineage` or its explorers.

        `point`: fault injection point.  `size`: bytes of payload that it writes.
        """

        def fenced(tx: Connection) -> R:
            self.fence(lineage)
            fault(point)
            return work(tx)

        return self.run(fenced, size=size)

    def writers(self) -> dict[int, int]:
        """Return {lineage: newest step} of the versions whose rows are accepted.

        If rows are kept on resume, this includes versions that a restart abandoned.
        """
        earlier = (
            dict.fromkeys(range(1, self.lineage), NO_LIMIT)
            if self.settings.resume_rows == "keep"
            else self.ancestry
        )
        return {**earlier, self.lineage: self.newest_step}

    def fence(self, lineage: int) -> None:
        """Raise Fenced for a caller of another lineage than the current one."""
        if lineage != self.lineage:
            raise Fenced(
                f"lineage {lineage} no longer owns the buffer: lineage {self.lineage} has taken "
                f"over"
            )

    # ------------------------------------------------------------ looking

    def audit(self, leased: int, ready: int) -> Audit:
        """Return the facts' counts for the current lineage, checked against stored states and the
        `leased` + `ready` rows.
        """
        s = self.settings
        version = f"{self.lineage}:{self.newest_step}"

        def work(tx: Connection) -> tuple[Audit, int]:
            facts, now = count(
                tx,
                self.ancestry,
                UseCounts(tx),
                max_uses=s.max_uses,
                resume_rows=s.resume_rows,
                version=version,
            )
            facts = msgspec.structs.replace(
                facts, problems=(*facts.problems, *misplaced(tx, now), *strays(tx))
            )
            return facts, tx.scalar(
                select(func.count()).where(experiences.c.explained == LOST)
            ) or 0

        facts, lost = self.run(work)
        problems = list(facts.problems)
        available = facts.available - lost
        if available != leased + ready:
            problems.append(
                f"{available} rows can be trained by the ledger, {leased} leased + {ready} "
                f"ready in memory"
            )
        discarded = {**facts.discarded, **({LOST: lost} if lost else {})}
        return msgspec.structs.replace(
            facts,
            leased=leased,
            available=available - leased,
            discarded=discarded,
            problems=tuple(problems),
        )


def note_checkpoint(tx: Connection, version: Version, stated: Consumption) -> None:
    row = (
        version.lineage,
        version.step,
        stated.num_uses,
        stated.digest,
        stated.cursor,
        time.time(),
    )
    put_many(tx, checkpoints, [row], replace=True)


def verify(locator: str, block: bytes, rows: Sequence[tuple[str, int, str]]) -> None:
    """Raise PayloadDamaged if a row (id, position, content hash) is not in the block as stored."""
    try:
        stored_contents = contents(block, [position for _, position, _ in rows])
    except UNREADABLE as e:
        raise PayloadDamaged(
            f"payload {locator} of {rows[0][0]} cannot be read: {e}. {REMEDY}"
        ) from e
    for (row, _, stored), content in zip(rows, stored_contents, strict=True):
        if content.hash != stored:
            raise PayloadDamaged(
                f"payload {locator} does not hold {row} as it was stored. {REMEDY}"
            )

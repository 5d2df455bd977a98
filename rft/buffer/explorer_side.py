"""The explorer's side of the buffer (`rft.types.ports.BufferWriter`) stores groups, several per
transaction.

Independent of leases.  Invariant: an append returns once its group is durable and, if it can be
trained, in the queue from which rows are leased.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from statistics import fmean
from typing import Any

import msgspec
from sqlalchemy import Connection, and_, delete, func, insert, select

from rft.buffer import image_files, session_rows
from rft.buffer.core import BufferCore
from rft.buffer.intake import IncomingGroup, batch_of, parse_group
from rft.buffer.ledger import Ledger
from rft.buffer.row_selectors import ClosedBatch, ReadyGroup
from rft.buffer.schema import (
    ask,
    batches,
    experiences,
    groups,
    lineages,
    meta,
    parts,
    put_many,
    rejections,
    texts,
)
from rft.errors import BufferFailed, ConfigError, Fenced, FrameRejected, IdConflict
from rft.fault_injection import fault
from rft.types.credit import ScoredRow, run_rewards
from rft.types.ports import NO_IMAGES, AppendResult, StoredGroup, TaskOutcome
from rft.worker.waiting import idles

_GROUP_COMMIT = 64  # appends per transaction, at most
_COUNT_GOOD = (
    "SELECT count(*) FROM groups WHERE batch = ? AND explorer = ? AND accepted AND "
    "num_eligible > 0 AND held"
)


class Offer(msgspec.Struct):
    """A group that waits to be stored: a call of `append`."""

    lineage: int
    frame: bytes
    accepted: bool
    reason: str
    explorer: int
    sessions: tuple[str, ...] = ()  # served sessions of these runs, in run order
    images: Mapping[str, bytes] = NO_IMAGES

    @property
    def num_bytes(self) -> int:
        return len(self.frame) + sum(map(len, self.images.values()))


class Stored(msgspec.Struct):
    """Result of an offer; `group` is None if nothing can be trained or the group was stored before."""

    result: AppendResult
    key: tuple[int, int] | None = None  # (batch, explorer), None for a repeated append
    group: ReadyGroup | None = None


class ExplorerSide(BufferCore):
    """Every method takes the caller's lineage and explorer; raises Fenced for an old lineage."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._offers: list[tuple[Offer, asyncio.Future[AppendResult]]] = []
        self._flusher: asyncio.Task[None] | None = None

    async def append(
        self,
        lineage: int,
        frame: bytes,
        *,
        accepted: bool,
        reason: str = "",
        sessions: tuple[str, ...] = (),
        images: Mapping[str, bytes] = NO_IMAGES,
        explorer: int = 0,
    ) -> AppendResult:
        """Store one group and the files of its images; an accepted one waits while the buffer is
        full.

        Raises IdConflict, Fenced, FrameRejected (counted by reason).
        """
        self._check_explorer(explorer)
        self._check_open()
        offer = Offer(lineage, frame, accepted, reason, explorer, sessions, images)
        if accepted:
            await self._admit(offer)
        answer: asyncio.Future[AppendResult] = asyncio.get_running_loop().create_future()
        self._offers.append((offer, answer))
        if self._flusher is None or self._flusher.done():
            self._flusher = asyncio.create_task(self._flush(), name="buffer-append")
        return await answer

    async def room(self, lineage: int, batch: int, *, explorer: int = 0) -> None:
        """Wait until the untrained groups are below capacity, in number and bytes, or a lease needs
        this batch.
        """
        await self._wait_for_room(lineage, batch, explorer)
        self._fence(lineage)

    async def close_batch(
        self,
        lineage: int,
        batch: int,
        *,
        accepted: int,
        expected: int,
        reasons: dict[str, int],
        explorer: int = 0,
    ) -> None:
        """Mark the batch as complete: no further group of it is stored; idempotent."""
        self._check_explorer(explorer)
        self._fence(lineage)
        order = self._order

        def work(tx: Connection) -> int:
            row = (
                lineage,
                explorer,
                batch,
                accepted,
                expected,
                json.dumps(reasons, sort_keys=True),
            )
            put_many(tx, batches, [row], replace=True)
            return int(ask(tx, _COUNT_GOOD, (batch, explorer)).scalar_one())

        def close() -> int:
            good = self._ledger.run_for(lineage, work, "buffer.close_batch")
            self._ledger.closed.add((batch, explorer))
            return good

        # groups that are trainable or were trained, by the ledger
        good = await self._run(close)
        if good < accepted:  # accepted by the explorer, but without a trainable row
            reasons = {**reasons, "nothing_to_train": accepted - good}
        order.close((batch, explorer), ClosedBatch(good, expected, reasons))
        await self._notify()

    async def stored_groups(
        self, lineage: int, first_batch: int, *, explorer: int = 0
    ) -> list[StoredGroup]:
        """Return stored groups from `first_batch` on that must not be explored again."""
        return await self._run_fenced(lineage, lambda tx: stored_groups(tx, explorer, first_batch))

    async def outcomes(
        self, lineage: int, first_batch: int, end_batch: int, *, explorer: int = 0
    ) -> list[TaskOutcome]:
        """Return pass rates of tasks of batches [first_batch, end_batch), for adaptive selectors."""
        return await self._run_fenced(
            lineage, lambda tx: outcomes(tx, explorer, first_batch, end_batch)
        )

    async def check_taskset_fingerprints(
        self, lineage: int, fingerprints: dict[str, str], *, explorer: int = 0
    ) -> list[str]:
        """See `ports.BufferWriter`."""
        return await self._run_fenced(
            lineage,
            lambda tx: same_rows(tx, lineage, explorer, fingerprints, self._settings.resume_rows),
        )

    async def finish(self, lineage: int, reason: str, *, explorer: int = 0) -> None:
        """Note that this explorer appends no more groups."""
        self._check_explorer(explorer)
        self._fence(lineage)
        self._order.finish(explorer, reason)
        await self._notify()

    async def _flush(self) -> None:
        """Group commit: appends that arrive during a transaction share the next one."""
        while self._offers:
            now, self._offers = self._offers[:_GROUP_COMMIT], self._offers[_GROUP_COMMIT:]
            self._no_append.clear()
            try:
                await self._store(now)
            finally:
                self._no_append.set()
            await asyncio.sleep(0)  # let other tasks run

    async def _store(self, now: list[tuple[Offer, asyncio.Future[AppendResult]]]) -> None:
        answers: Sequence[Stored | BaseException]
        order = self._order
        try:
            answers = await self._retry_while_full(
                functools.partial(self._append, [offer for offer, _ in now]), appends=True
            )
        except Exception as e:  # concerns every append of the transaction
            answers = [e] * len(now)
        for (offer, future), answer in zip(now, answers, strict=True):
            if isinstance(answer, Stored) and answer.key is not None:
                order.add(answer.key, answer.group)
            if offer.accepted:
                self._limiter.settle(offer.num_bytes)
            if future.done():  # the caller was cancelled; the group stays stored
                continue
            if isinstance(answer, Stored):
                future.set_result(answer.result)
            else:
                future.set_exception(answer)
        await self._notify()

    def _append(self, offers: Sequence[Offer]) -> list[Stored | BufferFailed]:
        """Store the offered groups in one transaction; skip repeated ones, refuse invalid ones.

        Runs on the ledger's thread.
        """
        self._reserve.fill()
        ledger = self._ledger
        parsed: list[IncomingGroup | BufferFailed] = [self._parse(offer) for offer in offers]
        names = [x.id for x in parsed if isinstance(x, IncomingGroup)]

        def work(tx: Connection) -> tuple[list[IncomingGroup | Stored | BufferFailed], list[str]]:
            fault("buffer.append.before")
            stored_hashes: dict[str, str] = {}
            for part in parts(names):
                stored_hashes.update(
                    (x, content)
                    for x, content in ask(
                        tx, "SELECT id, content_hash FROM groups WHERE id IN (??)", many=part
                    )
                )
            answers = [
                x if isinstance(x, BufferFailed) else self._new(x, stored_hashes) for x in parsed
            ]
            for i, (offer, x) in enumerate(zip(offers, answers, strict=True)):
                if isinstance(x, IncomingGroup) and not session_rows.all_wait(tx, offer.sessions):
                    answers[i] = FrameRejected(f"session_over: a session of group {x.id} has ended")
            new, locators = self._put(tx, answers)
            put_many(tx, groups, [x.header(at) for x, at in zip(new, locators, strict=True)])
            put_many(tx, experiences, [row for x in new for row in x.rows])
            put_many(tx, texts, [row for x in new for row in x.texts])
            for offer, x in zip(offers, answers, strict=True):
                if isinstance(x, IncomingGroup):
                    session_rows.accept(tx, x.id, offer.sessions)
            self._count_rejections(tx, answers)
            fault("buffer.append.stored")
            return answers, locators

        answers, locators = ledger.run(
            work, size=sum(x.num_bytes for x in parsed if isinstance(x, IncomingGroup))
        )
        ledger.garbage = []
        fault("buffer.append.after")
        if not ledger.storage.durable:  # memory keeps only what can be trained
            ledger.blocks.update(locators)
            new = [x for x in answers if isinstance(x, IncomingGroup)]
            ledger.forget([at for x, at in zip(new, locators, strict=True) if not x.ready])
        places = iter(locators)
        return [_stored(x, next(places)) if isinstance(x, IncomingGroup) else x for x in answers]

    def _parse(self, offer: Offer) -> IncomingGroup | BufferFailed:
        """Decode the rows of an offered group; return the error if they are invalid."""
        try:
            self._ledger.fence(offer.lineage)
            writers = self._ledger.writers()
            intake = parse_group(
                offer.frame,
                self._settings,
                offer.lineage,
                writers,
                accepted=offer.accepted,
                reason=offer.reason,
                images=offer.images,
            )
            if intake.numbers.explorer != offer.explorer:
                raise FrameRejected(
                    f"foreign_explorer: group {intake.id} was appended by explorer {offer.explorer}"
                )
        except BufferFailed as e:
            return e
        return intake

    def _new(
        self, x: IncomingGroup, stored_hashes: dict[str, str]
    ) -> IncomingGroup | Stored | BufferFailed:
        """Return `x` if it is new, its result if it is a repetition, or why it is refused."""
        name = x.id
        content = x.content_hash
        if (old := stored_hashes.get(name)) is not None:
            if old == content:
                return Stored(AppendResult(appended=0, duplicates=len(x.rows)))
            return IdConflict(
                f"group {name} is stored with other content ({old}, now {content}); ids are never "
                f"used again"
            )
        if x.key in self._ledger.closed:
            return FrameRejected(f"closed_batch: group {name} came after its batch was closed")
        stored_hashes[name] = content
        return x

    def _put(
        self, tx: Connection, answers: list[IncomingGroup | Stored | BufferFailed]
    ) -> tuple[list[IncomingGroup], list[str]]:
        """Store the payload of new groups; return these groups and a locator for each."""
        ledger = self._ledger
        files = self._new_images(tx, answers)
        new = [x for x in answers if isinstance(x, IncomingGroup)]
        ledger.storage.drop(ledger.garbage, tx)
        blocks = [*files.values(), *(x.frame for x in new)]
        ledger.garbage = ledger.storage.put(blocks, tx) if blocks else []
        if any(x.shown for x in new):
            ledger.images = True
            of_files = list(zip(files, ledger.garbage, map(len, files.values()), strict=False))
            shown = ((name, x.id) for x in new if _outlives_append(x, ledger) for name in x.shown)
            image_files.note(tx, of_files, shown)
        return new, ledger.garbage[len(files) :]

    def _new_images(
        self, tx: Connection, answers: list[IncomingGroup | Stored | BufferFailed]
    ) -> dict[str, bytes]:
        """Return the files to be stored; a group with an image that nobody has is refused."""
        groups = [x for x in answers if isinstance(x, IncomingGroup) and x.shown]
        if not groups:
            return {}
        stored = image_files.stored(tx, {name for x in groups for name in x.shown})
        files: dict[str, bytes] = {}
        for i, x in enumerate(answers):
            if not isinstance(x, IncomingGroup):
                continue
            if absent := x.shown - stored - x.images.keys():
                answers[i] = FrameRejected(
                    f"missing_image: group {x.id} shows image {min(absent)}, whose file was not "
                    f"given"
                )
            elif _outlives_append(x, self._ledger):
                files |= {name: x.images[name] for name in sorted(x.shown - stored)}
        return files

    def _count_rejections(self, tx: Connection, answers: Sequence[object]) -> None:
        counts = Counter(str(x).split(":")[0] for x in answers if isinstance(x, FrameRejected))
        counts.update("id_conflict" for x in answers if isinstance(x, IdConflict))
        counts.update("fenced" for x in answers if isinstance(x, Fenced))
        put_many(
            tx,
            rejections,
            [(self._ledger.lineage, reason, n) for reason, n in counts.items()],
            again='ON CONFLICT (lineage, reason) DO UPDATE SET "count" = rejections."count" + '
            'excluded."count"',
        )

    async def _admit(self, offer: Offer) -> None:
        """Wait for capacity for a group.  An unreadable frame passes: the ledger refuses and counts it."""
        lineage = offer.lineage
        if not self._has_room(lineage, None) and (batch := batch_of(offer.frame)) is not None:
            await self._wait_for_room(lineage, batch, offer.explorer)
            self._check_open()
        self._limiter.admit(offer.num_bytes)

    async def _wait_for_room(self, lineage: int, batch: int, explorer: int) -> None:
        with idles(
            f"explore batch {batch} waits until the trainer makes room in the buffer "
            f"(experience_buffer.capacity)"
        ):
            async with self._changed:
                await self._changed.wait_for(lambda: self._has_room(lineage, (batch, explorer)))

    def _has_room(self, lineage: int, key: tuple[int, int] | None) -> bool:
        """Return whether a group may be stored; True for a replaced lineage, whose waits fail."""
        return lineage != self._lineage or self._closed or self._limiter.room(self._order, key)

    def _check_explorer(self, explorer: int) -> None:
        if not 0 <= explorer < self._settings.num_explorers:
            raise BufferFailed(
                f"explorer {explorer}: this buffer was opened for {self._settings.num_explorers} "
                f"explorers, from 0"
            )


def _outlives_append(x: IncomingGroup, ledger: Ledger) -> bool:
    """Return whether the payload of a group outlives the append."""
    return ledger.storage.durable or bool(x.ready)


def _stored(x: IncomingGroup, locator: str) -> Stored:
    group = None
    if x.ready:
        group = ReadyGroup(x.id, *x.key, x.numbers.task, locator, x.ready, num_bytes=x.num_bytes)
    return Stored(AppendResult(appended=len(x.rows), duplicates=0), x.key, group)


def stored_groups(tx: Connection, explorer: int, first_batch: int) -> list[StoredGroup]:
    g = groups.c
    rows = tx.execute(
        select(g.batch, g.task, and_(g.accepted, g.num_eligible > 0).label("good"))
        .where(g.batch >= first_batch, g.explorer == explorer, g.held)
        .order_by(g.batch, g.task)
    )
    return [StoredGroup(r.batch, r.task, bool(r.good)) for r in rows]


def outcomes(tx: Connection, explorer: int, first_batch: int, end_batch: int) -> list[TaskOutcome]:
    """Return the outcome of every scored, held group of `explorer` in batches [first_batch,
    end_batch), accepted or not, by batch and task.
    """
    e = experiences.c
    g = groups.c
    rows = tx.execute(
        select(
            g.id,
            g.batch,
            g.task,
            e.taskset,
            e.task_index,
            e.reward,
            e.run,
            e.step,
            e.num_response_tokens,
            e.credit,
        )
        .join(experiences, e.group_id == g.id)
        .where(
            g.explorer == explorer,
            g.batch >= first_batch,
            g.batch < end_batch,
            g.held,
            e.reward.is_not(None),
        )
        .order_by(g.batch, g.task, g.id, e.id)
    )
    task_outcomes = []
    for _, members in groupby(rows, key=lambda r: r.id):
        first, *rest = members
        runs = run_rewards(
            ScoredRow(r.reward, r.run, r.step, r.num_response_tokens, r.credit)
            for r in (first, *rest)
        ).values()
        task_outcomes.append(
            TaskOutcome(
                first.batch, first.task, first.taskset, first.task_index, fmean(runs), len(runs)
            )
        )
    return task_outcomes


def same_rows(
    tx: Connection, lineage: int, explorer: int, fingerprints: Mapping[str, str], resume_rows: str
) -> list[str]:
    """Compare taskset fingerprints, see `ports.BufferWriter.check_taskset_fingerprints`.

    Only if `lineage` continues a checkpoint, or keeps the rows of earlier starts without a
    checkpoint.
    """
    prefix = f"taskset:{explorer}:"
    of_explorer = meta.c.key.startswith(prefix, autoescape=True)
    before = {
        r.key.removeprefix(prefix): r.value for r in tx.execute(select(meta).where(of_explorer))
    }
    goes_on = (
        resume_rows == "keep"
        or tx.scalar(select(lineages.c.parent_lineage).where(lineages.c.lineage == lineage))
        is not None
    )
    names = sorted({*before, *fingerprints}) if before and goes_on else []
    # earlier versions stored only the end of a fingerprint
    changed = [n for n in names if not fingerprints.get(n, "").endswith(before.get(n, "new"))]
    if explored := [n for n in changed if not n.startswith("eval/")]:
        raise ConfigError(
            f"the rows of {', '.join(explored)} are not those that the run has explored so far "
            f"(another file, filter or function "
            "result), so it cannot resume.  Bring the old rows back, or give the run another name "
            "to begin anew",
            key="buffer.explorer_input.tasksets",
            given=explored,
        )
    tx.execute(delete(meta).where(of_explorer))
    if fingerprints:
        tx.execute(
            insert(meta),
            [
                {"key": prefix + name, "value": value}
                for name, value in sorted(fingerprints.items())
            ],
        )
    return [n.removeprefix("eval/") for n in changed if n in before and n in fingerprints]


def count_rejected(tx: Connection) -> dict[str, int]:
    """Count refused frames by reason, over all lineages."""
    r = rejections.c
    query = select(r.reason, func.sum(r["count"])).group_by(r.reason).order_by(r.reason)
    return {k: int(n) for k, n in tx.execute(query)}

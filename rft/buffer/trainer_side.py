"""The trainer's side of the buffer, see `rft.types.ports.BufferReader`: rows are leased to a step,
then used or discarded.

It knows no explorer.  The one invariant: a step has at most one lease, and a repeated call about it
is a no-op.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from operator import attrgetter
from typing import Any

from sqlalchemy import Connection, and_, func, select

from rft.buffer import schema
from rft.buffer.core import BufferCore
from rft.buffer.derived_state import NO_LIMIT, UseCounts, beyond, chain, counted_uses, digest, move
from rft.buffer.intake import clean
from rft.buffer.lease_order import LeaseOrder
from rft.buffer.ledger import Ledger, note_checkpoint, verify
from rft.buffer.mixing import MixedCounts
from rft.buffer.row_selectors import DAMAGED, DROPPED, LeaseRequest, Selection, WaitingGroup
from rft.buffer.schema import (
    ask,
    batches,
    experiences,
    explanations,
    leases,
    mixed_uses,
    parts,
    put_many,
    uses,
)
from rft.errors import BufferFailed, DeadlineExceeded, PayloadDamaged, ShortBatch
from rft.fault_injection import fault
from rft.types import token_logprobs
from rft.types.block import bundle
from rft.types.credit import ScoredRow, group_statistics, parted_runs
from rft.types.ids import Version
from rft.types.ports import Consumption, GroupStats, Lease
from rft.worker.waiting import idles

_HEADERS = (
    "SELECT id, group_id, content_hash, reward, run, step, num_response_tokens, credit FROM "
    "experiences WHERE group_id IN (??) "
    "ORDER BY id"
)
_id = attrgetter("id")
log = logging.getLogger(__name__)

# a block, positions of rows in it, their rewards
_Header = tuple[bytes, list[int], list[float | None]]


class TrainerSide(BufferCore):
    """Every method names the lineage that calls it, and raises Fenced for another one than the
    newest: the trainer was replaced.
    """

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        # by step: calls about it that run or wait
        self._turns: dict[int, tuple[asyncio.Lock, int]] = {}

    async def lease(
        self,
        lineage: int,
        step: int,
        *,
        groups: int | None,
        rows: int | None,
        deadline_s: float,
        max_staleness: int | None,
        until: int | None = None,
    ) -> Lease:
        """The rows of `step`.  Asked again before `use` or `discard`, it gives the same rows.  It
        waits for events.
        """
        self._fence(lineage)
        wanted = LeaseRequest(step, groups, rows, max_staleness, until)
        if groups is not None and groups > self._settings.capacity:
            raise BufferFailed(
                f"a train batch of {groups} groups can never be filled: buffer.capacity is "
                f"{self._settings.capacity}"
            )
        async with self._about(step):
            return await self._lease(lineage, wanted, deadline_s)

    async def _lease(self, lineage: int, wanted: LeaseRequest, deadline_s: float) -> Lease:
        self._fence(lineage)
        step = wanted.step
        choice = self._order.leases.get(step) or await self._wait(lineage, wanted, deadline_s)
        order = self._order
        try:
            try:
                frame, statistics = await self._leased_rows(lineage, step, choice)
            except PayloadDamaged:
                if self._settings.on_damaged_payload == "stop":
                    raise
                await self._leave_out(order, wanted, choice)
                frame, statistics = await self._leased_rows(lineage, step, choice)
        except BaseException:
            if step in order.leases:
                order.give_back(step)
                await self._notify()
            raise
        over = [group for group, _ in choice.dropped_rows if not group.waiting and not group.leased]
        choice.dropped.clear()  # discarded; a repeated lease must not do so again
        await self._free(over)
        if choice.missing:
            log.warning(
                "step %d trains with %d %s fewer than asked for", step, choice.missing, wanted.unit
            )
        return Lease(
            step=step,
            frame=frame,
            groups=statistics,
            available_after=order.num_waiting,
            missing=choice.missing,
        )

    async def _leased_rows(
        self, lineage: int, step: int, choice: Selection
    ) -> tuple[bytes, tuple[GroupStats, ...]]:
        """The chosen rows as a frame, behind them those of another source, and the groups' frozen
        statistics.
        """

        def work(tx: Connection) -> tuple[bytes, dict[str, list[ScoredRow]]]:
            chosen, scored = lease_rows(tx, self._ledger, step, choice)
            return bundle([*chosen, *further]), scored

        mixed = [self._mix.block(step)] if self._mix else []
        further = [(block, range(len(rewards)), rewards) for block, rewards in mixed]
        frame, scored = await self._fenced(lineage, work, "buffer.lease")
        for group, _ in choice.picked:
            group.frozen = group.frozen or _frozen(group.id, scored[group.id])
        return frame, tuple(g.frozen for g, _ in choice.picked if g.frozen is not None)

    async def use(self, lineage: int, step: int, logprobs: bytes | None = None) -> None:
        """The lease of `step` was trained on.  Repeating it is a no-op.

        Of `logprobs` those of the rows' first uses are kept, in the same transaction.  A first use
        that does not count any more is replaced by the one that does.
        """
        async with self._about(step):
            order, choice = await self._leased(lineage, step)
            if choice is None:
                return
            most = self._settings.max_uses
            rows = [row for _, part in choice.picked for row in part]
            used = [r.id for r in rows if r.uses + 1 >= most]
            first = {r.id for r in rows if r.uses == 0}
            kept = (
                []
                if logprobs is None
                else [x for x in token_logprobs.decode(logprobs) if x.id in first]
            )

            def work(tx: Connection) -> None:
                now = time.time()
                put_many(tx, uses, [(r.id, lineage, step, now) for r in rows])
                put_many(
                    tx,
                    schema.token_logprobs,
                    [(x.id, lineage, step, x.token_start, x.pairs) for x in kept],
                    replace=True,
                )
                if (mix := self._mix) is not None:
                    put_many(tx, mixed_uses, [(mix.name, x, lineage, step) for x in mix.ids(step)])
                move(tx, used, "used")

            await self._fenced(lineage, work, "buffer.use.before")
            fault("buffer.use.after")
            await self._done(order, step, most)

    async def discard(self, lineage: int, step: int, reason: str) -> None:
        """The lease of `step` will never be trained on, e.g. "nonfinite".  Repeating it is a no-op."""
        if not reason:
            raise BufferFailed(f"discard of step {step} needs a reason")
        async with self._about(step):
            order, choice = await self._leased(lineage, step)
            if choice is None:
                return
            ids = [r.id for _, part in choice.picked for r in part]
            await self._fenced(
                lineage, lambda tx: discard(tx, lineage, step, ids, reason), "buffer.explain"
            )
            await self._done(order, step, None)

    async def consumption(self, lineage: int, step: int) -> Consumption:
        """What a manifest of `step` has to state; the digest's exact form is in
        `rft.buffer.derived_state.UseCounts`.
        """

        def work() -> Consumption:
            found = self._ledger.run_for(lineage, lambda tx: consumed(tx, self._ledger, step))
            self._ledger.database.sync()  # a manifest must not outlive the uses that it rests on
            return found

        return await self._work(work)

    async def _wait(self, lineage: int, wanted: LeaseRequest, deadline_s: float) -> Selection:
        now = asyncio.get_running_loop().time
        deadline = now() + deadline_s
        async with contextlib.AsyncExitStack() as held:
            held.enter_context(
                idles(lambda: f"the trainer waits for the explorer: {self._order.missing(wanted)}")
            )
            await held.enter_async_context(self._changed)
            starving = False
            while True:
                self._fence(lineage)
                found = self._order.lease(wanted)
                if isinstance(found, Selection):
                    self._ledger.newest_step = max(self._ledger.newest_step, wanted.step)
                    return found
                if now() >= deadline:
                    raise DeadlineExceeded(
                        f"the trainer waited {deadline_s:g} s for the explorer: "
                        f"{self._order.missing(wanted)}. "
                        "Raise buffer.trainer_input.experience_buffer.max_read_timeout if the "
                        "explorer is merely slow."
                    )
                if not starving:
                    starving = True
                    held.enter_context(self._limiter.starving())
                    # groups of the open batch may come beyond the bounds now
                    self._changed.notify_all()
                until = deadline
                if found.until is not None:  # something that rests may be used again then
                    until = min(until, now() + max(0.0, found.until - self._clock()))
                with contextlib.suppress(TimeoutError):  # one of these is due: looked at above
                    async with asyncio.timeout_at(until):
                        await self._changed.wait()

    @contextlib.asynccontextmanager
    async def _about(self, step: int) -> AsyncIterator[None]:
        """One call about a step at a time, so that a message that comes twice is a repetition, not
        a second lease.
        """
        lock, calls = self._turns.get(step) or (asyncio.Lock(), 0)
        self._turns[step] = (lock, calls + 1)
        try:
            async with lock:
                yield
        finally:
            lock, calls = self._turns.pop(step)
            if calls > 1:
                self._turns[step] = (lock, calls - 1)

    async def _leased(self, lineage: int, step: int) -> tuple[LeaseOrder, Selection | None]:
        """The lease of `step`; None when it was settled before."""
        self._fence(lineage)
        order = self._order
        choice = order.leases.get(step)
        if (
            choice is None
            and await self._fenced(lineage, lambda tx: settled(tx, lineage, step)) is None
        ):
            raise BufferFailed(f"step {step} of lineage {lineage} has no lease")
        return order, choice

    async def _done(self, order: LeaseOrder, step: int, max_uses: int | None) -> None:
        over = order.done(step, max_uses=max_uses)
        await self._notify()
        await self._free(over)

    async def _free(self, over: Sequence[WaitingGroup]) -> None:
        """These groups are done with: frees what only memory holds.  Durable payload stays."""
        locators = [g.locator for g in over]

        def drop() -> None:
            self._ledger.run(lambda tx: self._storage.drop(locators, tx))
            self._ledger.blocks.difference_update(locators)

        if over and not self._storage.durable:
            await self._work(drop)

    async def _leave_out(self, order: LeaseOrder, wanted: LeaseRequest, choice: Selection) -> None:
        """A lease goes on without the groups whose payload is gone; they are discarded."""
        ledger = self._ledger
        lineage = self._lineage
        why = await self._work(
            ledger.run, lambda tx: {g.id: ledger.damage(tx, g, rows) for g, rows in choice.picked}
        )
        damaged = {name: what for name, what in why.items() if what is not None}
        lost = [(group, rows) for group, rows in choice.picked if group.id in damaged]
        ids = [r.id for _, rows in lost for r in rows]
        await self._fenced(
            lineage, lambda tx: discard(tx, lineage, wanted.step, ids, DAMAGED), "buffer.explain"
        )
        order.lose(wanted.step, set(damaged))
        choice.missing += len(lost) if wanted.rows is None else sum(len(rows) for _, rows in lost)
        for group, _ in lost:
            log.error("group %s is left out (%s): %s", group.id, DAMAGED, damaged[group.id])
        if not choice.picked:
            raise ShortBatch(
                f"step {wanted.step}: the payload of all its groups is damaged, e.g. "
                f"{next(iter(damaged.values()))}"
            )


def lease_rows(
    tx: Connection, ledger: Ledger, step: int, choice: Selection
) -> tuple[list[_Header], dict[str, list[ScoredRow]]]:
    """Payload of the chosen rows, and the scored members of each of their groups; rows left out for
    good are explained.
    """
    lineage = ledger.lineage
    for reason, dropped in choice.dropped.items():
        discard(tx, lineage, step, [r.id for _, rows in dropped for r in rows], reason)
    blocks = ledger.storage.get([g.locator for g, _ in choice.picked], tx)
    # locked, where the database locks rows: an edit of a reward comes before this lease or is
    # refused
    locked = _HEADERS if tx.dialect.name == "sqlite" else f"{_HEADERS} FOR UPDATE"
    rewards: dict[str, float | None] = {}
    hashes: dict[str, str] = {}
    scored: dict[str, list[ScoredRow]] = {}
    for part in parts([g.id for g, _ in choice.picked]):
        for name, of, content, reward, *more in ask(tx, locked, many=part).all():
            rewards[name], hashes[name] = reward, content
            if reward is not None:
                scored.setdefault(of, []).append(ScoredRow(reward, *more))
    chosen = []
    for (group, rows), block in sorted(
        zip(choice.picked, blocks, strict=True), key=lambda part: (part[0][0].key, part[0][0].task)
    ):
        rows = sorted(rows, key=_id)
        verify(group.locator, block, [(r.id, r.position, hashes[r.id]) for r in rows])
        # the ledger's rewards hold, so that a row and its group's statistics never disagree
        chosen.append((block, [r.position for r in rows], [rewards[r.id] for r in rows]))
    now = time.time()
    leased = [(r.id, lineage, step, now) for _, rows in choice.picked for r in rows]
    put_many(tx, leases, leased, replace=True)  # from here on their rewards stand
    return chosen, scored


def discard(tx: Connection, lineage: int, step: int, ids: Sequence[str], reason: str) -> None:
    """These rows are not trained, by `step`.  Repeating it is a no-op."""
    reason = clean(reason)
    rows = [(x, lineage, step, reason) for x in ids]
    put_many(tx, explanations, rows, again="ON CONFLICT DO NOTHING")
    move(tx, ids, "explained", explained=reason)


def settled(tx: Connection, lineage: int, step: int) -> str | None:
    """What became of the lease of `step`: "used", the reason it was explained by, or None."""
    if (
        tx.scalar(
            select(uses.c.step).where(uses.c.lineage == lineage, uses.c.step == step).limit(1)
        )
        is not None
    ):
        return "used"
    x = explanations.c
    of_step = and_(x.lineage == lineage, x.step == step, x.reason.not_in(DROPPED))
    found: str | None = tx.scalar(select(x.reason).where(of_step).limit(1))
    return found


def consumed(tx: Connection, ledger: Ledger, step: int) -> Consumption:
    """What the manifest of `step` has to say; it is also written down here, for `v_lineage`."""
    version = Version(ledger.lineage, step)
    last, num_uses, total, mixed = ledger.counted or (NO_LIMIT, 0, 0, {})
    since: tuple[int, ...] = (ledger.lineage, last)
    ancestry = {ledger.lineage: step}
    if step < last:  # the first of this process
        since = ()
        ancestry = chain(tx, version)
        num_uses = 0
        total = 0
        mixed = {}
    more, of_more = UseCounts(tx, *since).of(ancestry)
    num_uses = num_uses + more
    total = total + of_more
    mixed = dict(sorted((Counter(mixed) + Counter(MixedCounts(tx, *since).of(ancestry))).items()))
    ledger.counted = step, num_uses, total, mixed
    found = Consumption(
        num_uses=num_uses, digest=digest(total), cursor=_cursor(tx, ledger, step), mixed=mixed
    )
    note_checkpoint(tx, version, found)
    return found


def _cursor(tx: Connection, ledger: Ledger, step: int) -> int:
    e = experiences.c
    first = select(func.min(experiences.c.batch))
    waiting = first.where(e.state == "available", e.batch >= ledger.none_before)
    if ledger.settings.max_uses > 1:  # rows that wait for another use do not hold the cursor back
        waiting = waiting.where(
            ~counted_uses(ledger.ancestry).where(uses.c.experience == e.id).exists()
        )
    later = [
        select(t.c.experience).where(*beyond(t, ledger.lineage, step)) for t in (uses, explanations)
    ]
    unused, *others = [tx.scalar(x) for x in (waiting, *(first.where(e.id.in_(x)) for x in later))]
    found = [_first_open(tx, ledger, explorer) for explorer in range(ledger.settings.num_explorers)]
    ledger.none_before = min([*found, *([] if unused is None else [unused])])
    return min([ledger.none_before, *(int(x) for x in others if x is not None)])


def _first_open(tx: Connection, ledger: Ledger, explorer: int) -> int:
    b = batches.c
    known = ledger.first_open.get(explorer, ledger.cursor)
    mine = (
        select(b.batch)
        .where(b.lineage == ledger.lineage, b.explorer == explorer, b.batch >= known)
        .order_by(b.batch)
    )
    # a short one ends the run, and is played again when that goes on
    if ledger.settings.on_short_batch == "stop":
        mine = mine.where(b.accepted >= b.wanted)
    closed = tx.scalars(mine).all()
    ledger.first_open[explorer] = next(
        (n for n, batch in enumerate(closed, known) if n != batch), known + len(closed)
    )
    return ledger.first_open[explorer]


def _frozen(name: str, members: Sequence[ScoredRow]) -> GroupStats:
    """The statistics of a group, whose rewards stand from here on."""
    for run, rewards in parted_runs(members).items():
        text = (
            "run %d of group %s: its rows were given the rewards %s; their mean counts.  Change "
            "the reward of all rows of a run"
        )
        log.warning(text, run, name, ", ".join(f"{r:g}" for r in rewards))
    return group_statistics(name, members)

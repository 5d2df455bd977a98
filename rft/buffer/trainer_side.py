"""The trainer's side of the buffer, see `rft.types.ports.BufferReader`.

    lease(step)    choose rows (`LeaseOrder`), read them and write table `leases` (`write_lease`)
    use(step)      insert one use per leased row into table `uses`; `max_uses` of them end a row
    discard(step)  insert the reason into table `explanations` instead
    consumption    count the uses for a checkpoint's manifest (`consumed`)

Independent of the explorer.  Invariant: a step has at most one lease, and repeated calls change
nothing more.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

from sqlalchemy import Connection, and_, func, select

from rft.buffer import schema
from rft.buffer.core import BufferCore
from rft.buffer.derived_state import NO_LIMIT, UseCounts, beyond, chain, counted_uses, digest, move
from rft.buffer.image_files import files_of, release
from rft.buffer.intake import clean
from rft.buffer.lease_order import LeaseOrder
from rft.buffer.ledger import Ledger, note_checkpoint, verify
from rft.buffer.mixing import MixedCounts
from rft.buffer.row_selectors import DAMAGED, DROPPED, LeaseRequest, ReadyGroup, Selection
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
    "SELECT id, group_id, content_hash, reward, run, step, num_response_tokens, credit, "
    "reward_parts FROM experiences WHERE group_id IN (??) "
    "ORDER BY id"
)
_id = attrgetter("id")
log = logging.getLogger(__name__)

# a block, positions of rows in it, their rewards
_BlockRows = tuple[bytes, list[int], list[float | None]]


class TrainerSide(BufferCore):
    """Every method takes the caller's lineage, and raises Fenced unless it is the newest."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        # step -> (lock, number of its calls that run or wait)
        self._locks: dict[int, tuple[asyncio.Lock, int]] = {}

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
        """Lease the rows of `step`, waiting up to `deadline_s`; arguments: see `ports.BufferReader`.

        Until `use` or `discard`, a repeated call returns the same rows.
        """
        self._fence(lineage)
        request = LeaseRequest(step, groups, rows, max_staleness, until)
        if groups is not None and groups > self._settings.capacity:
            raise BufferFailed(
                f"a train batch of {groups} groups can never be filled: buffer.capacity is "
                f"{self._settings.capacity}"
            )
        async with self._one_call(step):
            return await self._lease(lineage, request, deadline_s)

    async def _lease(self, lineage: int, request: LeaseRequest, deadline_s: float) -> Lease:
        """Wait for rows if the step has no lease yet, and read them."""
        self._fence(lineage)
        step = request.step
        choice = self._order.leases.get(step) or await self._wait_for_rows(
            lineage, request, deadline_s
        )
        order = self._order
        try:
            try:
                frame, images, statistics = await self._leased_rows(lineage, step, choice)
            except PayloadDamaged:
                if self._settings.on_damaged_payload == "stop":
                    raise
                await self._drop_damaged(order, request, choice)
                frame, images, statistics = await self._leased_rows(lineage, step, choice)
        except BaseException:
            if step in order.leases:
                order.give_back(step)
                await self._notify()
            raise
        finished = [g for g, _ in choice.dropped_rows if not g.ready and not g.leased]
        choice.dropped.clear()  # these rows are discarded now; a repeated lease has none to discard
        await self._drop_payload(finished)
        if choice.missing:
            log.warning(
                "step %d trains %d %s fewer than requested", step, choice.missing, request.unit
            )
        return Lease(
            step=step,
            frame=frame,
            images=images,
            groups=statistics,
            available_after=order.num_ready,
            missing=choice.missing,
        )

    async def _leased_rows(
        self, lineage: int, step: int, choice: Selection
    ) -> tuple[bytes, dict[str, bytes], tuple[GroupStats, ...]]:
        """Return the chosen and the mixed-in offline rows as one frame, and the files of their
        images; fix the groups' statistics.
        """

        def work(tx: Connection) -> tuple[bytes, dict[str, bytes], dict[str, list[ScoredRow]]]:
            ledger = self._ledger
            chosen, scored = write_lease(tx, ledger, step, choice)
            names = [group.id for group, _ in choice.picked] if ledger.images else []
            files = files_of(tx, ledger.storage, names)
            return bundle([*chosen, *further]), {**files, **further_files}, scored

        further: list[tuple[bytes, Sequence[int], Sequence[float | None]]] = []
        further_files: Mapping[str, bytes] = {}
        if self._mix:
            block, rewards, further_files = self._mix.block(step)
            further.append((block, range(len(rewards)), rewards))
        frame, images, scored = await self._run_fenced(lineage, work, "buffer.lease")
        for group, _ in choice.picked:
            group.frozen = group.frozen or _freeze_statistics(group.id, scored[group.id])
        return frame, images, tuple(g.frozen for g, _ in choice.picked if g.frozen is not None)

    async def use(self, lineage: int, step: int, logprobs: bytes | None = None) -> None:
        """Record that the lease of `step` was trained; idempotent.

        Also stores the `logprobs` of each row's first use; they replace those of a first use that a
        resume has undone.
        """
        async with self._one_call(step):
            order, choice = await self._open_lease(lineage, step)
            if choice is None:
                return
            max_uses = self._settings.max_uses
            rows = [row for _, part in choice.picked for row in part]
            exhausted = [r.id for r in rows if r.uses + 1 >= max_uses]
            first = {r.id for r in rows if r.uses == 0}
            first_logprobs = (
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
                    [(x.id, lineage, step, x.token_start, x.pairs) for x in first_logprobs],
                    replace=True,
                )
                if (mix := self._mix) is not None:
                    put_many(tx, mixed_uses, [(mix.name, x, lineage, step) for x in mix.ids(step)])
                move(tx, exhausted, "used")

            await self._run_fenced(lineage, work, "buffer.use.before")
            fault("buffer.use.after")
            await self._finish_lease(order, step, max_uses)

    async def discard(self, lineage: int, step: int, reason: str) -> None:
        """Record that the lease of `step` is not trained, e.g. "nonfinite"; idempotent."""
        if not reason:
            raise BufferFailed(f"discard of step {step} needs a reason")
        async with self._one_call(step):
            order, choice = await self._open_lease(lineage, step)
            if choice is None:
                return
            ids = [r.id for _, part in choice.picked for r in part]
            await self._run_fenced(
                lineage, lambda tx: discard(tx, lineage, step, ids, reason), "buffer.explain"
            )
            await self._finish_lease(order, step, None)

    async def consumption(self, lineage: int, step: int) -> Consumption:
        """Count the uses up to `step` for its checkpoint's manifest; digest: see
        `rft.buffer.derived_state.UseCounts`.
        """

        def work() -> Consumption:
            consumption = self._ledger.run_for(lineage, lambda tx: consumed(tx, self._ledger, step))
            self._ledger.database.sync()  # a manifest must not outlive its uses
            return consumption

        return await self._run(work)

    async def _wait_for_rows(
        self, lineage: int, request: LeaseRequest, deadline_s: float
    ) -> Selection:
        now = asyncio.get_running_loop().time
        deadline = now() + deadline_s
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(
                idles(lambda: f"the trainer waits for the explorer: {self._order.missing(request)}")
            )
            await stack.enter_async_context(self._changed)
            starving = False
            while True:
                self._fence(lineage)
                choice = self._order.lease(request)
                if isinstance(choice, Selection):
                    self._ledger.newest_step = max(self._ledger.newest_step, request.step)
                    return choice
                if now() >= deadline:
                    raise DeadlineExceeded(
                        f"the trainer waited {deadline_s:g} s for the explorer: "
                        f"{self._order.missing(request)}. "
                        "Raise buffer.trainer_input.experience_buffer.max_read_timeout if the "
                        "explorer is merely slow."
                    )
                if not starving:
                    starving = True
                    stack.enter_context(self._limiter.starving())
                    # groups of the open batch may now exceed the bounds
                    self._changed.notify_all()
                until = deadline
                if choice.until is not None:  # the first resting rows may be used again then
                    until = min(until, now() + max(0.0, choice.until - self._clock()))
                with contextlib.suppress(TimeoutError):  # the loop checks which limit passed
                    async with asyncio.timeout_at(until):
                        await self._changed.wait()

    @contextlib.asynccontextmanager
    async def _one_call(self, step: int) -> AsyncIterator[None]:
        """Run one call about a step at a time: a repeated message must not lease again."""
        lock, calls = self._locks.get(step) or (asyncio.Lock(), 0)
        self._locks[step] = (lock, calls + 1)
        try:
            async with lock:
                yield
        finally:
            lock, calls = self._locks.pop(step)
            if calls > 1:
                self._locks[step] = (lock, calls - 1)

    async def _open_lease(self, lineage: int, step: int) -> tuple[LeaseOrder, Selection | None]:
        """Return the open lease of `step`; None if it was already used or discarded."""
        self._fence(lineage)
        order = self._order
        choice = order.leases.get(step)
        if (
            choice is None
            and await self._run_fenced(lineage, lambda tx: settled(tx, lineage, step)) is None
        ):
            raise BufferFailed(f"step {step} of lineage {lineage} has no lease")
        return order, choice

    async def _finish_lease(self, order: LeaseOrder, step: int, max_uses: int | None) -> None:
        finished = order.finish_lease(step, max_uses=max_uses)
        await self._notify()
        await self._drop_payload(finished)

    async def _drop_payload(self, finished: Sequence[ReadyGroup]) -> None:
        """Drop the payload of finished groups if only memory holds it."""
        locators = [g.locator for g in finished]

        def work(tx: Connection) -> None:
            files = release(tx, [g.id for g in finished]) if self._ledger.images else []
            self._storage.drop([*locators, *files], tx)

        def drop() -> None:
            self._ledger.run(work)
            self._ledger.blocks.difference_update(locators)

        if finished and not self._storage.durable:
            await self._run(drop)

    async def _drop_damaged(
        self, order: LeaseOrder, request: LeaseRequest, choice: Selection
    ) -> None:
        """Discard the groups of a lease whose payload is missing or damaged."""
        ledger = self._ledger
        lineage = self._lineage
        problems = await self._run(
            ledger.run, lambda tx: {g.id: ledger.damage(tx, g, rows) for g, rows in choice.picked}
        )
        damaged = {name: what for name, what in problems.items() if what is not None}
        lost = [(group, rows) for group, rows in choice.picked if group.id in damaged]
        ids = [r.id for _, rows in lost for r in rows]
        await self._run_fenced(
            lineage, lambda tx: discard(tx, lineage, request.step, ids, DAMAGED), "buffer.explain"
        )
        order.drop_groups(request.step, set(damaged))
        choice.missing += len(lost) if request.rows is None else sum(len(rows) for _, rows in lost)
        for group, _ in lost:
            log.error("group %s is left out (%s): %s", group.id, DAMAGED, damaged[group.id])
        if not choice.picked:
            raise ShortBatch(
                f"step {request.step}: the payload of all its groups is damaged, e.g. "
                f"{next(iter(damaged.values()))}"
            )


def write_lease(
    tx: Connection, ledger: Ledger, step: int, choice: Selection
) -> tuple[list[_BlockRows], dict[str, list[ScoredRow]]]:
    """Write the lease of the chosen rows; return their payload and the scored members of each
    group.

    Rows that the selector dropped are discarded.
    """
    lineage = ledger.lineage
    for reason, dropped in choice.dropped.items():
        discard(tx, lineage, step, [r.id for _, rows in dropped for r in rows], reason)
    blocks = ledger.storage.get([g.locator for g, _ in choice.picked], tx)
    # lock the rows if the database can: a reward edit comes before this lease or is refused
    locked = _HEADERS if tx.dialect.name == "sqlite" else f"{_HEADERS} FOR UPDATE"
    rewards: dict[str, float | None] = {}
    hashes: dict[str, str] = {}
    scored: dict[str, list[ScoredRow]] = {}
    for part in parts([g.id for g, _ in choice.picked]):
        for name, group_id, content, reward, *more, reward_parts in ask(
            tx, locked, many=part
        ).all():
            rewards[name], hashes[name] = reward, content
            if reward is not None:
                scored.setdefault(group_id, []).append(
                    ScoredRow._make([reward, *more, json.loads(reward_parts)])
                )
    chosen = []
    for (group, rows), block in sorted(
        zip(choice.picked, blocks, strict=True), key=lambda part: (part[0][0].key, part[0][0].task)
    ):
        rows = sorted(rows, key=_id)
        verify(group.locator, block, [(r.id, r.position, hashes[r.id]) for r in rows])
        # use the ledger's rewards, so that a row agrees with its group's statistics
        chosen.append((block, [r.position for r in rows], [rewards[r.id] for r in rows]))
    now = time.time()
    leased = [(r.id, lineage, step, now) for _, rows in choice.picked for r in rows]
    put_many(tx, leases, leased, replace=True)  # from now on their rewards are immutable
    return chosen, scored


def discard(tx: Connection, lineage: int, step: int, ids: Sequence[str], reason: str) -> None:
    """Record that these rows are not trained by `step`; idempotent."""
    reason = clean(reason)
    rows = [(x, lineage, step, reason) for x in ids]
    put_many(tx, explanations, rows, again="ON CONFLICT DO NOTHING")
    move(tx, ids, "explained", explained=reason)


def settled(tx: Connection, lineage: int, step: int) -> str | None:
    """Return the outcome of the lease of `step`: "used", the reason of its discard, or None."""
    if (
        tx.scalar(
            select(uses.c.step).where(uses.c.lineage == lineage, uses.c.step == step).limit(1)
        )
        is not None
    ):
        return "used"
    x = explanations.c
    of_step = and_(x.lineage == lineage, x.step == step, x.reason.not_in(DROPPED))
    reason: str | None = tx.scalar(select(x.reason).where(of_step).limit(1))
    return reason


def consumed(tx: Connection, ledger: Ledger, step: int) -> Consumption:
    """Count the uses up to `step`, and write them to table `checkpoints` for `v_lineage`."""
    version = Version(ledger.lineage, step)
    last, num_uses, total, mixed = ledger.counted or (NO_LIMIT, 0, 0, {})
    since: tuple[int, ...] = (ledger.lineage, last)
    ancestry = {ledger.lineage: step}
    if step < last:  # no cached counts that are early enough
        since = ()
        ancestry = chain(tx, version)
        num_uses = 0
        total = 0
        mixed = {}
    more, of_more = UseCounts(tx, *since).within(ancestry)
    num_uses = num_uses + more
    total = total + of_more
    mixed = dict(
        sorted((Counter(mixed) + Counter(MixedCounts(tx, *since).within(ancestry))).items())
    )
    ledger.counted = step, num_uses, total, mixed
    consumption = Consumption(
        num_uses=num_uses, digest=digest(total), cursor=_cursor(tx, ledger, step), mixed=mixed
    )
    note_checkpoint(tx, version, consumption)
    return consumption


def _cursor(tx: Connection, ledger: Ledger, step: int) -> int:
    e = experiences.c
    first = select(func.min(experiences.c.batch))
    waiting = first.where(e.state == "available", e.batch >= ledger.none_before)
    if ledger.settings.max_uses > 1:  # rows that wait for another use do not hold back the cursor
        waiting = waiting.where(
            ~counted_uses(ledger.ancestry).where(uses.c.experience == e.id).exists()
        )
    later = [
        select(t.c.experience).where(*beyond(t, ledger.lineage, step)) for t in (uses, explanations)
    ]
    unused, *later_batches = [
        tx.scalar(x) for x in (waiting, *(first.where(e.id.in_(x)) for x in later))
    ]
    first_open = [
        _first_open(tx, ledger, explorer) for explorer in range(ledger.settings.num_explorers)
    ]
    ledger.none_before = min([*first_open, *([] if unused is None else [unused])])
    return min([ledger.none_before, *(int(x) for x in later_batches if x is not None)])


def _first_open(tx: Connection, ledger: Ledger, explorer: int) -> int:
    b = batches.c
    first = ledger.first_open.get(explorer, ledger.cursor)
    query = (
        select(b.batch)
        .where(b.lineage == ledger.lineage, b.explorer == explorer, b.batch >= first)
        .order_by(b.batch)
    )
    # a short batch ends the run, and a resumed run explores it again
    if ledger.settings.on_short_batch == "stop":
        query = query.where(b.accepted >= b.wanted)
    closed = tx.scalars(query).all()
    ledger.first_open[explorer] = next(
        (n for n, batch in enumerate(closed, first) if n != batch), first + len(closed)
    )
    return ledger.first_open[explorer]


def _freeze_statistics(name: str, members: Sequence[ScoredRow]) -> GroupStats:
    """Return the statistics of a group, whose rewards are immutable after the first lease."""
    for run, rewards in parted_runs(members).items():
        text = (
            "run %d of group %s: its rows were given the rewards %s; their mean counts.  Change "
            "the reward of all rows of a run"
        )
        log.warning(text, run, name, ", ".join(f"{r:g}" for r in rewards))
    return group_statistics(name, members)

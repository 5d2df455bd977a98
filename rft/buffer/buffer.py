"""The buffer: keeps what explorers append and hands it to the trainer, at most `max_uses` times in an ancestry.

    explorer → append (durable) → close_batch ─┐                    one event loop, one worker thread for the ledger
    trainer  ← lease ← order of closed batches ┘ → use / explain

It knows neither model nor loss.  The one invariant: acked = used + leased + available + explained, after every call.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from rft.buffer.base import Audit, LineageStart, Storage
from rft.buffer.intake import batch_of
from rft.buffer.ledger import Ledger, Offer, Stored
from rft.buffer.limiter import Limiter
from rft.buffer.mix import Mix
from rft.buffer.order import DAMAGED, Choice, Closed, Group, Order, Wait, Wanted
from rft.buffer.replay import make_selector
from rft.buffer.reserve import Reserve
from rft.buffer.settings import BufferSettings
from rft.errors import BufferFailed, DeadlineExceeded, DiskFull, Fenced, PayloadDamaged, ShortBatch
from rft.plugins import REGISTRY
from rft.types.ids import Version
from rft.types.ports import AppendResult, Consumption, HeldGroup, Lease, TaskOutcome

log = logging.getLogger(__name__)
_GROUP_COMMIT = 64  # appends that share a transaction
_FULL_DISK_RETRY_S = 0.5
SAY_EVERY_S = 30.0  # a trainer that waits says for whom
R = TypeVar("R")


class Buffer:
    """One experience buffer and its only writer.

    Every method that takes `lineage` raises Fenced for another lineage than the newest: a trainer that was replaced learns so.
    """

    def __init__(self, settings: BufferSettings, *, clock: Callable[[], float] = time.monotonic, mix: Mix | None = None) -> None:
        """`clock`: seconds that only go forward, for the rest between two uses.  `mix`: rows of another source for each lease."""
        self._settings = settings
        self._clock, self._mix = clock, mix
        self._storage = make_storage(settings)
        self._ledger = Ledger(settings, self._storage)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rft-buffer")
        self._changed = asyncio.Condition()
        self._order = Order(settings, 0, [], make_selector(settings, clock))
        self._limiter = Limiter(settings)
        place = self._ledger.place.path
        self._reserve = Reserve(place and place.with_name(f"{settings.name}.reserve"), settings.full_disk_reserve_bytes)
        self._offers: list[tuple[Offer, asyncio.Future[AppendResult]]] = []
        self._flusher: asyncio.Task[None] | None = None
        self._turns: dict[int, tuple[asyncio.Lock, int]] = {}  # by step: calls about it that run or wait
        self._lineage = 0
        self._closed = False
        self._closing = asyncio.Event()
        self._quiet = asyncio.Event()  # no append is with the ledger
        self._quiet.set()

    async def open(self) -> None:
        """Creates or checks the ledger.  Raises SetupError on a network file system, BufferFailed when it has another owner."""
        await self._work(self._ledger.open)
        if not self._storage.durable:
            log.warning("buffer %s keeps its payload in memory only (path: none): it is not durable", self._settings.name)

    async def start_lineage(self, parent: Version | None, consumption: Consumption | None) -> LineageStart:
        """A trainer takes over, going on from the checkpoint `parent` (None: from the base model); all earlier ones are fenced.

        Raises BufferFailed when `consumption`, of the checkpoint's manifest, is not what the ledger counts for `parent`.
        """
        start, groups = await self._work(self._ledger.start_lineage, parent, consumption)
        if self._mix is not None:
            await self._work(self._ledger.mix_in, start.lineage, self._mix)
        self._lineage = start.lineage
        self._order = Order(self._settings, start.cursor, groups, make_selector(self._settings, self._clock))
        await self._notify()
        return start

    def writer(self, lineage: int, explorer: int = 0) -> Writer:
        """The buffer as explorer number `explorer` sees it."""
        self._check_explorer(explorer)
        return Writer(self, lineage, explorer)

    def reader(self, lineage: int) -> Reader:
        """The buffer as the trainer of `lineage` sees it."""
        return Reader(self, lineage)

    # ------------------------------------------------------------ the explorer's side, see ports.BufferWriter

    async def append(self, lineage: int, frame: bytes, *, accepted: bool, reason: str = "", explorer: int = 0) -> AppendResult:
        """Store one group; one that is to be trained waits for room.  Raises IdConflict, Fenced, FrameRejected (counted by reason)."""
        self._check_explorer(explorer)
        self._check_open()
        if accepted:
            await self._admit(lineage, frame, explorer)
        answer: asyncio.Future[AppendResult] = asyncio.get_running_loop().create_future()
        self._offers.append((Offer(lineage, frame, accepted, reason, explorer), answer))
        if self._flusher is None or self._flusher.done():
            self._flusher = asyncio.create_task(self._flush(), name="buffer-append")
        return await answer

    async def room(self, lineage: int, batch: int, *, explorer: int = 0) -> None:
        """Wait until less than `capacity` and `capacity_bytes` wait to be trained, or a lease needs this batch."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._has_room(lineage, (batch, explorer)))
        self._fence(lineage)

    async def close_batch(
        self, lineage: int, batch: int, *, accepted: int, wanted: int, reasons: dict[str, int], explorer: int = 0
    ) -> None:
        """All groups of the batch are stored; may be repeated."""
        self._check_explorer(explorer)
        self._fence(lineage)
        order = self._order
        good = await self._work(
            self._ledger.close_batch, lineage, explorer, batch, accepted=accepted, wanted=wanted, reasons=reasons
        )
        if good < accepted:  # accepted by the explorer, but without a row that can be trained
            reasons = {**reasons, "nothing_to_train": accepted - good}
        order.close((batch, explorer), Closed(good, wanted, reasons))
        await self._notify()

    async def held(self, lineage: int, first_batch: int, *, explorer: int = 0) -> list[HeldGroup]:
        """Stored groups from `first_batch` on that are not to be explored again."""
        return await self._work(self._ledger.held, lineage, explorer, first_batch)

    async def outcomes(self, lineage: int, first_batch: int, end_batch: int, *, explorer: int = 0) -> list[TaskOutcome]:
        """Pass rates of the tasks of batches [first_batch, end_batch), for selectors that learn."""
        return await self._work(self._ledger.outcomes, lineage, explorer, first_batch, end_batch)

    async def same_tasksets(self, lineage: int, fingerprints: dict[str, str], *, explorer: int = 0) -> None:
        """Remember the rows that are explored; raises ConfigError when a run that goes on had others before."""
        await self._work(self._ledger.same_tasksets, lineage, explorer, fingerprints)

    async def finish(self, lineage: int, reason: str, *, explorer: int = 0) -> None:
        """This explorer appends nothing more."""
        self._check_explorer(explorer)
        self._fence(lineage)
        self._order.finish(explorer, reason)
        await self._notify()

    # ------------------------------------------------------------ the trainer's side, see ports.BufferReader

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
        """The rows of `step`.  Asked again before `use` or `explain`, it gives the same rows.  It waits for events."""
        self._fence(lineage)
        wanted = Wanted(step, groups, rows, max_staleness, until)
        if groups is not None and groups > self._settings.capacity:
            raise BufferFailed(
                f"a train batch of {groups} groups can never be filled: buffer.capacity is {self._settings.capacity}"
            )
        async with self._about(step):
            return await self._lease(lineage, wanted, deadline_s)

    async def _lease(self, lineage: int, wanted: Wanted, deadline_s: float) -> Lease:
        self._fence(lineage)
        step, began = wanted.step, asyncio.get_running_loop().time()
        choice = self._order.leases.get(step) or await self._wait(lineage, wanted, deadline_s)
        waited = asyncio.get_running_loop().time() - began
        order = self._order
        try:
            try:
                frame, statistics = await self._work(self._ledger.lease, lineage, step, choice, self._mix)
            except PayloadDamaged:
                if self._settings.on_damaged_payload == "stop":
                    raise
                await self._leave_out(order, wanted, choice)
                frame, statistics = await self._work(self._ledger.lease, lineage, step, choice, self._mix)
        except BaseException:
            if step in order.leases:
                order.give_back(step)
                await self._notify()
            raise
        over = [group for group, _ in choice.dropped_rows if not group.waiting and not group.leased]
        choice.dropped.clear()  # explained; a repeated lease must not do so again
        await self._free(over)
        if choice.missing:
            log.warning("step %d trains with %d %s fewer than asked for", step, choice.missing, wanted.unit)
        return Lease(
            step=step,
            frame=frame,
            groups=statistics,
            waited_s=waited,
            available_after=order.num_waiting,
            missing=choice.missing,
        )

    async def use(self, lineage: int, step: int) -> None:
        """The lease of `step` was trained on.  Repeating it is a no-op."""
        async with self._about(step):
            order, choice = await self._leased(lineage, step)
            if choice is None:
                return
            most = self._settings.max_uses
            rows = [row for _, part in choice.picked for row in part]
            used = [r.id for r in rows if r.uses + 1 >= most]
            await self._work(self._ledger.use, lineage, step, [r.id for r in rows], used, self._mix)
            await self._done(order, step, most)

    async def explain(self, lineage: int, step: int, reason: str) -> None:
        """The lease of `step` will never be trained on, e.g. "nonfinite".  Repeating it is a no-op."""
        if not reason:
            raise BufferFailed(f"explain of step {step} needs a reason")
        async with self._about(step):
            order, choice = await self._leased(lineage, step)
            if choice is None:
                return
            await self._work(self._ledger.explain, lineage, step, [r.id for _, part in choice.picked for r in part], reason)
            await self._done(order, step, None)

    async def consumption(self, lineage: int, step: int) -> Consumption:
        """What a manifest of `step` has to state; the digest's exact form is in `rft.buffer.ancestry.digest`."""
        return await self._work(self._ledger.consumption, lineage, step)

    # ------------------------------------------------------------ looking

    async def audit(self) -> Audit:
        """Counts of the current lineage, and whether ledger, facts and memory agree."""
        while not self._quiet.is_set():  # what the ledger has stored is in memory, too
            await self._quiet.wait()
        order = self._order
        return await self._work(self._ledger.audit, order.num_leased, order.num_waiting)

    async def stats(self) -> dict[str, Any]:
        """Numbers for people and metrics."""
        audit = await self.audit()
        return {
            "acked": audit.acked,
            "used": audit.used,
            "leased": audit.leased,
            "available": audit.available,
            "explained": audit.explained,
            "waiting_groups": self._order.num_groups,
            "rejected": await self._work(self._ledger.rejections),
            "bytes": await self._work(self._ledger.size),
            "lineage": self._lineage,
            "finished": self._order.finished,
        }

    async def close(self) -> None:
        """Stores what was offered, wakes all who wait (they fail), and lets go of the files."""
        if self._closed:
            return
        self._closed = True
        self._closing.set()
        if self._flusher is not None:
            await self._flusher
        await self._notify()
        self._ledger.stop()
        await asyncio.get_running_loop().run_in_executor(self._thread, self._reserve.close)
        await asyncio.get_running_loop().run_in_executor(self._thread, self._ledger.close)
        self._thread.shutdown()

    # ------------------------------------------------------------ inside

    async def _work(self, call: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        """Run on the ledger's thread; ledger calls keep their order."""
        self._check_open()
        return await self._repeat(functools.partial(call, *args, **kwargs))

    async def _repeat(self, call: Callable[[], R], *, appends: bool = False) -> R:
        """Runs on the ledger's thread; again and again while no space is left, which changes nothing, for a while.

        What does not append may use the reserve.
        """
        quiet = self._quiet if appends else asyncio.Event()
        loop = asyncio.get_running_loop()
        deadline: float | None = None
        while True:
            try:
                return await loop.run_in_executor(self._thread, call)
            except DiskFull as e:
                if not appends and await loop.run_in_executor(self._thread, self._reserve.spend):
                    log.warning("%s  The space that is kept for the trainer is used now.", e)
                    continue
                wait_s = self._settings.full_disk_wait_s
                if deadline is None:
                    deadline = loop.time() + wait_s
                    log.error(
                        "%s  Free some space: it is tried again for %g s, then the run stops and can be resumed.", e, wait_s
                    )
                if loop.time() >= deadline or self._closed:
                    raise
            quiet.set()
            with contextlib.suppress(TimeoutError):  # no event tells of free space; closing ends the wait
                async with asyncio.timeout(_FULL_DISK_RETRY_S):
                    await self._closing.wait()
            quiet.clear()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _flush(self) -> None:
        """Group commit: all appends that came while the last transaction ran share the next one."""
        while self._offers:
            now, self._offers = self._offers[:_GROUP_COMMIT], self._offers[_GROUP_COMMIT:]
            self._quiet.clear()
            try:
                await self._store(now)
            finally:
                self._quiet.set()
            await asyncio.sleep(0)  # who waits for quiet has a turn

    async def _store(self, now: list[tuple[Offer, asyncio.Future[AppendResult]]]) -> None:
        """One transaction."""
        answers: Sequence[Stored | BaseException]
        order = self._order
        try:
            answers = await self._repeat(functools.partial(self._append, [offer for offer, _ in now]), appends=True)
        except Exception as e:  # belongs to every append of the transaction
            answers = [e] * len(now)
        for (offer, _), answer in zip(now, answers, strict=True):
            if isinstance(answer, Stored) and answer.key is not None:
                order.add(answer.key, answer.group)
            if offer.accepted:
                self._limiter.settle(len(offer.frame))
        for (_, future), answer in zip(now, answers, strict=True):
            if future.done():  # the caller gave up waiting; stored is stored
                continue
            if isinstance(answer, Stored):
                future.set_result(answer.result)
            else:
                future.set_exception(answer)
        await self._notify()

    def _append(self, offers: list[Offer]) -> Sequence[Stored | BufferFailed]:
        self._reserve.fill()
        return self._ledger.append(offers)

    async def _admit(self, lineage: int, frame: bytes, explorer: int) -> None:
        """Wait for room for a group.  A frame that cannot be read is let through: the ledger refuses and counts it."""
        if not self._has_room(lineage, None) and (batch := batch_of(frame)) is not None:
            async with self._changed:
                await self._changed.wait_for(lambda: self._has_room(lineage, (batch, explorer)))
            self._check_open()
        self._limiter.admit(len(frame))

    def _has_room(self, lineage: int, key: tuple[int, int] | None) -> bool:
        """Also true for a lineage that was replaced, so that its waits end (and fail)."""
        return not self._current(lineage) or self._limiter.room(self._order, key)

    async def _wait(self, lineage: int, wanted: Wanted, deadline_s: float) -> Choice:
        """The choice for a lease, taken."""
        now = asyncio.get_running_loop().time
        deadline, say = now() + deadline_s, now() + SAY_EVERY_S
        async with contextlib.AsyncExitStack() as held:
            await held.enter_async_context(self._changed)
            starving = False
            while True:
                self._fence(lineage)
                found = self._order.lease(wanted)
                if isinstance(found, Choice):
                    self._ledger.newest_step = max(self._ledger.newest_step, wanted.step)
                    return found
                if now() >= deadline:
                    raise DeadlineExceeded(
                        f"the trainer waited {deadline_s:g} s for the explorer: {self._order.missing(wanted)}. "
                        "Raise buffer.trainer_input.experience_buffer.max_read_timeout if the explorer is merely slow."
                    )
                if now() >= say:
                    waited = deadline_s - (deadline - now())
                    log.warning("the trainer has waited %.0f s for the explorer: %s", waited, self._order.missing(wanted))
                    say = now() + SAY_EVERY_S
                if not starving:
                    starving = True
                    held.enter_context(self._limiter.starving())
                    self._changed.notify_all()  # groups of the open batch may come beyond the bounds now
                until = min(deadline, say, now() + rest if (rest := self._rest_s(found)) is not None else deadline)
                with contextlib.suppress(TimeoutError):  # one of these three is due: looked at above
                    async with asyncio.timeout_at(until):
                        await self._changed.wait()

    def _rest_s(self, wait: Wait) -> float | None:
        """Seconds until something that rests may be used again."""
        return None if wait.until is None else max(0.0, wait.until - self._clock())

    @contextlib.asynccontextmanager
    async def _about(self, step: int) -> AsyncIterator[None]:
        """One call about a step at a time, so that a message that comes twice is a repetition, not a second lease."""
        lock, calls = self._turns.get(step) or (asyncio.Lock(), 0)
        self._turns[step] = (lock, calls + 1)
        try:
            async with lock:
                yield
        finally:
            lock, calls = self._turns.pop(step)
            if calls > 1:
                self._turns[step] = (lock, calls - 1)

    async def _leased(self, lineage: int, step: int) -> tuple[Order, Choice | None]:
        """The lease of `step`; None when it was settled before."""
        self._fence(lineage)
        order = self._order
        choice = order.leases.get(step)
        if choice is None and await self._work(self._ledger.settled, lineage, step) is None:
            raise BufferFailed(f"step {step} of lineage {lineage} has no lease")
        return order, choice

    async def _done(self, order: Order, step: int, max_uses: int | None) -> None:
        over = order.done(step, max_uses=max_uses)
        await self._notify()
        await self._free(over)

    async def _free(self, over: Sequence[Group]) -> None:
        """These groups are done with: the memory of those that only memory holds."""
        if over and not self._storage.durable:
            await self._work(self._ledger.drop, over)

    async def _leave_out(self, order: Order, wanted: Wanted, choice: Choice) -> None:
        """A lease goes on without the groups whose payload is gone; they are explained, and never trained."""
        damaged = await self._work(self._ledger.damaged, choice)
        lost = [(group, rows) for group, rows in choice.picked if group.id in damaged]
        await self._work(self._ledger.explain, self._lineage, wanted.step, [r.id for _, rows in lost for r in rows], DAMAGED)
        order.lose(wanted.step, set(damaged))
        choice.missing += len(lost) if wanted.rows is None else sum(len(rows) for _, rows in lost)
        for group, _ in lost:
            log.error("group %s is left out (%s): %s", group.id, DAMAGED, damaged[group.id])
        if not choice.picked:
            raise ShortBatch(f"step {wanted.step}: the payload of all its groups is damaged, e.g. {next(iter(damaged.values()))}")

    def _current(self, lineage: int) -> bool:
        return lineage == self._lineage and not self._closed

    def _fence(self, lineage: int) -> None:
        self._check_open()
        if lineage != self._lineage:
            raise Fenced(f"lineage {lineage} no longer owns the buffer: lineage {self._lineage} has taken over")

    def _check_open(self) -> None:
        if self._closed:
            raise BufferFailed(f"the buffer {self._ledger.place} is closed")

    def _check_explorer(self, explorer: int) -> None:
        if not 0 <= explorer < self._settings.num_explorers:
            raise BufferFailed(
                f"explorer {explorer}: this buffer was opened for {self._settings.num_explorers} explorers, from 0"
            )


class Writer:
    """ports.BufferWriter of one explorer and lineage."""

    def __init__(self, buffer: Buffer, lineage: int, explorer: int) -> None:
        self._buffer, self._lineage, self._explorer = buffer, lineage, explorer

    async def append(self, frame: bytes, *, accepted: bool, reason: str = "") -> AppendResult:
        return await self._buffer.append(self._lineage, frame, accepted=accepted, reason=reason, explorer=self._explorer)

    async def room(self, batch: int) -> None:
        await self._buffer.room(self._lineage, batch, explorer=self._explorer)

    async def close_batch(self, batch: int, *, accepted: int, wanted: int, reasons: dict[str, int]) -> None:
        await self._buffer.close_batch(
            self._lineage, batch, accepted=accepted, wanted=wanted, reasons=reasons, explorer=self._explorer
        )

    async def held(self, first_batch: int) -> list[HeldGroup]:
        return await self._buffer.held(self._lineage, first_batch, explorer=self._explorer)

    async def outcomes(self, first_batch: int, end_batch: int) -> list[TaskOutcome]:
        return await self._buffer.outcomes(self._lineage, first_batch, end_batch, explorer=self._explorer)

    async def same_tasksets(self, fingerprints: dict[str, str]) -> None:
        await self._buffer.same_tasksets(self._lineage, fingerprints, explorer=self._explorer)

    async def finish(self, reason: str) -> None:
        await self._buffer.finish(self._lineage, reason, explorer=self._explorer)


class Reader:
    """ports.BufferReader of one lineage."""

    def __init__(self, buffer: Buffer, lineage: int) -> None:
        self._buffer, self._lineage = buffer, lineage

    async def lease(
        self,
        step: int,
        *,
        groups: int | None,
        rows: int | None,
        deadline_s: float,
        max_staleness: int | None,
        until: int | None = None,
    ) -> Lease:
        return await self._buffer.lease(
            self._lineage,
            step,
            groups=groups,
            rows=rows,
            deadline_s=deadline_s,
            max_staleness=max_staleness,
            until=until,
        )

    async def use(self, step: int) -> None:
        await self._buffer.use(self._lineage, step)

    async def explain(self, step: int, reason: str) -> None:
        await self._buffer.explain(self._lineage, step, reason)

    async def consumption(self, step: int) -> Consumption:
        return await self._buffer.consumption(self._lineage, step)


def make_storage(settings: BufferSettings) -> Storage:
    """The payload storage that the settings name."""
    REGISTRY.scan_package("rft.buffer.storage")
    made: Storage = REGISTRY.get("storage", settings.storage_type).obj(settings)
    return made

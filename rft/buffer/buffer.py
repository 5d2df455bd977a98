"""The buffer: keeps what explorers append and hands it to the trainer, at most `max_uses` times in an ancestry.

    explorer → append (durable) → close_batch ─┐                    one event loop, one worker thread for the ledger
    trainer  ← lease ← order of closed batches ┘ → use / explain

It knows neither model nor loss.  The one invariant: acked = used + leased + available + explained, after every call.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from rft.buffer.base import Audit, LineageStart, Storage
from rft.buffer.count import count
from rft.buffer.ledger import Ledger, Offer, Stored
from rft.buffer.order import Choice, Closed, Order, Wanted
from rft.buffer.settings import BufferSettings
from rft.errors import BufferFailed, ConfigError, DeadlineExceeded, Fenced
from rft.plugins import REGISTRY
from rft.types.ids import Version
from rft.types.ports import AppendResult, Consumption, HeldGroup, Lease

log = logging.getLogger(__name__)
LEDGER_SUFFIX = ".db"
_GROUP_COMMIT = 64  # appends that share a transaction
R = TypeVar("R")


class Buffer:
    """One experience buffer and its only writer.

    Every method that takes `lineage` raises Fenced for another lineage than the newest: a trainer that was replaced learns so.
    """

    def __init__(self, settings: BufferSettings) -> None:
        self._settings = settings
        self._path = ledger_path(settings)
        self._storage = make_storage(settings)
        self._ledger = Ledger(settings, self._path, self._storage)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rft-buffer")
        self._changed = asyncio.Condition()
        self._order = Order(settings, 0, [])
        self._offers: list[tuple[Offer, asyncio.Future[AppendResult]]] = []
        self._flusher: asyncio.Task[None] | None = None
        self._lineage = 0
        self._closed = False

    async def open(self) -> None:
        """Creates or checks the ledger.  Raises SetupError on a network file system, BufferFailed when it has another owner."""
        await self._work(self._ledger.open)
        if not self._storage.durable:
            log.warning("buffer %s keeps its payload in memory only (storage_path: none): it is not durable", self._settings.name)

    async def start_lineage(self, parent: Version | None, consumption: Consumption | None) -> LineageStart:
        """A trainer takes over, going on from the checkpoint `parent` (None: from the base model); all earlier ones are fenced.

        Raises BufferFailed when `consumption`, of the checkpoint's manifest, is not what the ledger counts for `parent`.
        """
        start, groups = await self._work(self._ledger.start_lineage, parent, consumption)
        self._lineage = start.lineage
        self._order = Order(self._settings, start.cursor, groups)
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
        """Store one group.  Raises IdConflict, Fenced, FrameRejected (counted by reason)."""
        self._check_explorer(explorer)
        self._check_open()
        answer: asyncio.Future[AppendResult] = asyncio.get_running_loop().create_future()
        self._offers.append((Offer(lineage, frame, accepted, reason, explorer), answer))
        if self._flusher is None or self._flusher.done():
            self._flusher = asyncio.create_task(self._flush(), name="buffer-append")
        return await answer

    async def room(self, lineage: int, batch: int, *, explorer: int = 0) -> None:
        """Wait until fewer than `capacity` accepted groups wait to be trained."""
        del batch, explorer
        async with self._changed:
            await self._changed.wait_for(lambda: not self._current(lineage) or self._order.num_groups < self._settings.capacity)
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

    async def finish(self, lineage: int, reason: str, *, explorer: int = 0) -> None:
        """This explorer appends nothing more."""
        self._check_explorer(explorer)
        self._fence(lineage)
        self._order.finish(explorer, reason)
        await self._notify()

    # ------------------------------------------------------------ the trainer's side, see ports.BufferReader

    async def lease(
        self, lineage: int, step: int, *, groups: int | None, rows: int | None, deadline_s: float, max_staleness: int | None
    ) -> Lease:
        """The rows of `step`.  Asked again before `use` or `explain`, it gives the same rows.  It waits for events."""
        self._fence(lineage)
        wanted = Wanted(step, groups, rows, max_staleness)
        if groups is not None and groups > self._settings.capacity:
            raise BufferFailed(
                f"a train batch of {groups} groups can never be filled: buffer.capacity is {self._settings.capacity}"
            )
        began = asyncio.get_running_loop().time()
        choice = self._order.leases.get(step) or await self._wait(lineage, wanted, deadline_s)
        waited = asyncio.get_running_loop().time() - began
        order = self._order
        try:
            frame, statistics = await self._work(self._ledger.lease, lineage, step, choice)
        except BaseException:
            if step in order.leases:
                order.give_back(step)
                await self._notify()
            raise
        choice.stale.clear()  # explained; a repeated lease must not do so again
        return Lease(step=step, frame=frame, groups=statistics, waited_s=waited, available_after=order.num_waiting)

    async def use(self, lineage: int, step: int) -> None:
        """The lease of `step` was trained on.  Repeating it is a no-op."""
        order, choice = await self._leased(lineage, step)
        if choice is None:
            return
        most = self._settings.max_uses
        rows = [row for _, part in choice.picked for row in part]
        used = [r.id for r in rows if r.uses + 1 >= most]
        await self._work(self._ledger.use, lineage, step, [r.id for r in rows], used)
        await self._done(order, step, most)

    async def explain(self, lineage: int, step: int, reason: str) -> None:
        """The lease of `step` will never be trained on, e.g. "nonfinite".  Repeating it is a no-op."""
        if not reason:
            raise BufferFailed(f"explain of step {step} needs a reason")
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
        order = self._order
        return await self._work(self._audit, order.num_leased, order.num_waiting)

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
            "bytes": self._ledger.size(),
            "lineage": self._lineage,
            "finished": self._order.finished,
        }

    async def close(self) -> None:
        """Stores what was offered, wakes all who wait (they fail), and lets go of the files."""
        if self._closed:
            return
        self._closed = True
        if self._flusher is not None:
            await self._flusher
        await self._notify()
        await asyncio.get_running_loop().run_in_executor(self._thread, self._ledger.close)
        self._thread.shutdown()

    # ------------------------------------------------------------ inside

    async def _work(self, call: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        """Run on the ledger's thread; ledger calls keep their order."""
        self._check_open()
        return await asyncio.get_running_loop().run_in_executor(self._thread, functools.partial(call, *args, **kwargs))

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _flush(self) -> None:
        """Group commit: all appends that came while the last transaction ran share the next one."""
        loop = asyncio.get_running_loop()
        while self._offers:
            now, self._offers = self._offers[:_GROUP_COMMIT], self._offers[_GROUP_COMMIT:]
            answers: Sequence[Stored | BaseException]
            order = self._order
            try:
                answers = await loop.run_in_executor(self._thread, self._ledger.append, [offer for offer, _ in now])
            except Exception as e:  # belongs to every append of the transaction
                answers = [e] * len(now)
            for answer in answers:
                if isinstance(answer, Stored) and answer.key is not None:
                    order.add(answer.key, answer.group)
            for (_, future), answer in zip(now, answers, strict=True):
                if future.done():  # the caller gave up waiting; stored is stored
                    continue
                if isinstance(answer, Stored):
                    future.set_result(answer.result)
                else:
                    future.set_exception(answer)
            await self._notify()

    async def _wait(self, lineage: int, wanted: Wanted, deadline_s: float) -> Choice:
        """The choice for a lease, taken."""

        def choose() -> Choice | None:
            self._fence(lineage)
            return self._order.choose(wanted)

        try:
            async with asyncio.timeout(deadline_s), self._changed:
                while (choice := choose()) is None:
                    await self._changed.wait()
                self._order.take(wanted.step, choice)
                self._ledger.newest_step = max(self._ledger.newest_step, wanted.step)
                return choice
        except TimeoutError:
            raise DeadlineExceeded(
                f"the trainer waited {deadline_s:g} s for the explorer: {self._order.missing(wanted)}. "
                "Raise the read deadline if the explorer is merely slow."
            ) from None

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
        if over and not self._storage.durable:
            await self._work(self._ledger.drop, over)

    def _audit(self, leased: int, waiting: int) -> Audit:
        connection, ancestry = self._ledger.look()
        s = self._settings
        version = f"{self._lineage}:{self._ledger.newest_step}"
        with connection.begin():
            facts, derived = count(connection, ancestry, max_uses=s.max_uses, resume_rows=s.resume_rows, version=version)
            stored = self._ledger.stored_states()
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

    def _current(self, lineage: int) -> bool:
        return lineage == self._lineage and not self._closed

    def _fence(self, lineage: int) -> None:
        self._check_open()
        if lineage != self._lineage:
            raise Fenced(f"lineage {lineage} no longer owns the buffer: lineage {self._lineage} has taken over")

    def _check_open(self) -> None:
        if self._closed:
            raise BufferFailed(f"the buffer {self._path} is closed")

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

    async def finish(self, reason: str) -> None:
        await self._buffer.finish(self._lineage, reason, explorer=self._explorer)


class Reader:
    """ports.BufferReader of one lineage."""

    def __init__(self, buffer: Buffer, lineage: int) -> None:
        self._buffer, self._lineage = buffer, lineage

    async def lease(
        self, step: int, *, groups: int | None, rows: int | None, deadline_s: float, max_staleness: int | None
    ) -> Lease:
        return await self._buffer.lease(
            self._lineage, step, groups=groups, rows=rows, deadline_s=deadline_s, max_staleness=max_staleness
        )

    async def use(self, step: int) -> None:
        await self._buffer.use(self._lineage, step)

    async def explain(self, step: int, reason: str) -> None:
        await self._buffer.explain(self._lineage, step, reason)

    async def consumption(self, step: int) -> Consumption:
        return await self._buffer.consumption(self._lineage, step)


def make_storage(settings: BufferSettings) -> Storage:
    """The payload storage that the settings name."""
    if settings.storage_type == "file":
        raise ConfigError(
            'storage "file" (one segment per block) is not active yet; use "sql" (default) or "queue"', key="buffer.storage_type"
        )
    REGISTRY.scan_package("rft.buffer.storage")
    made: Storage = REGISTRY.get("storage", settings.storage_type).obj(settings)
    return made


def ledger_path(settings: BufferSettings) -> Path:
    """Where the SQLite file is."""
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,62}", settings.name):
        raise ConfigError(f"{settings.name!r} is no name for a buffer; letters, digits and _, at most 63", key="buffer.name")
    if settings.ledger_url is None:
        return settings.folder / f"{settings.name}{LEDGER_SUFFIX}"
    if settings.ledger_url.startswith("sqlite:///"):
        return Path(settings.ledger_url.removeprefix("sqlite:///")).expanduser()
    kind = settings.ledger_url.split(":")[0]
    raise ConfigError(
        f"a ledger in {kind} is not active yet; leave it out (SQLite in the run folder) or give sqlite:///FILE",
        key="buffer.ledger_url",
    )

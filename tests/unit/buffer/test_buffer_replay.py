"""Reading by priority with replay: which groups, how often, after which rest; and that the counting
survives every resume.
"""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from rft.buffer.buffer import Buffer
from rft.buffer.lease_order import LeaseOrder
from rft.buffer.priority import (
    Candidate,
    DecayLimitRandomization,
    DecayLimitRandomizationArgs,
    priority,
)
from rft.buffer.row_selectors import ClosedBatch, LeaseRequest, ReadyGroup, ReadyRow, Selection
from rft.buffer.settings import UNLIMITED, BufferSettings, ReplaySettings
from rft.errors import BufferFailed, DeadlineExceeded
from rft.testing.storage_contract import fill, group, ids
from rft.types.block import decode, encode
from rft.types.ids import Version
from rft.types.ports import Consumption, EndOfData, Lease

REST = 10.0


class Clock:
    """Seconds, moved by the test."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def replaying(
    folder: Path, *, max_uses: int = 2, cooldown_s: float | None = REST, **more: object
) -> BufferSettings:
    replay = ReplaySettings(cooldown_s=cooldown_s, seed=7)
    return replace(BufferSettings(folder=folder, max_uses=max_uses, replay=replay), **more)  # type: ignore[arg-type]


async def opened(settings: BufferSettings, clock: Clock) -> Buffer:
    buffer = Buffer(settings, clock=clock)
    await buffer.open()
    await buffer.start_lineage(None, None)
    return buffer


async def read(
    buffer: Buffer, step: int, groups: int = 1, *, until: int | None = None, **more: int | None
) -> Lease:
    wanted = {"rows": None, "max_staleness": None, **more}
    return await buffer.reader(1).lease(step, groups=groups, deadline_s=0.02, until=until, **wanted)  # type: ignore[arg-type]


def tasks(lease: Lease) -> list[tuple[int, int]]:
    return list(dict.fromkeys((b, t) for b, t, _ in ids(lease)))


async def test_newer_weights_come_first_and_uses_cost_two_steps_each(tmp_path: Path) -> None:
    clock = Clock()
    buffer = await opened(replaying(tmp_path, max_uses=3), clock)
    buffer._ledger.newest_step = 5  # weights up to 1:5 exist
    for batch, step in enumerate((3, 5)):
        await fill(buffer, 1, batch, groups=1, version=Version(1, step))
    seen = []
    for step in range(6, 11):
        lease = await read(buffer, step)
        seen += tasks(lease)
        await buffer.reader(1).use(step)
        clock.now += REST
    # priorities: 5 | 3, 3 = a tie, decided by id | 1, 3 | 1, 1 | -, 1
    assert seen == [(1, 0), (0, 0), (1, 0), (0, 0), (1, 0)]
    await buffer.close()


async def test_ties_are_decided_by_id_and_the_oldest_weights_of_all_rows_count(
    tmp_path: Path,
) -> None:
    buffer = await opened(replaying(tmp_path), Clock())
    buffer._ledger.newest_step = 9
    mixed = group(1, 0, 0, runs=2, version=Version(1, 9))
    mixed[1] = group(1, 0, 0, runs=2, version=Version(1, 1))[1]
    await buffer.writer(1).append(encode(mixed), accepted=True)
    for task in (2, 1):
        await buffer.writer(1).append(
            encode(group(1, 0, task, version=Version(1, 4))), accepted=True
        )
    await buffer.writer(1).close_batch(0, accepted=3, expected=3, reasons={})
    assert tasks(await read(buffer, 10, groups=1)) == [(0, 1)]
    assert tasks(await read(buffer, 11, groups=1)) == [(0, 2)]
    assert tasks(await read(buffer, 12, groups=1)) == [(0, 0)]
    await buffer.close()


async def test_rest_limit_and_states(tmp_path: Path) -> None:
    clock = Clock()
    buffer = await opened(replaying(tmp_path), clock)
    await fill(buffer, 1, 0, groups=1)
    first = await read(buffer, 1)
    await buffer.reader(1).use(1)
    with pytest.raises(
        DeadlineExceeded,
        match=r"step 2 has 0 of 1 groups \(1 more rest until their cool-down is over\)",
    ):
        await read(buffer, 2)
    assert ((await buffer.audit()).available, (await buffer.audit()).used) == (4, 0)
    clock.now += REST
    second = await read(buffer, 2)
    # its statistics are those of the first lease
    assert (second.frame, second.groups) == (first.frame, first.groups)
    await buffer.reader(1).use(2)
    clock.now += REST
    audit = await buffer.audit()
    assert (audit.available, audit.used, audit.num_uses, audit.used_twice, audit.ok) == (
        0,
        4,
        8,
        0,
        True,
    )
    await buffer.writer(1).finish("done")
    with pytest.raises(EndOfData):
        await read(buffer, 3)
    await buffer.close()


async def test_a_waiting_trainer_wakes_when_the_rest_is_over(tmp_path: Path) -> None:
    buffer = Buffer(replaying(tmp_path, cooldown_s=0.05))
    await buffer.open()
    await buffer.start_lineage(None, None)
    await fill(buffer, 1, 0, groups=1)
    reader = buffer.reader(1)
    for step in (1, 2):
        began = asyncio.get_running_loop().time()
        await reader.lease(step, groups=1, rows=None, deadline_s=20, max_staleness=None, until=1)
        waited_s = asyncio.get_running_loop().time() - began
        await reader.use(step)
    assert waited_s > 0.02
    await buffer.close()


async def test_what_was_used_often_makes_room(tmp_path: Path) -> None:
    """No more than `capacity` groups are kept for another use; fresh ones always find room."""
    clock = Clock()
    buffer = await opened(replaying(tmp_path, max_uses=UNLIMITED, capacity=2), clock)
    for step in range(1, 6):
        buffer._ledger.newest_step = step
        await fill(buffer, 1, step - 1, groups=1, version=Version(1, step - 1))
        assert tasks(await read(buffer, step)) == [(step - 1, 0)]
        await buffer.reader(1).use(step)
        assert buffer._order.num_groups == 0
    audit = await buffer.audit()
    assert (audit.discarded, audit.available, audit.ok) == ({"evicted": 8}, 12, True)
    await buffer.close()


@pytest.mark.parametrize("max_uses", [2, UNLIMITED])
def test_groups_that_left_are_not_kept(max_uses: int, tmp_path: Path) -> None:
    """Of newer groups there are always some, so the heap never comes down to those that were
    evicted or used up.
    """
    clock = Clock()
    order = LeaseOrder(
        replaying(tmp_path, max_uses=max_uses, capacity=16, cooldown_s=None), 0, [], clock
    )
    for batch in range(400):
        for task in range(4):
            rows = [ReadyRow(f"{batch:04d}.{task}.{run}", run, batch, 0, 1.0) for run in range(2)]
            order.add(
                (batch, 0),
                ReadyGroup(f"{batch:04d}.{task}", batch, 0, task, "", rows, num_bytes=1),
            )
        order.close((batch, 0), ClosedBatch(4, 4, {}))
        clock.now += REST
        assert isinstance(order.lease(LeaseRequest(batch + 1, 4, None, None)), Selection)
        order.finish_lease(batch + 1, max_uses=max_uses)
    kept = [portion for heap in order._selector._heaps for *_, portion in heap]
    assert len(order._groups) <= 20 and len(kept) < 300, len(kept)


def test_a_lease_given_back_evicts_nothing_and_doubles_nothing(tmp_path: Path) -> None:
    """Also where what it left of a group was evicted: those rows stood twice, and could be in two
    leases.
    """
    clock = Clock()
    order = LeaseOrder(
        replaying(tmp_path, max_uses=UNLIMITED, capacity=1, on_short_batch="train"), 0, [], clock
    )
    for task, name in enumerate("abc"):
        rows = [ReadyRow(f"{name}.{run}", run, 0, 0, 1.0) for run in range(2)]
        order.add((0, 0), ReadyGroup(name, 0, 0, task, "", rows, num_bytes=1))
    order.close((0, 0), ClosedBatch(3, 3, {}))
    assert isinstance(order.lease(LeaseRequest(1, None, 6, None)), Selection)
    order.finish_lease(1, max_uses=UNLIMITED)
    clock.now += REST
    found = order.lease(LeaseRequest(2, None, 3, None))
    assert isinstance(found, Selection) and [
        r.id for _, rows in found.dropped["evicted"] for r in rows
    ] == ["b.1"]
    order.give_back(2)
    again = order.lease(LeaseRequest(2, None, 6, None))
    assert (
        isinstance(again, Selection)
        and [r.id for _, rows in again.picked for r in rows] == "a.0 a.1 b.0 b.1 c.0 c.1".split()
    )


async def test_rows_are_counted_out_of_groups(tmp_path: Path) -> None:
    clock = Clock()
    buffer = await opened(replaying(tmp_path), clock)
    await fill(buffer, 1, 0)
    reader = buffer.reader(1)
    seen = []
    for step in range(1, 6):
        lease = await reader.lease(step, groups=None, rows=3, deadline_s=5, max_staleness=None)
        seen.append([(t, r) for _, t, r in ids(lease)])
        await reader.use(step)
        clock.now += REST
        assert (await buffer.audit()).ok
    # the fresh rest of a group has a higher priority than what was used
    assert seen[0] == [(0, 0), (0, 1), (0, 2)]
    assert (0, 3) in seen[1]
    flat = [x for part in seen for x in part]
    assert max(flat.count(x) for x in flat) == 2
    await buffer.close()


async def test_stale_rows_are_not_replayed(tmp_path: Path) -> None:
    clock = Clock()
    buffer = await opened(replaying(tmp_path, max_uses=UNLIMITED, on_short_batch="carry"), clock)
    await fill(buffer, 1, 0, groups=1, version=Version(1, 0))
    for step in (1, 2):
        await read(buffer, step, max_staleness=1)
        await buffer.reader(1).use(step)
        clock.now += REST
    await fill(buffer, 1, 1, groups=1, version=Version(1, 2))
    assert tasks(await read(buffer, 3, max_staleness=1)) == [(1, 0)]
    await buffer.reader(1).use(3)
    clock.now += REST
    assert tasks(await read(buffer, 4, max_staleness=1)) == [(1, 0)]
    audit = await buffer.audit()
    assert (audit.discarded.get("stale", 0), audit.ok) in ((4, True), (0, True))
    await buffer.close()


@priority("worst_first")
class WorstFirst:
    """Of the tests: groups with the lowest mean reward first."""

    def __init__(self, args: BaseModel | None, seed: int) -> None:
        assert args is None

    def __call__(self, x: Candidate) -> float:
        rewards = [r for r in x.rewards if r is not None]
        return -sum(rewards) / len(rewards) if x.task < 8 else float("nan")


async def test_a_function_of_ones_own(tmp_path: Path) -> None:
    chosen = replaying(tmp_path, max_uses=1, replay=ReplaySettings(priority_fn="worst_first"))
    buffer = await opened(chosen, Clock())
    for task, reward in enumerate((0.5, 0.25, 1.0)):
        rows = [msgspec.structs.replace(x, reward=reward) for x in group(1, 0, task)]
        await buffer.writer(1).append(encode(rows), accepted=True)
    await buffer.writer(1).close_batch(0, accepted=3, expected=3, reasons={})
    assert [tasks(await read(buffer, step))[0][1] for step in (1, 2, 3)] == [1, 0, 2]
    await buffer.writer(1).append(encode(group(1, 1, 8)), accepted=True)
    with pytest.raises(BufferFailed, match="priority function 'worst_first' gave NaN"):
        await buffer.writer(1).close_batch(1, accepted=1, expected=1, reasons={})
    await buffer.close()


def test_noise_follows_from_seed_group_and_use() -> None:
    def at(seed: int, uses: int, name: str = "a") -> float:
        made = DecayLimitRandomization(DecayLimitRandomizationArgs(sigma=1.0), seed)
        return (
            made(
                Candidate(group=name, batch=0, task=0, model_version=4, use_count=uses, rewards=())
            )
            + 2 * uses
        )

    assert at(1, 0) == at(1, 0)
    assert len({at(1, 0), at(2, 0), at(1, 1), at(1, 0, "b"), 4.0}) == 5
    plain = DecayLimitRandomization(DecayLimitRandomizationArgs(), 1)
    assert (
        plain(Candidate(group="a", batch=0, task=0, model_version=4, use_count=1, rewards=()))
        == 2.0
    )


# ---------------------------------------------------------------- against a model, with crashes and
# older checkpoints


@dataclass
class Known:
    """What the model knows of a stored group."""

    id: tuple[int, int, int]  # lineage, batch, task
    version: Version  # of the weights that wrote it
    uses: list[Version]  # that count
    explained: Version | None = None
    orphaned: bool = False
    ready_at: float = 0.0

    def priority(self) -> tuple[float, tuple[int, int, int]]:
        return (-(self.version.step - 2.0 * len(self.uses)), self.id)


ACTIONS = st.lists(
    st.sampled_from(
        [
            "explore",
            "explore",
            "lease",
            "use",
            "use",
            "explain",
            "manifest",
            "crash",
            "replace",
            "rest",
        ]
    ),
    min_size=8,
    max_size=40,
)


class Model:
    """A run whose every lease is compared with what a few lines of Python say."""

    def __init__(self, folder: Path, max_uses: int) -> None:
        self.clock = Clock()
        self.settings = replaying(folder, max_uses=max_uses, on_short_batch="carry")
        self.known: list[Known] = []
        self.manifest: tuple[Version, Consumption] | None = None
        self.parents: dict[int, Version | None] = {}
        self.lineage = self.step = self.batch = 0
        self.leased: list[Known] = []

    async def start(self) -> None:
        self.buffer = Buffer(self.settings, clock=self.clock)
        await self.buffer.open()
        await self.take_over()

    async def take_over(self) -> None:
        parent = self.manifest[0] if self.manifest else None
        start = await self.buffer.start_lineage(*(self.manifest or (None, None)))
        self.lineage, self.parents[start.lineage] = start.lineage, parent
        self.step = parent.step if parent else 0
        self.leased = []
        for x in self.known:
            x.uses = [v for v in x.uses if self.counts(v, parent)]
            x.explained = x.explained if x.explained and self.counts(x.explained, parent) else None
            x.orphaned = not self.counts(x.version, parent)
            x.ready_at = self.clock.now + REST if x.uses else 0.0
        held = await self.buffer.writer(self.lineage).stored_groups(start.cursor)
        last = max((h.batch for h in held), default=start.cursor - 1)
        for b in range(start.cursor, last + 1):
            await self.explore(b, {h.task for h in held if h.batch == b})
        self.batch = last + 1

    def counts(self, version: Version, newest: Version | None) -> bool:
        """Whether `newest` descends from `version`."""
        while newest is not None:
            if newest.lineage == version.lineage:
                return version.step <= newest.step
            newest = self.parents[newest.lineage]
        return False

    async def explore(self, batch: int, held: set[int]) -> None:
        writer = self.buffer.writer(self.lineage)
        version = Version(self.lineage, self.step)
        for task in sorted({0, 1} - held):
            await writer.append(
                encode(group(self.lineage, batch, task, runs=2, version=version)), accepted=True
            )
            self.known.append(Known((self.lineage, batch, task), version, []))
        await writer.close_batch(batch, accepted=2, expected=2, reasons={})

    def readable(self) -> list[Known]:
        most = self.settings.max_uses
        now = self.clock.now
        found = [
            x
            for x in self.known
            if not x.orphaned and not x.explained and len(x.uses) < most and x.ready_at <= now
        ]
        return sorted(found, key=Known.priority)

    async def do(self, action: str) -> None:
        reader = self.buffer.reader(self.lineage)
        if action == "explore":
            await self.explore(self.batch, set())
            self.batch += 1
        elif action == "lease" and not self.leased:
            expected = self.readable()[:2]
            try:
                lease = await reader.lease(
                    self.step + 1, groups=2, rows=None, deadline_s=0.0, max_staleness=None
                )
            except DeadlineExceeded:
                assert len(expected) < 2
                return
            assert {(x.id.lineage, x.id.batch, x.id.task) for x in decode(lease.frame)} == {
                x.id for x in expected
            }
            self.leased = expected
        elif action in ("use", "explain") and self.leased:
            self.step += 1
            for x in self.leased:
                if action == "use":
                    x.uses.append(Version(self.lineage, self.step))
                    x.ready_at = self.clock.now + REST
                else:
                    x.explained = Version(self.lineage, self.step)
            await (
                reader.use(self.step) if action == "use" else reader.discard(self.step, "nonfinite")
            )
            self.leased = []
        elif action == "manifest" and not self.leased and self.step:
            self.manifest = (Version(self.lineage, self.step), await reader.consumption(self.step))
        elif action == "rest":
            self.clock.now += REST
        elif action == "crash":
            await self.buffer.close()
            await self.start()
        elif action == "replace":
            await self.take_over()

    async def check(self) -> None:
        audit = await self.buffer.audit()
        assert audit.ok, audit
        assert audit.acked == 2 * len(self.known)
        assert audit.num_uses == 2 * sum(len(x.uses) for x in self.known)
        assert audit.used == 2 * sum(len(x.uses) >= self.settings.max_uses for x in self.known)


def play(max_uses: int, actions: list[str]) -> None:
    async def run() -> None:
        with tempfile.TemporaryDirectory() as folder:
            model = Model(Path(folder), max_uses)
            await model.start()
            for action in actions:
                await model.do(action)
                await model.check()
            await model.buffer.close()

    asyncio.run(run())


@pytest.mark.e2e
@pytest.mark.parametrize("max_uses", [1, 3])
@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions=ACTIONS)
def test_reading_and_counting_agree_with_a_model(max_uses: int, actions: list[str]) -> None:
    play(max_uses, actions)


@pytest.mark.slow
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions=ACTIONS, max_uses=st.sampled_from([1, 2, UNLIMITED]))
def test_reading_and_counting_agree_with_a_model_at_length(
    max_uses: int, actions: list[str]
) -> None:
    play(max_uses, actions)

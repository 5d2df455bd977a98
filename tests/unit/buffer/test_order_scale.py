"""Choosing stays cheap when very much waits: 100,000 rows."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from rft.buffer.buffer import Buffer
from rft.buffer.lease_order import LeaseOrder
from rft.buffer.row_selectors import ClosedBatch, LeaseRequest, Selection, WaitingGroup, WaitingRow
from rft.buffer.settings import BufferSettings, ReplaySettings
from rft.testing.storage_contract import group
from rft.types.block import decode, encode
from rft.types.ids import Version

GROUPS, RUNS, BATCH = 12_500, 8, 8
REPLAY = ReplaySettings(cooldown_s=1e-4)


def waiting() -> Iterator[WaitingGroup]:
    for i in range(GROUPS):
        name = f"0001.00.{i // BATCH:08d}.{i % BATCH:06d}"
        yield WaitingGroup(
            name, i // BATCH, 0, i % BATCH, str(i), [WaitingRow(f"{name}.{r:04d}", r, i * 37 % 200) for r in range(RUNS)]
        )


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What other tests have left in memory is not looked through while this one is timed."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("replay", [None, REPLAY], ids=["fifo", "priority"])
def test_a_lease_costs_what_it_takes_not_what_waits(replay: ReplaySettings | None, no_collector: None) -> None:
    settings = BufferSettings(folder=Path(), capacity=1 << 30, max_uses=3 if replay else 1, replay=replay)
    order = LeaseOrder(settings, 0, [])
    for one in waiting():
        order.add(one.key, one)
        if one.task == BATCH - 1:
            order.close(one.key, ClosedBatch(BATCH, BATCH, {}))
    assert order.num_waiting == GROUPS * RUNS
    began = time.process_time()
    for step in range(1, 201):
        wanted = LeaseRequest(step, None, 64, None)
        choice = order.lease(wanted)
        assert isinstance(choice, Selection)
        assert choice.num_rows == 64
        order.missing(wanted)
        order.done(step, max_uses=settings.max_uses)
    assert (time.process_time() - began) / 200 < 2e-3  # 0.1 ms; a walk over all groups takes 3 ms and more


@pytest.mark.slow
async def test_a_priority_read_of_64_rows_out_of_100_000(tmp_path: Path) -> None:
    """Payload included; `scripts/bench.py priority_read_at_scale` gives the figures for a quiet machine."""
    buffer = Buffer(BufferSettings(folder=tmp_path, capacity=1 << 30, capacity_bytes=1 << 40, max_uses=3, replay=REPLAY))
    await buffer.open()
    await buffer.start_lineage(Version(1, 200), None)
    writer = buffer.writer(2)
    rows = group(2, 0, 0, runs=RUNS, tokens=800)
    for batch in range(GROUPS // BATCH):
        for task in range(BATCH):
            aged = group(2, batch, task, runs=1, tokens=2, version=Version(1, batch * 37 % 200))[0].version_spans[0].version
            renamed = [
                msgspec.structs.replace(
                    x,
                    id=msgspec.structs.replace(x.id, batch=batch, task=task),
                    task_index=task,
                    version_spans=(msgspec.structs.replace(x.version_spans[0], version=aged),),
                )
                for x in rows
            ]
            await writer.append(encode(renamed), accepted=True)
        await writer.close_batch(batch, accepted=BATCH, wanted=BATCH, reasons={})
    reader, took = buffer.reader(2), []
    for step in range(201, 501):
        began = time.perf_counter()
        lease = await reader.lease(step, groups=None, rows=64, deadline_s=5, max_staleness=None)
        found = decode(lease.frame)
        took.append(time.perf_counter() - began)
        assert len(found) == 64
        await reader.use(step)
    took.sort()
    print(f"priority read of 64 rows: p50 {1e3 * took[150]:.2f} ms, p99 {1e3 * took[297]:.2f} ms")
    assert took[150] < 10e-3
    await buffer.close()

"""Choosing stays cheap when very much waits: 100,000 rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rft.buffer.lease_order import LeaseOrder
from rft.buffer.row_selectors import ClosedBatch, LeaseRequest, ReadyGroup, ReadyRow, Selection
from rft.buffer.settings import BufferSettings, ReplaySettings
from tests.helpers.counted import Counted

GROUPS = 12_500
RUNS = 8
BATCH = 8
LEASES = 200


def waiting(groups: int) -> Iterator[ReadyGroup]:
    for i in range(groups):
        name = f"0001.00.{i // BATCH:08d}.{i % BATCH:06d}"
        yield ReadyGroup(
            name,
            i // BATCH,
            0,
            i % BATCH,
            str(i),
            [ReadyRow(f"{name}.{r:04d}", r, i * 37 % 200) for r in range(RUNS)],
        )


@pytest.mark.e2e
@pytest.mark.parametrize(
    "replay", [None, ReplaySettings(cooldown_s=1e-4)], ids=["fifo", "priority"]
)
def test_a_lease_costs_what_it_takes_not_what_waits(replay: ReplaySettings | None) -> None:
    settings = BufferSettings(
        folder=Path(), capacity=1 << 30, max_uses=3 if replay else 1, replay=replay
    )

    def lines(groups: int) -> float:
        order = LeaseOrder(settings, 0, [])
        for one in waiting(groups):
            order.add(one.key, one)
            if one.task == BATCH - 1:
                order.close(one.key, ClosedBatch(BATCH, BATCH, {}))
        assert order.num_ready == groups * RUNS
        with Counted() as counted:
            for step in range(1, LEASES + 1):
                wanted = LeaseRequest(step, None, 64, None)
                choice = order.lease(wanted)
                assert isinstance(choice, Selection)
                assert choice.num_rows == 64
                order.missing(wanted)
                order.finish_lease(step, max_uses=settings.max_uses)
        return counted.lines / LEASES

    few = lines(2 * LEASES * BATCH)
    many = lines(GROUPS)
    assert many < 1.1 * few, (few, many)

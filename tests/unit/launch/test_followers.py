"""Who follows a run gets each record once, in order, and the coordinator keeps only the last of
them.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from rft.launch.coordinator import KEPT, MonitorPart
from rft.launch.drive import _Follower
from rft.monitor.settings import MonitorConfig, TrackedRun
from rft.types.metrics import MetricRecord


def noted(text: str) -> MetricRecord:
    return MetricRecord(role="explorer", step=1, time=0.0, values={}, notes=(text,))


@pytest.fixture
async def part(tmp_path: Path):
    made = MonitorPart(
        SimpleNamespace(monitor=MonitorConfig(), tracked_run=TrackedRun(folder=tmp_path))
    )  # type: ignore[arg-type]
    yield made
    await made.close()


async def test_each_record_comes_once_however_many_there_were(part: MonitorPart) -> None:
    early: list[MetricRecord] = []
    late: list[MetricRecord] = []
    follower = _Follower(part, early.append)
    joins_late = _Follower(part, late.append)
    for n in range(3 * KEPT):
        await part._tell(noted(str(n)))
        if n % 100 == 99:
            await follower.rest()
    await joins_late.rest()
    await part._tell(noted("last"))
    for one in (follower, joins_late):
        await one.rest()
        await one.rest()
    told = [*map(str, range(3 * KEPT)), "last"]
    assert [r.notes[0] for r in early] == told
    assert [r.notes[0] for r in late] == told[2 * KEPT :], "what was before is in metrics.jsonl"
    assert len(part._records) == KEPT


async def test_asking_beyond_the_end_gives_nothing(part: MonitorPart) -> None:
    await part._tell(noted("a"))
    assert await part.records(1 << 40, wait=False) == (1, [])

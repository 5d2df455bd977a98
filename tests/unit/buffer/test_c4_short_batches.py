"""Defect C4: trainer and explorer wait for each other as soon as a batch is short.  Here they
cannot, under any policy.

An explorer and a trainer, coupled by the real schedule and the real buffer as in a run; groups are
rejected and runs fail at will.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rft.buffer.buffer import Buffer
from rft.buffer.settings import BufferSettings, ReplaySettings
from rft.errors import ShortBatch
from rft.sync.schedule import Schedule
from rft.testing.storage_contract import group, ids
from rft.types.block import decode, encode
from rft.types.experience import failed
from rft.types.ids import Version
from rft.types.ports import EndOfData, NeedMore

BATCHES = 8
GROUPS = 3
RUNS = 2
# interval, offset, rows of a train step
COUPLINGS = [(1, 0, None), (3, 2, None), (1, 0, 4), (2, 0, 6), (1, 1, 9)]


@dataclass
class Pair:
    """Both sides of a run, without models."""

    buffer: Buffer
    schedule: Schedule
    rows: int | None  # of a train step; None: GROUPS groups
    refuse: random.Random
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    published: int = 0
    ahead: int = 0
    trained: list[int] = field(default_factory=list)  # rows of each step
    ages: list[int] = field(default_factory=list)
    ended: str = ""

    async def explore(self) -> None:
        writer = self.buffer.writer(1)
        for b in range(BATCHES):
            async with self.changed:
                await self.changed.wait_for(
                    lambda b=b: self.schedule.may_explore(max(0, b - self.ahead), self.published)  # type: ignore[misc]
                )
                version = Version(1, self.published)
            accepted = 0
            for task in range(GROUPS):
                rows = group(1, b, task, runs=RUNS, version=version)
                if self.refuse.random() < 0.2:
                    rows[0] = failed(
                        rows[0].id, taskset="toy", task_index=task, workflow="toy", reason="timeout"
                    )
                good = self.refuse.random() < 0.7
                accepted += good
                await writer.append(encode(rows), accepted=good, reason="" if good else "zero_std")
            await writer.close_batch(
                b, accepted=accepted, expected=GROUPS, reasons={"zero_std": GROUPS - accepted}
            )
        await writer.finish("all epochs done")

    async def train(self) -> None:
        reader = self.buffer.reader(1)
        step = 0
        while True:
            first = self.schedule.first_after(step + 1)
            try:
                lease = await reader.lease(
                    step + 1,
                    groups=GROUPS if self.rows is None else None,
                    rows=self.rows,
                    deadline_s=20,  # never reached: whatever ends the wait is an event
                    max_staleness=None,
                    until=first + self.ahead,
                )
            except NeedMore as e:
                async with self.changed:
                    self.ahead = max(self.ahead, e.batch + 1 - first)
                    self.changed.notify_all()
                continue
            except (EndOfData, ShortBatch) as e:
                self.ended = f"{type(e).__name__}: {e}"
                return
            step += 1
            found = ids(lease)
            self.trained.append(len(found))
            self.ages += [
                step - 1 - v.step
                for x in decode(lease.frame)
                if (v := x.oldest_version) is not None
            ]
            assert lease.missing or len(found) == self.rows or self.rows is None
            await reader.use(step)
            if self.schedule.must_publish(step):
                async with self.changed:
                    self.published = step
                    self.changed.notify_all()


async def play(
    folder: Path,
    policy: str,
    interval: int,
    offset: int,
    rows: int | None,
    seed: int,
    **more: object,
) -> Pair:
    settings = BufferSettings(folder=folder, on_short_batch=policy, **more)  # type: ignore[arg-type]
    buffer = Buffer(settings)
    await buffer.open()
    await buffer.start_lineage(None, None)
    units = {"batch_units": GROUPS * RUNS, "step_units": rows} if rows else {}
    pair = Pair(
        buffer, Schedule(interval=interval, offset=offset, **units), rows, random.Random(seed)
    )
    async with asyncio.timeout(120):
        explorer = asyncio.create_task(pair.explore())
        await pair.train()
        explorer.cancel()  # "stop" ends the run while the explorer waits for its turn
        await asyncio.gather(explorer, return_exceptions=True)
    assert (await buffer.audit()).ok
    await buffer.close()
    return pair


@pytest.mark.parametrize(("interval", "offset", "rows"), COUPLINGS)
async def test_c4_carry_trains_on_to_the_end(
    tmp_path: Path, interval: int, offset: int, rows: int | None
) -> None:
    pair = await play(tmp_path, "carry", interval, offset, rows, 1)
    assert pair.ended.startswith("EndOfData")
    assert pair.trained
    assert max(pair.ages) <= pair.schedule.staleness_bound + 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
async def test_c4_twenty_seeds(tmp_path: Path, seed: int) -> None:
    for n, (interval, offset, rows) in enumerate(COUPLINGS):
        for policy in ("carry", "train", "stop"):
            pair = await play(tmp_path / f"{n}{policy}", policy, interval, offset, rows, seed)
            assert max(pair.ages, default=0) <= pair.schedule.staleness_bound + (policy == "carry")


@pytest.mark.parametrize(("interval", "offset", "rows"), [(1, 0, None), (1, 0, 6), (3, 2, None)])
async def test_c4_train_takes_short_steps_and_says_so(
    tmp_path: Path, interval: int, offset: int, rows: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    pair = await play(tmp_path, "train", interval, offset, rows, 3)
    # the latter where a batch has nothing at all
    assert pair.ended.startswith(("EndOfData", "ShortBatch: step"))
    assert "fewer than requested" in caplog.text


@pytest.mark.parametrize("rows", [None, 6])
async def test_c4_stop_names_the_batch_at_once(tmp_path: Path, rows: int | None) -> None:
    pair = await play(tmp_path, "stop", 1, 0, rows, 3)
    assert pair.ended.startswith("ShortBatch")
    assert "cannot be filled" in pair.ended
    assert "zero_std" in pair.ended


@pytest.mark.parametrize("policy", ["stop", "train", "carry"])
async def test_c4_with_replay(tmp_path: Path, policy: str) -> None:
    replay = ReplaySettings(cooldown_s=1e-3)
    pair = await play(tmp_path, policy, 1, 0, None, 3, replay=replay, max_uses=2)
    assert pair.ended.startswith("EndOfData" if policy != "stop" else ("EndOfData", "ShortBatch"))

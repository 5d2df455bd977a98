"""Waits of explorer and trainer: woken by events, ended by name, never a short batch in silence."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rft.buffer.buffer import Buffer
from rft.buffer.settings import BufferSettings
from rft.errors import BufferFailed, DeadlineExceeded, ShortBatch
from rft.testing.storage_contract import fill, group, ids, row, take
from rft.types.block import encode
from rft.types.ids import GroupId, Version
from rft.types.ports import EndOfData
from rft.worker.waiting import activities


async def started(folder: Path, **settings: object) -> Buffer:
    buffer = Buffer(BufferSettings(folder=folder, **settings))  # type: ignore[arg-type]
    await buffer.open()
    await buffer.start_lineage(None, None)
    return buffer


async def short(buffer: Buffer, batch: int, accepted: int, wanted: int = 3) -> None:
    writer = buffer.writer(1)
    for task in range(accepted):
        await writer.append(encode(group(1, batch, task)), accepted=True)
    await writer.close_batch(
        batch, accepted=accepted, expected=wanted, reasons={"zero_std": 5, "failed": 2}
    )


async def test_a_waiting_trainer_wakes_by_the_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = await started(tmp_path)
    loop = asyncio.get_running_loop()
    timers = []
    call_at = loop.call_at

    def seen(when: float, *given: Any, **more: Any) -> asyncio.TimerHandle:
        timers.append(when - loop.time())
        return call_at(when, *given, **more)

    monkeypatch.setattr(loop, "call_at", seen)
    for step in range(1, 21):
        waiting = asyncio.create_task(take(buffer, 1, step))
        await fill(buffer, 1, step - 1)
        await waiting
        await buffer.reader(1).use(step)
    assert all(delay > 1 for delay in timers), (
        f"a wait that polls sets short timers: {sorted(timers)[:5]}"
    )
    await buffer.close()


async def test_stop_names_the_short_batch(tmp_path: Path) -> None:
    buffer = await started(tmp_path)
    await short(buffer, 0, 2)
    with pytest.raises(
        ShortBatch, match=r"batch 0 of explorer 0 has 2 of 3 groups .*2 failed, 5 zero_std"
    ):
        await take(buffer, 1, 1, 3)
    assert (await buffer.audit()).ok
    await buffer.close()


async def test_train_takes_what_the_batch_has(tmp_path: Path) -> None:
    buffer = await started(tmp_path, on_short_batch="train")
    await short(buffer, 0, 2)
    await short(buffer, 1, 3)
    assert {(b, t) for b, t, _ in ids(await take(buffer, 1, 1, 3))} == {(0, 0), (0, 1)}
    await buffer.reader(1).use(1)
    assert {(b, t) for b, t, _ in ids(await take(buffer, 1, 2, 3))} == {(1, 0), (1, 1), (1, 2)}
    await buffer.reader(1).use(2)
    await short(buffer, 2, 0)
    with pytest.raises(ShortBatch, match="no group to train"):
        await take(buffer, 1, 3, 3)
    await buffer.close()


async def test_carry_fills_up_from_the_next_batch(tmp_path: Path) -> None:
    buffer = await started(tmp_path, on_short_batch="carry")
    await short(buffer, 0, 2)
    await short(buffer, 1, 3)
    assert {(b, t) for b, t, _ in ids(await take(buffer, 1, 1, 3))} == {(0, 0), (0, 1), (1, 0)}
    await buffer.reader(1).use(1)
    await buffer.writer(1).finish("all epochs done")
    with pytest.raises(
        EndOfData, match=r"all epochs done.*2 of 3 groups.*8 experiences stay in the buffer"
    ):
        await take(buffer, 1, 2, 3)
    assert (await buffer.audit()).available == 8
    await buffer.close()


async def test_a_starving_trainer_says_for_whom_it_waits_and_ends_resumable(
    tmp_path: Path,
) -> None:
    buffer = await started(tmp_path)
    await fill(buffer, 1, 0, groups=2)
    await fill(buffer, 1, 1, groups=1, close=False)
    waiting = asyncio.ensure_future(take(buffer, 1, 1, 3, deadline_s=0.1))
    for _ in range(5):  # until it waits
        await asyncio.sleep(0)
    (found,) = activities()
    still = "batch 1 of explorer 0 is still open with 1 groups stored (1 accepted, 0 rejected)"
    assert (found.text, found.idle) == (
        f"the trainer waits for the explorer: step 1 has 2 of 3 groups; {still}",
        True,
    )
    with pytest.raises(
        DeadlineExceeded,
        match=r"the trainer waited 0\.1 s for the explorer: step 1 has 2 of 3 groups; batch 1",
    ) as caught:
        await waiting
    assert caught.value.exit_code == 4 and activities() == []
    audit = await buffer.audit()
    # nothing was taken: a resumed run has all of it
    assert (audit.available, audit.leased, audit.ok) == (12, 0, True)
    await buffer.close()


async def test_the_end_is_told_to_a_waiting_trainer(tmp_path: Path) -> None:
    buffer = await started(tmp_path)
    waiting = asyncio.create_task(take(buffer, 1, 1))
    await fill(buffer, 1, 0)
    await waiting
    await buffer.reader(1).use(1)
    waiting = asyncio.create_task(take(buffer, 1, 2))
    await asyncio.sleep(0)
    await buffer.writer(1).finish("all epochs done")
    with pytest.raises(EndOfData, match="all epochs done"):
        await waiting
    await buffer.close()


async def test_a_group_that_cannot_be_trained_makes_the_batch_short(tmp_path: Path) -> None:
    buffer = await started(tmp_path)
    name = GroupId(1, 0, 0, 0)
    await buffer.writer(1).append(
        encode([row(name.run(i), reward=None) for i in range(2)]), accepted=True
    )
    await buffer.writer(1).close_batch(0, accepted=1, expected=1, reasons={})
    with pytest.raises(ShortBatch, match=r"0 of 1 groups .*1 nothing_to_train"):
        await take(buffer, 1, 1, 1)
    await buffer.close()


async def test_the_explorer_waits_for_room(tmp_path: Path) -> None:
    buffer = await started(tmp_path, capacity=2)
    await fill(buffer, 1, 0)
    waiting = asyncio.create_task(buffer.writer(1).room(1))
    await take(buffer, 1, 1)
    assert not waiting.done()  # leased is not yet used
    await buffer.reader(1).use(1)
    await asyncio.wait_for(waiting, 5)
    with pytest.raises(BufferFailed, match=r"can never be filled: buffer\.capacity is 2"):
        await take(buffer, 1, 2, groups=3)
    await buffer.close()


async def test_closing_ends_every_wait(tmp_path: Path) -> None:
    buffer = await started(tmp_path, capacity=1)
    await fill(buffer, 1, 0, groups=1, close=False)
    waits = [
        asyncio.create_task(take(buffer, 1, 1, groups=1)),
        asyncio.create_task(buffer.writer(1).room(1)),
    ]
    await asyncio.sleep(0)
    await buffer.close()
    for wait in waits:
        with pytest.raises(BufferFailed, match="is closed"):
            await wait


@pytest.mark.parametrize(("policy", "cursor"), [("stop", 1), ("carry", 2)])
async def test_a_batch_that_ended_the_run_is_played_again(
    tmp_path: Path, policy: str, cursor: int
) -> None:
    """A checkpoint that is written meanwhile does not pass it, also where none of its groups waits:
    steps would lack its groups.
    """
    buffer = await started(tmp_path, on_short_batch=policy)
    await short(buffer, 0, 3)
    await take(buffer, 1, 1, 3)
    await buffer.reader(1).use(1)
    await short(buffer, 1, 0)
    assert (await buffer.reader(1).consumption(1)).cursor == cursor
    await buffer.close()


async def test_a_group_without_a_reward_is_played_again_by_the_next_start(tmp_path: Path) -> None:
    """A judge was out of reach, say; what a filter rejected stays so."""
    buffer = await started(tmp_path)
    writer = buffer.writer(1)
    await writer.append(
        encode([row(GroupId(1, 0, 0, 0).run(0), reward=None)]), accepted=False, reason="unscored"
    )
    await writer.append(encode(group(1, 0, 1)), accepted=False, reason="zero_std")
    consumption = await buffer.reader(1).consumption(0)
    assert [h.task for h in await writer.stored_groups(0)] == [0, 1]
    await buffer.start_lineage(Version(1, 0), consumption)
    assert [h.task for h in await buffer.writer(2).stored_groups(0)] == [1]
    assert (await buffer.audit()).ok
    await buffer.close()


async def test_old_rows_are_stale_at_the_lease(tmp_path: Path) -> None:
    buffer = await started(tmp_path)
    for batch in range(5):
        await fill(buffer, 1, batch, version=Version(1, 0))
    reader = buffer.reader(1)
    for step in (1, 2):
        await reader.lease(step, groups=2, rows=None, deadline_s=5, max_staleness=1)
        await reader.use(step)
    with pytest.raises(DeadlineExceeded, match="batch 5 of explorer 0 is still open"):
        await reader.lease(3, groups=2, rows=None, deadline_s=0.01, max_staleness=1)
    await fill(buffer, 1, 5, version=Version(1, 2))
    lease = await reader.lease(3, groups=2, rows=None, deadline_s=5, max_staleness=1)
    again = await reader.lease(3, groups=2, rows=None, deadline_s=5, max_staleness=1)
    assert {b for b, _, _ in ids(lease)} == {5}
    assert again.frame == lease.frame
    audit = await buffer.audit()
    assert (audit.discarded, audit.leased, audit.ok) == ({"stale": 24}, 8, True)
    assert (await reader.consumption(2)).cursor == 2  # batches 2 to 4 went with step 3
    await reader.use(3)
    assert (await reader.consumption(3)).cursor == 6
    await buffer.close()


async def test_wrong_calls_are_refused(tmp_path: Path) -> None:
    buffer = await started(tmp_path)
    reader = buffer.reader(1)
    with pytest.raises(BufferFailed, match="exactly one of groups and rows"):
        await reader.lease(1, groups=1, rows=1, deadline_s=1, max_staleness=None)
    with pytest.raises(BufferFailed, match="step 7 of lineage 1 has no lease"):
        await reader.use(7)
    with pytest.raises(BufferFailed, match="needs a reason"):
        await reader.discard(1, "")
    with pytest.raises(BufferFailed, match="explorer 3"):
        buffer.writer(1, 3)
    await buffer.close()

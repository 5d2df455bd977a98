"""Back-pressure, full disks and damaged payload, seen from explorer and trainer."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import random
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rft.buffer.audit import audit_run
from rft.buffer.buffer import Buffer
from rft.buffer.core import Limiter
from rft.buffer.experience_export import export
from rft.buffer.inspect import look
from rft.buffer.query import open_run
from rft.buffer.settings import BufferSettings
from rft.buffer.storage.blobs import SqlStorage
from rft.errors import BufferFailed, ConfigError, DiskFull, Fenced, PayloadDamaged, ShortBatch
from rft.testing.storage_contract import fill, group, ids, take
from rft.types.block import decode, encode

KINDS = ["sql", "file", "queue", "memory"]


async def started(folder: Path, kind: str = "sql", **settings: Any) -> Buffer:
    path = "none" if kind == "memory" else None
    buffer = Buffer(
        BufferSettings(
            folder=folder / "buffer",
            storage_type="queue" if kind == "memory" else kind,  # type: ignore[arg-type]
            storage_path=path,
            **settings,
        )
    )
    await buffer.open()
    await buffer.start_lineage(None, None)
    return buffer


async def explore(buffer: Buffer, explorer: int, batches: int, size: int, tokens: int = 12) -> None:
    """An explorer that asks nobody: all groups of a batch at once, batch after batch."""
    writer = buffer.writer(1, explorer)
    for batch in range(batches):
        frames = [
            encode(group(1, batch, task, explorer=explorer, tokens=tokens)) for task in range(size)
        ]
        await asyncio.gather(*(writer.append(f, accepted=True) for f in frames))
        await writer.close_batch(batch, accepted=size, expected=size, reasons={})
    await writer.finish("done")


async def until(buffer: Buffer, condition: Callable[[], bool]) -> None:
    """Until it holds; and then for some more calls of the buffer, in which more could come."""
    async with asyncio.timeout(120):
        while not condition():
            await buffer.audit()
    for _ in range(5):
        await buffer.audit()


def rss() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# ---------------------------------------------------------------- back-pressure


@pytest.mark.e2e
@pytest.mark.parametrize("kind", KINDS)
async def test_a_stopped_trainer_holds_the_explorers_back(tmp_path: Path, kind: str) -> None:
    frame = len(encode(group(1, 0, 0, tokens=2000)))
    bound = 12 * frame - 5
    buffer = await started(tmp_path, kind, num_explorers=2, capacity=20, capacity_bytes=bound)
    explorers = [
        asyncio.create_task(explore(buffer, e, batches=8, size=5, tokens=2000)) for e in range(2)
    ]
    order = buffer._order
    await until(buffer, lambda: order.num_bytes >= bound)
    gc.collect()
    before = rss()
    for _ in range(30):
        await buffer.audit()
    gc.collect()
    assert bound <= order.num_bytes <= bound + frame
    assert not any(e.done() for e in explorers)
    assert rss() <= before * 1.05
    seen = []
    for step in range(1, 9):  # the trainer goes on
        lease = await take(buffer, 1, step, groups=10)
        seen += [(x.id.batch, x.id.group.explorer, x.id.task) for x in decode(lease.frame)][::4]
        await buffer.reader(1).use(step)
        assert order.num_bytes <= bound + frame
    await asyncio.gather(*explorers)
    assert seen == [(b, e, t) for b in range(8) for e in range(2) for t in range(5)]
    audit = await buffer.audit()
    assert (audit.used, audit.acked, audit.ok, order.num_bytes) == (320, 320, True, 0)
    await buffer.close()


async def test_groups_are_bounded_too(tmp_path: Path) -> None:
    buffer = await started(tmp_path, capacity=7)
    explorer = asyncio.create_task(explore(buffer, 0, batches=3, size=5))
    await until(buffer, lambda: buffer._order.num_groups >= 7)
    room = asyncio.create_task(buffer.writer(1).room(9))
    await until(buffer, lambda: True)
    assert (buffer._order.num_groups, room.done()) == (7, False)
    for step in range(1, 4):
        await take(buffer, 1, step, groups=5)
        await buffer.reader(1).use(step)
    await asyncio.gather(explorer, room)
    await buffer.close()


async def test_a_step_larger_than_the_bounds_is_still_filled(tmp_path: Path) -> None:
    """The trainer waits for groups of the open batch, which may come then: nobody waits in a
    circle.
    """
    buffer = await started(tmp_path, capacity=100, capacity_bytes=1)
    explorer = asyncio.create_task(explore(buffer, 0, batches=2, size=6))
    await until(buffer, lambda: buffer._order.num_groups >= 1)
    assert buffer._order.num_groups == 1
    assert len(ids(await take(buffer, 1, 1, groups=6))) == 24
    await until(buffer, lambda: True)
    assert buffer._order.num_groups == 6  # batch 1 is not needed yet
    await buffer.reader(1).use(1)
    assert len(ids(await take(buffer, 1, 2, groups=6))) == 24
    await explorer
    await buffer.close()


async def test_a_later_batch_does_not_take_the_place_of_the_open_one(tmp_path: Path) -> None:
    buffer = await started(tmp_path, capacity=2)
    writer = buffer.writer(1)
    for task in range(2):
        await writer.append(encode(group(1, 1, task)), accepted=True)
    late = asyncio.create_task(writer.append(encode(group(1, 2, 0)), accepted=True))
    first = asyncio.create_task(writer.append(encode(group(1, 0, 0)), accepted=True))
    await until(buffer, lambda: True)
    assert not first.done()
    lease = asyncio.create_task(take(buffer, 1, 1, groups=1))
    await first
    await writer.close_batch(0, accepted=1, expected=1, reasons={})
    assert ids(await lease)[0] == (0, 0, 0)
    assert not late.done()
    await buffer.start_lineage(None, None)
    with pytest.raises(Fenced):
        await late
    await buffer.close()


async def test_what_is_not_trained_needs_no_room(tmp_path: Path) -> None:
    buffer = await started(tmp_path, capacity=1)
    writer = buffer.writer(1)
    frame = encode(group(1, 0, 0))
    await writer.append(frame, accepted=True)
    await writer.append(encode(group(1, 0, 1)), accepted=False, reason="zero_std")
    with pytest.raises(BufferFailed, match="damaged"):  # refused at once, not when there is room
        await writer.append(frame[:50], accepted=True)
    waiting = asyncio.create_task(writer.append(encode(group(1, 0, 2)), accepted=True))
    await until(buffer, lambda: True)
    await buffer.close()
    with pytest.raises(BufferFailed, match="is closed"):
        await waiting


def test_the_limiter_counts_what_is_on_its_way() -> None:
    class Waiting:
        num_groups = 1
        num_bytes = 100
        open_batch = (3, 0)

    limiter = Limiter(BufferSettings(folder=Path(), capacity=3, capacity_bytes=1000))
    assert limiter.room(Waiting, (5, 0))
    limiter.admit(100)
    assert limiter.room(Waiting, (5, 0))
    limiter.admit(100)
    assert not limiter.room(Waiting, (3, 0))
    with limiter.starving():
        assert [limiter.room(Waiting, key) for key in ((2, 1), (3, 0), (3, 1), None)] == [
            True,
            True,
            False,
            False,
        ]
    limiter.settle(100)
    assert limiter.room(Waiting, None)
    limiter.settle(100)
    limiter.admit(900)
    assert not limiter.room(Waiting, (5, 0))


async def test_memory_alone_is_given_back(tmp_path: Path) -> None:
    buffer = await started(tmp_path, "memory")
    storage: Any = buffer._storage
    writer = buffer.writer(1)
    reader = buffer.reader(1)
    for batch in range(6):
        for task in range(4):
            frame = encode(group(1, batch, task, tokens=500))
            await writer.append(frame, accepted=task < 2, reason="" if task < 2 else "zero_std")
        await writer.close_batch(batch, accepted=2, expected=2, reasons={})
        lease = await reader.lease(batch + 1, groups=2, rows=None, deadline_s=5, max_staleness=None)
        assert len(decode(lease.frame)) == 8
        await (reader.discard(batch + 1, "nonfinite") if batch % 2 else reader.use(batch + 1))
        assert storage.resident_bytes <= 2 * len(frame)  # rejected groups go with the next append
    await fill(buffer, 1, 6)
    await buffer.start_lineage(None, None)
    await buffer.writer(2).append(encode(group(2, 6, 0)), accepted=True)
    assert storage.resident_bytes == buffer._order.num_bytes > 0
    assert (await buffer.audit()).ok
    await buffer.close()


# ---------------------------------------------------------------- a full disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 6 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(folder)],
        capture_output=True,
        timeout=20,
    )
    if mounted.returncode:
        pytest.skip("needs the right to mount a file system")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True, timeout=20)


@pytest.mark.e2e
@pytest.mark.parametrize("kind", KINDS)
async def test_a_full_disk_is_waited_out(
    small_disk: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    ballast = small_disk / "ballast"
    buffer = await started(small_disk, kind, full_disk_reserve_bytes=512 << 10)
    writer = buffer.writer(1)
    reader = buffer.reader(1)
    for batch in range(3):
        await fill(buffer, 1, batch)
    with ballast.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
        while True:
            file.write(bytes(4096))
    with caplog.at_level(logging.ERROR):
        frames = [encode(group(1, 3, task, tokens=20_000)) for task in range(2)]
        appends = [asyncio.create_task(writer.append(frame, accepted=True)) for frame in frames]
        if kind != "memory":
            await until(buffer, lambda: "Retrying for" in caplog.text)
            assert not any(a.done() for a in appends)
        for step in (1, 2):  # the trainer has what it needs
            await take(buffer, 1, step)
            await reader.use(step)
    ballast.unlink()
    assert [a.appended for a in await asyncio.gather(*appends)] == [4, 4]
    await writer.close_batch(3, accepted=2, expected=2, reasons={})
    seen = []
    for step in (3, 4):
        lease = await take(buffer, 1, step)
        seen += decode(lease.frame)
        await reader.use(step)
    assert encode(seen[8:12]) == frames[0]
    audit = await buffer.audit()
    assert (audit.used, audit.acked, audit.ok) == (32, 32, True)
    await buffer.close()
    assert not audit_run(small_disk).problems


@pytest.mark.e2e
@pytest.mark.parametrize("kind", ["sql", "file", "queue"])
async def test_a_disk_that_stays_full_is_told(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = await started(tmp_path, kind, full_disk_wait_s=0.6)
    monkeypatch.setenv("RFT_FAULT", f"storage.put=enospc,of.{kind}")
    with pytest.raises(
        DiskFull, match=r"No space left on device.*Nothing of the last call is stored"
    ):
        await buffer.writer(1).append(encode(group(1, 0, 0)), accepted=True)
    monkeypatch.delenv("RFT_FAULT")
    await fill(buffer, 1, 0)
    assert len(ids(await take(buffer, 1, 1))) == 8
    assert (await buffer.audit()).ok
    await buffer.close()


@pytest.mark.parametrize("point", ["buffer.lineage", "buffer.use.before"])
async def test_space_that_is_reserved_already_or_not_any_more(
    tmp_path: Path, point: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A process that was killed leaves it behind: the next one begins with it.  A person removes
    it: the write waits.
    """
    reserve = tmp_path / "buffer/experience_buffer.reserve"
    buffer = await started(tmp_path)
    await fill(buffer, 1, 0)
    await take(buffer, 1, 1)
    if point == "buffer.lineage":
        await buffer.close()
        reserve.write_bytes(bytes(1 << 20))
        monkeypatch.setenv("RFT_FAULT", f"{point}:1=enospc")
        buffer = await started(tmp_path, full_disk_wait_s=0.0)
        assert "is in use now" in caplog.text
    else:
        reserve.unlink()
        monkeypatch.setenv("RFT_FAULT", f"{point}:1=enospc")
        await buffer.reader(1).use(1)
        assert (await buffer.audit()).used == 8
        assert "Retrying for" in caplog.text
    assert not reserve.exists()
    await buffer.close()


@pytest.mark.parametrize(("code", "error"), [(errno.ENOSPC, DiskFull), (errno.EROFS, BufferFailed)])
async def test_a_disk_where_no_file_can_be_made(
    tmp_path: Path, code: int, error: type[BufferFailed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No number of a file is left, or the disk is read-only: that is told, instead of an OSError
    that ends the explorer.
    """
    buffer = await started(tmp_path, full_disk_wait_s=0.0)
    opened = os.open

    def refusing(path: Any, *args: Any, **more: Any) -> int:
        if str(path).endswith(".reserve"):
            raise OSError(code, os.strerror(code), str(path))
        return opened(path, *args, **more)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refusing)
        with pytest.raises(error, match="Nothing of the last call is stored") as told:
            await buffer.writer(1).append(encode(group(1, 0, 0)), accepted=True)
    assert type(told.value) is error and os.strerror(code) in str(told.value)
    await fill(buffer, 1, 0)
    assert (await buffer.audit()).ok
    await buffer.close()


async def test_a_run_on_a_disk_that_cannot_be_written_is_read(small_disk: Path) -> None:
    """SQLite has no place for its shared memory there; where no run has the ledger open it needs
    none.
    """
    buffer = await started(small_disk, full_disk_reserve_bytes=512 << 10)
    await fill(buffer, 1, 0)
    await buffer.close()
    remount = ["mount", "-o", "remount,ro", str(small_disk)]
    await asyncio.to_thread(subprocess.run, remount, check=True, timeout=20)
    with (
        open_run(small_disk) as questions,
        questions.ask("SELECT count(*) FROM v_experiences") as answer,
    ):
        assert list(answer.rows) == [(8,)]
    assert audit_run(small_disk).acked == 8


# ---------------------------------------------------------------- damaged payload


def segments(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.suffix in (".blk", ".seg"))


def spoil(folder: Path, kind: str, number: int) -> str:
    """Change one byte of the payload of the group that was stored as this one (from 0); the name of
    what was changed.
    """
    if kind == "sql":
        with sqlite3.connect(folder / "buffer/experience_buffer.db") as raw:
            (block,) = raw.execute(
                "SELECT block FROM payloads WHERE id = ?", (number + 1,)
            ).fetchone()
            changed = block[:-9] + bytes([block[-9] ^ 4]) + block[-8:]
            raw.execute("UPDATE payloads SET block = ? WHERE id = ?", (changed, number + 1))
        raw.close()
        return f"payload {number + 1}"
    path = segments(folder)[number if kind == "file" else 0]
    whole = bytearray(path.read_bytes())
    # four groups of about the same size
    whole[(2 * number + 1) * len(whole) // 8 if kind == "queue" else len(whole) // 2] ^= 16
    path.write_bytes(whole)
    return path.name


@pytest.mark.parametrize("kind", ["sql", "file", "queue"])
async def test_damaged_payload_stops_the_run_and_says_how_to_go_on(
    tmp_path: Path, kind: str
) -> None:
    buffer = await started(tmp_path, kind)
    for batch in range(2):
        await fill(buffer, 1, batch)
    await buffer.close()
    name = spoil(tmp_path, kind, 1)
    buffer = await started(tmp_path, kind, resume_rows="keep")
    await fill(buffer, 2, 0)
    with pytest.raises(PayloadDamaged, match=rf"{name}.*on_damaged_payload: explain"):
        await take(buffer, 2, 1)
    audit = await buffer.audit()
    assert (audit.leased, audit.available, audit.ok) == (0, 16, True)  # given back
    await buffer.close()

    buffer = await started(tmp_path, kind, resume_rows="keep", on_damaged_payload="explain")
    await fill(buffer, 3, 0)  # the task is explored again
    await fill(buffer, 3, 1)
    assert ids(await take(buffer, 3, 1)) == [(0, t, r) for t in range(2) for r in range(4)]
    await buffer.reader(3).use(1)
    spoil(tmp_path, kind, 2)  # in the middle of a run a step goes on without the group
    lease = await take(buffer, 3, 2)
    assert (ids(lease), lease.missing) == ([(1, 1, r) for r in range(4)], 1)
    assert (await take(buffer, 3, 2)).frame == lease.frame
    await buffer.reader(3).use(2)
    audit = await buffer.audit()
    assert (audit.used, audit.available, audit.discarded, audit.ok) == (
        12,
        0,
        {"payload_damaged": 8},
        True,
    )
    await buffer.close()


@pytest.mark.parametrize("at", [60, -9])  # in a row's fields, in its arrays
async def test_damaged_payload_is_neither_shown_nor_exported(
    tmp_path: Path, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = await started(tmp_path)
    await fill(buffer, 1, 0)
    await buffer.close()
    with open_run(tmp_path) as questions:
        assert look(questions, num=1)[0].payload is not None
        monkeypatch.setattr(SqlStorage, "get", unreadable)
        with pytest.raises(ConfigError, match=r"0000\.blk cannot be read: Permission denied"):
            export(questions, tmp_path / "a.jsonl", tokens=True)
        monkeypatch.undo()
    with sqlite3.connect(tmp_path / "buffer/experience_buffer.db") as raw:
        for number, block in raw.execute("SELECT id, block FROM payloads").fetchall():
            changed = bytearray(block)
            changed[at] ^= 0x80
            raw.execute("UPDATE payloads SET block = ? WHERE id = ?", (bytes(changed), number))
    raw.close()
    with open_run(tmp_path) as questions:
        (shown,) = look(questions, num=1)
        assert shown.payload is None and "is not as it was stored" in shown.missing_reason
        with pytest.raises(PayloadDamaged, match="is not as it was stored"):
            export(questions, tmp_path / "a.jsonl", tokens=True)


def unreadable(*_: Any) -> list[bytes]:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "buffer/0000.blk")


async def test_rows_of_damaged_groups_and_a_step_without_any(tmp_path: Path) -> None:
    buffer = await started(tmp_path, "file", on_damaged_payload="explain")
    await fill(buffer, 1, 0)
    await fill(buffer, 1, 1)
    await buffer.writer(1).finish("done")
    files = segments(tmp_path)
    files[0].write_bytes(b"")
    reader = buffer.reader(1)
    lease = await reader.lease(1, groups=None, rows=6, deadline_s=5, max_staleness=None)
    assert (ids(lease), lease.missing) == ([(0, 1, 0), (0, 1, 1)], 4)
    await reader.use(1)
    for path in files[1:]:
        path.unlink()
    with pytest.raises(
        ShortBatch, match=r"step 2: the payload of all its groups is damaged.*is missing"
    ):
        await reader.lease(2, groups=None, rows=2, deadline_s=5, max_staleness=None)
    audit = await buffer.audit()
    assert (audit.used, audit.leased, audit.discarded, audit.available) == (
        2,
        0,
        {"payload_damaged": 6},
        8,
    )
    assert audit.balanced
    await buffer.close()


async def test_the_audit_names_each_damaged_file(tmp_path: Path) -> None:
    buffer = await started(tmp_path, "file")
    for batch in range(3):
        await fill(buffer, 1, batch)
    await buffer.close()
    (tmp_path / "checkpoints/global_step_0").mkdir(parents=True)
    (tmp_path / "checkpoints/global_step_0/manifest.json").write_text(
        '{"format":5,"version":[1,0],"parent":null,"files":{},"consumption":{"num_uses":0,"digest":"'
        'sum:00000000000000000000000000000000","cursor":0}}'
    )
    assert audit_run(tmp_path).ok
    dice = random.Random(2)
    files = segments(tmp_path)
    for path in files:
        whole = bytearray(path.read_bytes())
        whole[dice.randrange(len(whole))] ^= 1 << dice.randrange(8)
        path.write_bytes(whole)
    problems = audit_run(tmp_path).problems
    assert [str(p) in problem for p, problem in zip(files, problems, strict=True)] == [True] * 6

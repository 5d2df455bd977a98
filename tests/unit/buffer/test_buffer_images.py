"""Files of images: stored once beside the rows, leased with them, freed with the last group."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from rft.buffer.audit import audit_run
from rft.buffer.buffer import Buffer
from rft.buffer.inspect import collect
from rft.buffer.query import open_run
from rft.buffer.replay_reader import ReplayReader
from rft.buffer.settings import UNLIMITED, BufferSettings, ReplaySettings
from rft.errors import FrameRejected, PayloadDamaged
from rft.testing.storage_contract import group, take
from rft.types.block import decode, encode
from rft.types.ids import Version
from rft.types.images import Image, ImagePlace

KINDS = ("sql", "file", "queue")
RED, BLUE = Image.of(b"red" * 1000), Image.of(b"blue" * 1000)


def shown(lineage: int, batch: int, task: int, *images: Image) -> bytes:
    """A group whose rows show the images."""
    places = tuple(ImagePlace(x.sha256, i, 1, (1, 2, 2), "h") for i, x in enumerate(images))
    rows = group(lineage, batch, task, runs=2)
    return encode([msgspec.structs.replace(row, images=places) for row in rows])


async def opened(folder: Path, kind: str = "sql", **more: object) -> tuple[Buffer, int]:
    settings = replace(
        BufferSettings(folder=folder / "buffer", run="run", storage_type=kind), **more
    )
    buffer = Buffer(settings)
    await buffer.open()
    return buffer, (await buffer.start_lineage(None, None)).lineage


async def append(buffer: Buffer, line: int, task: int, *images: Image, batch: int = 0) -> None:
    files = {x.sha256: x.data for x in images}
    frame = shown(line, batch, task, *images)
    await buffer.writer(line).append(frame, accepted=True, images=files)


def files_in(folder: Path, kind: str) -> int:
    """How often a file of an image is on the disk."""
    if kind == "sql":
        with closing(sqlite3.connect(folder / "buffer/experience_buffer.db")) as raw:
            blocks = [block for (block,) in raw.execute("SELECT block FROM payloads")]
    else:
        blocks = [p.read_bytes() for p in folder.rglob("*") if p.suffix in (".blk", ".seg")]
    return sum(block.count(x.data) for block in blocks for x in (RED, BLUE))


def names(buffer: Buffer) -> set[str]:
    """Of the stored files."""
    query = "SELECT sha256 FROM images"
    return {x for (x,) in buffer._ledger.run(lambda tx: tx.exec_driver_sql(query).all())}


@pytest.mark.parametrize("kind", KINDS)
async def test_a_file_is_stored_once_and_leased_with_its_rows(tmp_path, kind):
    buffer, line = await opened(tmp_path, kind)
    await append(buffer, line, 0, RED)
    await append(buffer, line, 1, RED, BLUE)
    await buffer.writer(line).append(encode(group(line, 0, 2)), accepted=True)
    await buffer.writer(line).close_batch(0, accepted=3, expected=3, reasons={})
    lease = await take(buffer, line, 1, 3)
    assert lease.images == {RED.sha256: RED.data, BLUE.sha256: BLUE.data}
    assert [len(row.images) for row in decode(lease.frame)] == [1, 1, 2, 2, 0, 0, 0, 0]
    await buffer.reader(line).use(1)
    assert (await buffer.audit()).ok
    await buffer.close()
    assert files_in(tmp_path, kind) == 2
    assert audit_run(tmp_path).ok
    with open_run(tmp_path) as questions:
        assert collect(questions)["bytes"]["images"] == len(RED.data) + len(BLUE.data)
    with ReplayReader(tmp_path) as reader:
        assert reader.rows_of(1).images == lease.images


@pytest.mark.parametrize("kind", KINDS)
async def test_a_resumed_run_leases_the_files_again(tmp_path, kind):
    buffer, line = await opened(tmp_path, kind)
    await append(buffer, line, 0, RED)
    await buffer.writer(line).close_batch(0, accepted=1, expected=1, reasons={})
    await buffer.close()
    buffer, line = await opened(tmp_path, kind, resume_rows="keep")
    await buffer.writer(line).close_batch(0, accepted=1, expected=1, reasons={})
    assert (await take(buffer, line, 1, 1)).images == {RED.sha256: RED.data}
    await append(buffer, line, 1, RED, batch=1)
    await buffer.close()
    assert files_in(tmp_path, kind) == 1


async def test_a_group_without_its_file_is_refused_and_one_that_others_brought_is_enough(tmp_path):
    buffer, line = await opened(tmp_path)
    writer = buffer.writer(line)
    with pytest.raises(FrameRejected, match="missing_image: .* shows image " + RED.sha256[:8]):
        await writer.append(shown(line, 0, 0, RED), accepted=True)
    await append(buffer, line, 1, RED)
    await writer.append(shown(line, 0, 2, RED), accepted=True)
    with pytest.raises(FrameRejected, match="invalid_image"):
        await writer.append(shown(line, 0, 3, BLUE), accepted=True, images={BLUE.sha256: RED.data})
    assert (await buffer.stats())["rejected"] == {"invalid_image": 1, "missing_image": 1}
    await buffer.close()
    assert audit_run(tmp_path).ok


async def test_memory_is_freed_with_the_last_group_that_shows_a_file(tmp_path):
    buffer, line = await opened(tmp_path, "queue", storage_path="none")
    storage = buffer._storage
    await append(buffer, line, 0, RED)
    await append(buffer, line, 1, RED, BLUE, batch=1)
    for batch in range(2):
        await buffer.writer(line).close_batch(batch, accepted=1, expected=1, reasons={})
    assert (await take(buffer, line, 1, 1)).images.keys() == {RED.sha256}
    await buffer.reader(line).use(1)
    assert (await take(buffer, line, 2, 1)).images.keys() == {RED.sha256, BLUE.sha256}
    await buffer.reader(line).use(2)
    assert storage.resident_bytes == 0
    await append(buffer, line, 2, RED, batch=2)
    assert storage.resident_bytes > len(RED.data)
    start = await buffer.start_lineage(None, None)
    await append(buffer, start.lineage, 0, BLUE)
    assert names(buffer) == {BLUE.sha256}
    await buffer.close()


@pytest.mark.parametrize("place", [*KINDS, "memory"])
async def test_replayed_rows_keep_their_files(tmp_path, place):
    """A file outlives uses, a group that needs it no more, a new lineage and, on disk, a restart."""
    memory = place == "memory"
    kind, more = ("queue", {"storage_path": "none"}) if memory else (place, {})
    more |= {"max_uses": 2, "replay": ReplaySettings(cooldown_s=None)}
    buffer, line = await opened(tmp_path, kind, **more)
    await append(buffer, line, 0, RED)
    await append(buffer, line, 1, RED, BLUE, batch=1)
    for batch in range(2):
        await buffer.writer(line).close_batch(batch, accepted=1, expected=1, reasons={})

    async def trained(step: int, groups: int) -> list[bytes]:
        lease = await take(buffer, line, step, groups)
        await buffer.reader(line).use(step)
        shown = {place.sha256 for row in decode(lease.frame) for place in row.images}
        assert shown == lease.images.keys()
        return sorted(map(bytes, lease.images.values()))

    assert await trained(1, 1) == [RED.data]
    assert await trained(2, 2) == [BLUE.data, RED.data]  # the first group is used up
    saved = await buffer.reader(line).consumption(2)
    if not memory:
        await buffer.close()
        buffer, _ = await opened(tmp_path, kind, **more)
    line = (await buffer.start_lineage(Version(1, 2), saved)).lineage
    assert await trained(3, 1) == [BLUE.data, RED.data]
    if memory:
        assert buffer._storage.resident_bytes == 0
    else:
        assert files_in(tmp_path, kind) == 2
    assert (await buffer.audit()).ok
    await buffer.close()


async def test_an_evicted_group_takes_only_files_that_nobody_replays(tmp_path):
    replay = ReplaySettings(cooldown_s=None)
    more = {"storage_path": "none", "max_uses": UNLIMITED, "replay": replay, "capacity": 1}
    buffer, line = await opened(tmp_path, "queue", **more)
    shows = (RED,), (RED, BLUE), (BLUE,), (BLUE,)
    kept = {RED}, {RED, BLUE}, {RED, BLUE}, {BLUE}  # of the last two groups
    for step, (images, left) in enumerate(zip(shows, kept, strict=True), 1):
        await append(buffer, line, 0, *images, batch=step - 1)
        await buffer.writer(line).close_batch(step - 1, accepted=1, expected=1, reasons={})
        assert (await take(buffer, line, step, 1)).images.keys() == {x.sha256 for x in images}
        await buffer.reader(line).use(step)
        assert names(buffer) == {x.sha256 for x in left}
        files = sum(len(x.data) for x in left)
        assert files < buffer._storage.resident_bytes < files + len(RED.data)
    await buffer.close()


@pytest.mark.parametrize("explain", [False, True])
async def test_a_damaged_file_stops_the_run_or_leaves_its_groups_out(tmp_path, explain):
    buffer, line = await opened(
        tmp_path, "file", on_damaged_payload="explain" if explain else "stop"
    )
    await append(buffer, line, 0, RED)
    await append(buffer, line, 1, BLUE)
    await buffer.writer(line).close_batch(0, accepted=2, expected=2, reasons={})
    (file,) = (p for p in tmp_path.rglob("*.blk") if RED.data in p.read_bytes())
    file.write_bytes(file.read_bytes()[:-1] + b"X")
    if explain:
        assert (await take(buffer, line, 1, 2)).images.keys() == {BLUE.sha256}
    else:
        with pytest.raises(PayloadDamaged, match="is damaged"):
            await take(buffer, line, 1, 2)
    await buffer.close()
    assert any(RED.sha256 in text for text in audit_run(tmp_path).problems)


async def test_the_limit_of_bytes_counts_files(tmp_path):
    buffer, line = await opened(tmp_path, capacity_bytes=2000)
    await append(buffer, line, 0, RED)
    assert not buffer._has_room(line, None)
    await buffer.close()

"""Storages that keep payload in files: what a directory holds, what is refused, what is freed."""

from __future__ import annotations

import errno
import os
import pickle
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, create_engine, insert

from rft.buffer.schema import groups, metadata
from rft.buffer.settings import BufferSettings
from rft.buffer.storage import file as files
from rft.buffer.storage import queue as queues
from rft.buffer.storage.base import Storage
from rft.buffer.storage.segment import HEAD, read
from rft.errors import BufferFailed, PayloadDamaged
from rft.testing.storage_contract import group
from rft.types.block import decode, encode

KINDS = {"file": files.FileStorage, "queue": queues.QueueStorage}


@pytest.fixture
def tx() -> Iterator[Connection]:
    engine = create_engine("sqlite://")
    with engine.begin() as connection:
        metadata.create_all(connection)
        yield connection
    engine.dispose()


def opened(kind: str, folder: Path, **settings: Any) -> Storage:
    made = KINDS[kind](BufferSettings(folder=folder, storage_type=kind, **settings))  # type: ignore[arg-type]
    made.open()
    return made


def block(n: int) -> bytes:
    return encode(group(1, n, 0))


def refer(tx: Connection, locator: str) -> None:
    tx.execute(
        insert(groups).values(
            {c.name: c.type.python_type(0) for c in groups.c if not c.nullable}
            | {"id": locator, "locator": locator}
        )
    )


def records(path: Path, magic: bytes) -> Iterator[bytes]:
    """All blocks of a file, in order."""
    offset = 0
    end = path.stat().st_size
    while offset < end:
        yield (stored := read(path, magic, offset))
        offset += HEAD.size + len(stored)


def test_a_segment_is_read_without_the_ledger(tmp_path: Path, tx: Connection) -> None:
    storage = opened("file", tmp_path / "b")
    blocks = [block(n) for n in range(5)]
    assert storage.put(blocks, tx) == [f"000001/{n:04d}" for n in range(5)]
    paths = sorted((tmp_path / "b/experience_buffer.segments").glob(f"*/*{files.SUFFIX}"))
    found = [read(path, files.MAGIC, alone=True) for path in paths]
    assert found == blocks
    assert [str(decode(b)[0].id.group) for b in found] == [
        str(decode(b)[0].id.group) for b in blocks
    ]
    storage.close()
    queue = opened("queue", tmp_path / "q")
    queue.put(blocks, tx)
    assert (
        list(records(tmp_path / "q/experience_buffer.segments/000001.seg", queues.MAGIC)) == blocks
    )
    queue.close()


def test_folders_stay_small_and_numbers_are_not_used_again(
    tmp_path: Path, tx: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_PER_FOLDER", 4)
    first = opened("file", tmp_path)
    there = [x for n in range(0, 12, 3) for x in first.put([block(n + i) for i in range(3)], tx)]
    many = first.put([block(n) for n in range(9)], tx)
    folder = tmp_path / "experience_buffer.segments"
    assert max(len(list(p.iterdir())) for p in folder.iterdir() if p.is_dir()) <= 4
    first.drop(there, tx)
    assert first.get(many, tx) == [block(n) for n in range(9)]
    first.close()
    second = opened("file", tmp_path)
    again = second.put([block(1)], tx)
    assert not {*again} & {*there, *many}
    assert not [p for p in folder.iterdir() if p.is_dir() and not any(p.iterdir())]
    second.close()


@pytest.mark.parametrize("kind", ["file", "queue"])
def test_one_process_writes_a_folder(tmp_path: Path, kind: str) -> None:
    first = opened(kind, tmp_path / "a", storage_path=str(tmp_path / "shared"))
    with pytest.raises(BufferFailed, match=r"shared/segments is open in process \d+"):
        opened(kind, tmp_path / "b", storage_path=str(tmp_path / "shared"))
    first.close()
    opened(kind, tmp_path / "b", storage_path=str(tmp_path / "shared")).close()


@pytest.mark.parametrize("kind", ["file", "queue"])
def test_every_changed_byte_is_found(tmp_path: Path, tx: Connection, kind: str) -> None:
    storage = opened(kind, tmp_path, durability="power")
    locators = storage.put([block(1), block(2)], tx)
    storage.close()
    path = sorted(p for p in tmp_path.rglob("*") if p.suffix in (".blk", ".seg"))[-1]
    whole = path.read_bytes()
    dice = random.Random(3)
    head = range(len(whole) - len(block(2)) - 20, len(whole) - len(block(2)))  # of the last record
    for at in [*head, *dice.sample(range(head.stop, len(whole)), 50)]:
        path.write_bytes(
            whole[:at] + bytes([whole[at] ^ (1 << dice.randrange(8))]) + whole[at + 1 :]
        )
        fresh = KINDS[kind](BufferSettings(folder=tmp_path))
        with pytest.raises(PayloadDamaged, match=path.name):
            fresh.get(locators[1:], tx)
    for size in (0, 3, 19, 20, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(PayloadDamaged, match=path.name):
            KINDS[kind](BufferSettings(folder=tmp_path)).get(locators[1:], tx)
    path.unlink()
    with pytest.raises(PayloadDamaged, match=f"{path.name} is missing"):
        KINDS[kind](BufferSettings(folder=tmp_path)).get(locators[1:], tx)


class _Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.marker,))


@pytest.mark.parametrize("kind", ["file", "queue"])
def test_a_foreign_file_with_our_name_is_refused_by_its_magic(
    tmp_path: Path, tx: Connection, kind: str
) -> None:
    storage = opened(kind, tmp_path / "b")
    locators = storage.put([block(1)], tx)
    storage.close()
    (path,) = [p for p in tmp_path.rglob("*") if p.suffix in (".blk", ".seg")]
    path.write_bytes(pickle.dumps(_Bomb(tmp_path / "marker")))
    with pytest.raises(
        PayloadDamaged, match=r"holds no rft record at byte 0: it begins with b'\\x80"
    ):
        KINDS[kind](BufferSettings(folder=tmp_path / "b")).get(locators, tx)
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("kind", ["file", "queue"])
def test_a_put_that_fails_leaves_nothing_behind(
    tmp_path: Path, tx: Connection, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = opened(kind, tmp_path)
    kept = storage.put([block(0)], tx)

    def size() -> int:
        return sum(
            p.stat().st_size for p in tmp_path.rglob("*") if p.suffix in (".blk", ".seg", ".tmp")
        )

    before = size()
    monkeypatch.setenv("RFT_FAULT", f"storage.put.torn:3=enospc,of.{kind}")
    with pytest.raises(OSError, match="No space left") as e:
        storage.put([block(n) for n in range(1, 6)], tx)
    assert (e.value.errno, size()) == (errno.ENOSPC, before)
    monkeypatch.delenv("RFT_FAULT")
    again = storage.put([block(n) for n in range(1, 6)], tx)
    storage.close()
    fresh = KINDS[kind](BufferSettings(folder=tmp_path))
    assert fresh.get([*kept, *again], tx) == [block(n) for n in range(6)]


def test_a_segment_goes_with_its_last_group(
    tmp_path: Path, tx: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queues, "SEGMENT_BYTES", 1)  # a segment for each put
    storage = opened("queue", tmp_path)
    locators = [x for n in (0, 2) for x in storage.put([block(n), block(n + 1)], tx)]
    refer(tx, locators[1])
    segments = tmp_path / "experience_buffer.segments"
    storage.drop(locators[:1], tx)
    assert (segments / "000001.seg").exists()
    assert storage.get(locators[1:2], tx) == [block(1)]
    tx.execute(groups.delete())
    storage.drop(locators[1:], tx)
    # the newest one is not deleted
    assert sorted(p.name for p in segments.glob("*.seg")) == ["000002.seg"]
    storage.close()


def test_memory_is_bounded_and_freed(
    tmp_path: Path, tx: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queues, "CACHE_BYTES", 10_000)
    cached = opened("queue", tmp_path)
    locators = cached.put([os.urandom(3000) for _ in range(20)], tx)
    assert isinstance(cached, queues.QueueStorage)
    assert cached.resident_bytes <= 10_000
    assert len(cached.get(locators, tx)) == 20
    cached.close()
    memory = opened("queue", tmp_path / "m", storage_path="none")
    assert isinstance(memory, queues.QueueStorage)
    locators = memory.put([os.urandom(3000) for _ in range(20)], tx)
    assert memory.resident_bytes == 60_000
    memory.drop(locators[:15], tx)
    assert memory.resident_bytes == 15_000
    with pytest.raises(PayloadDamaged, match="was in memory only"):
        memory.get(locators[:1], tx)
    assert not (tmp_path / "m").exists()
    memory.close()

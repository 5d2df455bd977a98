"""What the fault matrix found, one small test each."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from rft.buffer.audit import audit_run
from rft.buffer.buffer import Buffer
from rft.buffer.settings import BufferSettings
from rft.testing.storage_contract import fill, ids, take
from rft.trainer.checkpoint import manifest as manifests
from rft.types.ids import Version


async def opened(folder: Path, **settings: object) -> Buffer:
    buffer = Buffer(BufferSettings(folder=folder / "buffer", **settings))  # type: ignore[arg-type]
    await buffer.open()
    return buffer


async def test_a_lease_asked_for_twice_at_once_is_one_lease(tmp_path: Path) -> None:
    """The second call took other rows, and the first call's stayed leased for ever."""
    buffer = await opened(tmp_path)
    await buffer.start_lineage(None, None)
    asked = [asyncio.create_task(take(buffer, 1, 1)) for _ in range(3)]
    await asyncio.sleep(0)
    await fill(buffer, 1, 0)
    await fill(buffer, 1, 1)
    first, *others = [ids(await lease) for lease in asked]
    assert first == [(0, t, r) for t in range(2) for r in range(4)]
    assert others == [first, first]
    await asyncio.gather(*(buffer.reader(1).use(1) for _ in range(3)))
    assert ids(await take(buffer, 1, 2)) == [(1, t, r) for t in range(2) for r in range(4)]
    await asyncio.gather(*(buffer.reader(1).discard(2, "nonfinite") for _ in range(3)))
    audit = await buffer.audit()
    assert (audit.used, audit.discarded, audit.available, audit.ok) == (
        8,
        {"nonfinite": 8},
        0,
        True,
    )
    await buffer.close()


async def test_what_a_manifest_rests_on_is_synced_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `process` the uses were lost with the power, and the manifest, which is synced, was
    refused for ever.
    """
    synced: list[str] = []
    fsync = os.fsync
    monkeypatch.setattr(
        os,
        "fsync",
        lambda fd: (synced.append(Path(f"/proc/self/fd/{fd}").readlink().name), fsync(fd))[1],
    )
    buffer = await opened(tmp_path)
    await buffer.start_lineage(None, None)
    await fill(buffer, 1, 0)
    await take(buffer, 1, 1)
    await buffer.reader(1).use(1)
    synced.clear()
    await buffer.reader(1).consumption(1)
    assert {"experience_buffer.db", "experience_buffer.db-wal"} <= set(synced)
    await buffer.close()


@pytest.mark.parametrize("storage", ["file", "queue"])
async def test_payload_that_is_gone_is_explored_again(tmp_path: Path, storage: str) -> None:
    """`explain` left the rows out of one lease; the next start met them again, and a step without
    any other group never ended.
    """
    buffer = await opened(tmp_path, storage_type=storage)
    await buffer.start_lineage(None, None)
    await fill(buffer, 1, 0)
    await take(buffer, 1, 1)
    await buffer.reader(1).use(1)
    consumption = await buffer.reader(1).consumption(1)
    await fill(buffer, 1, 1)
    await buffer.close()
    for path in (tmp_path / "buffer").rglob("*"):
        if path.suffix in (".seg", ".blk"):
            path.write_bytes(b"")
    for lineage in (2, 3):  # given up once, for all lineages to come
        buffer = await opened(tmp_path, storage_type=storage, on_damaged_payload="explain")
        start = await buffer.start_lineage(Version(1, 1), consumption)
        assert (start.lineage, start.available, await buffer.writer(lineage).stored_groups(1)) == (
            lineage,
            0,
            [],
        )
        assert (await buffer.audit()).discarded["payload_damaged"] == 8 * (lineage - 1)
        await fill(buffer, lineage, 1, version=Version(1, 1))
        assert ids(await take(buffer, lineage, 2)) == [
            (1, t, r) for t in range(2) for r in range(4)
        ]
        audit = await buffer.audit()
        assert (audit.used, audit.leased, audit.ok) == (8, 8, True)
        await buffer.close()
        for path in (tmp_path / "buffer").rglob("*"):
            if path.suffix in (".seg", ".blk"):
                path.write_bytes(b"")


async def test_a_run_that_begins_with_the_weights_of_another_one(tmp_path: Path) -> None:
    """The checkpoint of another run is a parent without uses of its own here; resumed, the run has
    only what it was trained on.
    """
    buffer = await opened(tmp_path)
    start = await buffer.start_lineage(Version(3, 8), None)
    assert (start.lineage, start.cursor, start.available) == (4, 0, 0)
    await fill(buffer, 4, 0, version=Version(3, 8))
    await take(buffer, 4, 9)
    await buffer.reader(4).use(9)
    consumption = await buffer.reader(4).consumption(9)
    assert (consumption.num_uses, consumption.cursor) == (8, 1)
    await buffer.close()
    version = Version(4, 9)
    parent = Version(3, 8)
    folder = tmp_path / "checkpoints" / "global_step_9"
    folder.mkdir(parents=True)
    manifests.commit(folder, version=version, parent=parent, consumption=consumption)
    assert audit_run(tmp_path).ok
    buffer = await opened(tmp_path)
    assert (await buffer.start_lineage(version, consumption)).lineage == 5
    await buffer.close()
    audit = audit_run(tmp_path)
    assert (audit.ok, audit.used, audit.manifests) == (True, 8, 1)

"""What the buffer demands of its folder, its settings and its files."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from rft.buffer.audit import audit_run
from rft.buffer.buffer import Buffer
from rft.buffer.location import refuse_network
from rft.buffer.settings import BufferSettings
from rft.errors import BufferFailed, ConfigError, DiskFull, SetupError
from rft.testing.storage_contract import fill, group, ids, take
from rft.trainer.checkpoint import manifest as manifests
from rft.types.block import decode, encode
from rft.types.ids import Version
from rft.types.ports import Consumption


async def opened(folder: Path, **settings: Any) -> Buffer:
    buffer = Buffer(BufferSettings(folder=folder / "buffer", **settings))
    await buffer.open()
    return buffer


def test_network_file_systems_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_network(tmp_path)
    points = {
        "/": "ext4",
        str(tmp_path.resolve()): "nfs4",
        str(tmp_path.resolve() / "here"): "nfs4",
    }
    mounts = [SimpleNamespace(mountpoint=point, fstype=kind) for point, kind in points.items()]
    # over the one before
    mounts.append(SimpleNamespace(mountpoint=str(tmp_path.resolve() / "here"), fstype="ext4"))
    monkeypatch.setattr("psutil.disk_partitions", lambda all: mounts)
    with pytest.raises(SetupError, match=r"nfs4.*local disk"):
        refuse_network(tmp_path / "run")
    refuse_network(tmp_path / "here" / "run")
    refuse_network(tmp_path.parent)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "x'; DROP TABLE y"}, "is no name for a buffer"),
        ({"name": "../up"}, "is no name for a buffer"),
    ],
)
def test_settings_that_are_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Buffer(BufferSettings(folder=tmp_path, **settings))


async def test_one_owner(tmp_path: Path) -> None:
    first = await opened(tmp_path)
    with pytest.raises(BufferFailed, match="is open in process"):
        await opened(tmp_path)
    await first.close()
    await (await opened(tmp_path)).close()


async def test_a_buffer_keeps_its_storage(tmp_path: Path) -> None:
    await (await opened(tmp_path)).close()
    with pytest.raises(
        BufferFailed, match="was made with storage_type 'sql', this run has 'queue'"
    ):
        await opened(tmp_path, storage_type="queue")


async def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    await (await opened(tmp_path)).close()
    with sqlite3.connect(tmp_path / "buffer/experience_buffer.db") as raw:
        raw.execute("UPDATE meta SET value = '99' WHERE key = 'format'")
    raw.close()
    with pytest.raises(BufferFailed, match="was made with format '99'"):
        await opened(tmp_path)
    with pytest.raises(BufferFailed, match="has format 99"):
        audit_run(tmp_path)


async def test_memory_only_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        buffer = await opened(tmp_path, storage_type="queue", storage_path="none")
    assert "not durable" in caplog.text
    await buffer.close()


async def test_a_foreign_checkpoint_is_refused(tmp_path: Path) -> None:
    buffer = await opened(tmp_path)
    with pytest.raises(BufferFailed, match=r"made after 8 uses .* knows 0"):
        await buffer.start_lineage(
            Version(1, 1), Consumption(num_uses=8, digest="0" * 32, cursor=1)
        )
    # only its weights: a lineage above all known ones
    assert (await buffer.start_lineage(Version(4, 9), None)).lineage == 5
    await buffer.close()


async def test_an_older_checkpoint_and_an_abandoned_branch(tmp_path: Path) -> None:
    """1:1 and 1:2 are manifests; resume from 1:1, train; resume from 1:2: each branch counts its
    own uses only.
    """
    buffer = await opened(tmp_path)
    await buffer.start_lineage(None, None)
    said = {}
    for step in (1, 2):
        await fill(buffer, 1, step - 1, version=Version(1, step - 1))
        await take(buffer, 1, step)
        await buffer.reader(1).use(step)
        said[step] = await buffer.reader(1).consumption(step)
    second = await buffer.start_lineage(Version(1, 1), said[1])
    # batch 1 is of weights 1:1: kept, and free again
    assert (second.available, second.orphaned, second.cursor) == (8, 0, 1)
    await fill(buffer, 2, 1)
    assert ids(await take(buffer, 2, 2)) == [(1, t, r) for t in range(2) for r in range(4)]
    await buffer.reader(2).use(2)
    third = await buffer.start_lineage(Version(1, 2), said[2])
    audit = await buffer.audit()
    assert (third.lineage, third.available, audit.num_uses, audit.used_twice, audit.ok) == (
        3,
        0,
        16,
        0,
        True,
    )
    await buffer.close()


async def test_keep_leaves_abandoned_rows_in_play(tmp_path: Path) -> None:
    buffer = await opened(tmp_path, resume_rows="keep")
    await buffer.start_lineage(None, None)
    await fill(buffer, 1, 0)
    start = await buffer.start_lineage(None, None)
    assert (start.orphaned, start.available, len(await buffer.writer(2).stored_groups(0))) == (
        0,
        8,
        2,
    )
    await buffer.close()


async def test_a_damaged_segment_is_named(tmp_path: Path) -> None:
    buffer = await opened(tmp_path, storage_type="queue")
    await buffer.start_lineage(None, None)
    await fill(buffer, 1, 0)
    await take(buffer, 1, 1)
    await buffer.reader(1).use(1)
    consumption = await buffer.reader(1).consumption(1)
    await fill(buffer, 1, 1)
    await buffer.close()
    folder = tmp_path / "checkpoints/global_step_1"
    folder.mkdir(parents=True)
    # of the format of today
    manifests.commit(folder, version=Version(1, 1), parent=None, consumption=consumption)
    assert audit_run(tmp_path).ok
    (segment,) = (tmp_path / "buffer/experience_buffer.segments").glob("*.seg")
    whole = bytearray(segment.read_bytes())
    whole[-20] ^= 1
    segment.write_bytes(whole)
    (problem,) = audit_run(tmp_path).problems
    assert f"{segment} is damaged at byte" in problem
    buffer = await opened(tmp_path, storage_type="queue")
    await buffer.start_lineage(Version(1, 1), consumption)
    await fill(buffer, 2, 1)
    with pytest.raises(BufferFailed, match="is damaged at byte"):
        await take(buffer, 2, 2)
    assert (await buffer.audit()).leased == 0  # given back
    await buffer.close()


async def test_a_full_disk_is_loud_and_passes(tmp_path: Path) -> None:
    """SQLite's own page limit stands for the full disk; the append fails whole, and works again
    once there is space.
    """
    buffer = await opened(tmp_path, full_disk_wait_s=0.0)
    await buffer.start_lineage(None, None)
    connection = buffer._ledger.database.connection
    pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
    connection.exec_driver_sql(f"PRAGMA max_page_count = {pages + 1}")
    connection.rollback()
    frame = encode(group(1, 0, 0, tokens=20000))
    with pytest.raises(DiskFull, match="full"):
        await buffer.writer(1).append(frame, accepted=True)
    assert (await buffer.audit()).acked == 0
    connection.exec_driver_sql("PRAGMA max_page_count = 1000000")
    connection.rollback()
    assert (await buffer.writer(1).append(frame, accepted=True)).appended == 4
    assert (await buffer.audit()).ok
    await buffer.close()


async def test_reward_edits_hold_for_row_and_statistics(tmp_path: Path) -> None:
    buffer = await opened(tmp_path)
    await buffer.start_lineage(None, None)
    await fill(buffer, 1, 0, groups=1)
    with sqlite3.connect(tmp_path / "buffer/experience_buffer.db") as raw:
        raw.execute("UPDATE experiences SET reward = 0.25 WHERE run = 0")
    raw.close()
    lease = await take(buffer, 1, 1, 1)
    assert lease.groups[0].rewards == (0.25, 1.0, 0.0, 1.0)
    assert (lease.groups[0].runs, lease.groups[0].steps) == ((0, 1, 2, 3), (0, 0, 0, 0))
    assert lease.groups[0].lengths == tuple(r.num_response_tokens for r in decode(lease.frame))
    assert decode(lease.frame)[0].reward == 0.25
    await buffer.close()


async def test_statistics_hold_the_parts_of_every_reward(tmp_path: Path) -> None:
    buffer = await opened(tmp_path)
    await buffer.start_lineage(None, None)
    parts = [{"format": run / 4, "exact": 1.0} if run else {} for run in range(4)]
    rows = [
        msgspec.structs.replace(row, reward_parts=part)
        for row, part in zip(group(1, 0, 0), parts, strict=True)
    ]
    writer = buffer.writer(1)
    await writer.append(encode(rows), accepted=True)
    await writer.close_batch(0, accepted=1, expected=1, reasons={})
    lease = await take(buffer, 1, 1, 1)
    assert list(lease.groups[0].parts) == parts
    assert [row.reward_parts for row in decode(lease.frame)] == parts
    await buffer.close()


async def test_concurrent_appends_are_all_stored(tmp_path: Path) -> None:
    buffer = await opened(tmp_path, durability="power")
    await buffer.start_lineage(None, None)
    writer = buffer.writer(1)
    await asyncio.gather(
        *(writer.append(encode(group(1, 0, task)), accepted=True) for task in range(200))
    )
    await writer.close_batch(0, accepted=200, expected=200, reasons={})
    lease = await take(buffer, 1, 1, 200)
    assert ids(lease) == [(0, t, r) for t in range(200) for r in range(4)]
    await buffer.close()


def test_the_room_is_light() -> None:
    heavy = ("torch", "ray", "vllm", "transformers")
    code = (
        f"import sys, rft.buffer.buffer, rft.buffer.audit; print([m for m in {heavy} if m in "
        f"sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[3],
        timeout=60,
    )
    assert done.stdout.strip() == "[]", done.stderr


CLIENT = """
import sqlite3, sys
c = sqlite3.connect(sys.argv[1])
print(c.execute("SELECT count(*) FROM experiences").fetchone()[0])
c.close()
"""


async def test_a_persons_client_takes_nothing_away_after_a_checkpoint(tmp_path: Path) -> None:
    """The last client of a SQLite file removes its log; the owner's locks say that it is not the
    last.
    """

    def count() -> int:
        done = subprocess.run(
            [sys.executable, "-c", CLIENT, str(path)],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        return int(done.stdout)

    buffer = await opened(tmp_path)
    (path,) = (tmp_path / "buffer").glob("*.db")
    start = await buffer.start_lineage(None, None)
    await fill(buffer, start.lineage, 0)
    await take(buffer, start.lineage, 1)
    await buffer.reader(start.lineage).use(1)
    await buffer.reader(start.lineage).consumption(1)  # syncs the file, as each checkpoint does
    assert count() == 8
    await fill(buffer, start.lineage, 1)
    assert count() == 16
    await buffer.close()
    assert count() == 16

"""Rows of another source in each train batch: exact counts, the same rows after a resume, every use
written down.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from rft.buffer.audit import audit_run
from rft.buffer.buffer import Buffer
from rft.buffer.mixing import Mix, demonstrations
from rft.buffer.query import open_run
from rft.buffer.settings import BufferSettings, MixSettings
from rft.errors import BufferFailed, ConfigError
from rft.testing.storage_contract import fill, group
from rft.types.block import decode, encode
from rft.types.experience import Demonstration, Experience
from rft.types.ids import ExperienceId, Version
from rft.types.images import Image, ImagePlace
from rft.types.ports import Consumption


def shown(count: int, *, first: int = 0) -> list[Experience]:
    rows = [
        Demonstration(
            id=ExperienceId(0, 0, 0, i, 0),
            tokens=np.asarray([1, 2, 100 + first + i], np.int32),
            loss_mask=np.asarray([False, False, True]),
        )
        for i in range(count)
    ]
    return demonstrations(rows, taskset="expert")


async def opened(folder: Path, mix: Mix) -> Buffer:
    buffer = Buffer(BufferSettings(folder=folder / "buffer"), mix=mix)
    await buffer.open()
    return buffer


async def step(
    buffer: Buffer, lineage: int, number: int, *, rows: int = 4
) -> tuple[list[Experience], list[int]]:
    """Trains on one lease: (the policy's rows, which rows of the source)."""
    reader = buffer.reader(lineage)
    lease = await reader.lease(number, groups=None, rows=rows, deadline_s=5, max_staleness=None)
    again = await reader.lease(number, groups=None, rows=rows, deadline_s=5, max_staleness=None)
    assert again.frame == lease.frame
    await reader.use(number)
    found = decode(lease.frame)
    mine = [x for x in found if not x.is_expert]
    assert {str(x.group) for x in mine} == {g.group for g in lease.groups}
    return mine, [int(x.tokens[2]) - 100 for x in found if x.is_expert]


async def test_the_files_of_its_images_come_with_a_lease(tmp_path: Path) -> None:
    files = [f"image {i}".encode() for i in range(5)]
    rows = [
        msgspec.structs.replace(x, images=(ImagePlace(Image.of(file).sha256, 0, 1),))
        for x, file in zip(shown(5), files, strict=True)
    ]
    mix = Mix(
        MixSettings(name="sft_dataset", rows=3),
        rows,
        lambda indices: {Image.of(files[i]).sha256: files[i] for i in indices},
    )
    buffer = await opened(tmp_path, mix)
    await buffer.start_lineage(None, None)
    await fill(buffer, 1, 0, groups=1, version=Version(1, 0))
    lease = await buffer.reader(1).lease(1, groups=None, rows=4, deadline_s=5, max_staleness=None)
    assert sorted(lease.images.values()) == files[:3]
    assert [len(x.images) for x in decode(lease.frame)] == [0] * 4 + [1] * 3
    await buffer.close()


async def test_every_batch_has_its_rows_and_a_resume_takes_the_same(tmp_path: Path) -> None:
    mix = Mix(MixSettings(name="sft_dataset", rows=3), shown(5))
    buffer = await opened(tmp_path, mix)
    await buffer.start_lineage(None, None)
    taken: dict[int, list[int]] = {}
    consumption: Consumption | None = None
    for number in range(1, 5):
        await fill(buffer, 1, number - 1, groups=1, version=Version(1, number - 1))
        mine, taken[number] = await step(buffer, 1, number)
        assert len(mine) == 4
        if number == 2:
            consumption = await buffer.reader(1).consumption(2)
    assert taken == {1: [0, 1, 2], 2: [3, 4, 0], 3: [1, 2, 3], 4: [4, 0, 1]}
    assert consumption is not None
    assert consumption.mixed == {"sft_dataset": 6}
    assert (await buffer.reader(1).consumption(4)).mixed == {"sft_dataset": 12}
    await buffer.close()
    buffer = await opened(tmp_path, Mix(MixSettings(name="sft_dataset", rows=3), shown(5)))
    await buffer.start_lineage(Version(1, 2), consumption)
    held = await buffer.writer(2).stored_groups(2)
    assert [h.batch for h in held] == [2]
    await fill(buffer, 2, 2, groups=1, version=Version(2, 2))
    assert (await step(buffer, 2, 3))[1] == taken[3]
    after = await buffer.reader(2).consumption(3)
    # the uses of the abandoned steps 3 and 4 count no more
    assert after.mixed == {"sft_dataset": 9}
    audit = await buffer.audit()
    assert (audit.num_uses, audit.ok) == (12, True)  # the policy's own rows
    await buffer.close()
    folder = tmp_path / "checkpoints" / "global_step_2"
    folder.mkdir(parents=True)
    manifest = {
        "format": 5,
        "version": Version(1, 2),
        "parent": None,
        "consumption": consumption,
        "files": {},
    }
    (folder / "manifest.json").write_bytes(msgspec.json.encode(manifest))
    assert audit_run(tmp_path).ok
    manifest["consumption"] = msgspec.structs.replace(consumption, mixed={})
    (folder / "manifest.json").write_bytes(msgspec.json.encode(manifest))
    assert (
        "made after {} uses of mixed-in rows, the ledger counts {'sft_dataset': 6}"
        in audit_run(tmp_path).problems[0]
    )


async def test_a_skipped_step_uses_none(tmp_path: Path) -> None:
    buffer = await opened(tmp_path, Mix(MixSettings(name="sft_dataset", rows=2), shown(4)))
    await buffer.start_lineage(None, None)
    await fill(buffer, 1, 0, groups=2)
    reader = buffer.reader(1)
    await reader.lease(1, groups=1, rows=None, deadline_s=5, max_staleness=None)
    await reader.discard(1, "nonfinite")
    assert (await step(buffer, 1, 2))[1] == [2, 3]
    assert (await reader.consumption(2)).mixed == {"sft_dataset": 2}
    await buffer.close()


def test_shuffled_passes() -> None:
    mix = Mix(MixSettings(name="x", rows=3, shuffle=True, seed=4), shown(10))
    passes = [[i for s in range(first, first + 3) for i in mix.indices(s)] for first in (1, 4, 7)]
    assert all(len(set(p)) == 9 for p in passes)
    assert len({tuple(p) for p in passes}) == 3
    assert (
        mix.indices(2)
        == Mix(MixSettings(name="x", rows=3, shuffle=True, seed=4), shown(10)).indices(2)
        == passes[0][3:6]
    )
    assert mix.indices(1) != Mix(
        MixSettings(name="x", rows=3, shuffle=True, seed=5), shown(10)
    ).indices(1)


async def test_other_rows_than_before_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"auxiliary_buffers\.sft_dataset: has 2 rows, and each train batch takes 3",
    ):
        Mix(MixSettings(name="sft_dataset", rows=3), shown(2))
    buffer = await opened(tmp_path, Mix(MixSettings(name="sft_dataset", rows=1), shown(3)))
    await buffer.start_lineage(None, None)
    await fill(buffer, 1, 0, groups=1)
    await step(buffer, 1, 1)
    consumption = await buffer.reader(1).consumption(1)
    await buffer.close()
    buffer = await opened(tmp_path, Mix(MixSettings(name="sft_dataset", rows=1), shown(3, first=1)))
    with pytest.raises(
        ConfigError, match="its rows are not those that the checkpoint was trained on"
    ):
        await buffer.start_lineage(Version(1, 1), consumption)
    with pytest.raises(
        BufferFailed,
        match=r"made after no uses of mixed-in rows, but the buffer .* knows \{'sft_dataset': 1\}",
    ):
        await buffer.start_lineage(
            Version(1, 1), Consumption(num_uses=4, digest=consumption.digest, cursor=1)
        )
    await buffer.close()


async def test_rows_that_another_run_stored(tmp_path: Path) -> None:
    other = Buffer(BufferSettings(folder=tmp_path / "other" / "buffer"))
    await other.open()
    await other.start_lineage(None, None)
    await fill(other, 1, 0)
    await other.writer(1).append(encode(group(1, 1, 0)), accepted=False, reason="zero_std")
    await other.close()
    with open_run(tmp_path / "other") as questions:
        stored = [row["id"] for row in questions.page("state = 'available'", "", 100)]
        found = questions.payload(stored)
    source = [found[x] for x in stored]
    assert len(source) == 8  # those that were not dropped
    buffer = await opened(tmp_path, Mix(MixSettings(name="old_run", rows=5), source))
    await buffer.start_lineage(None, None)
    await fill(buffer, 1, 0, groups=1)
    lease = await buffer.reader(1).lease(1, groups=1, rows=None, deadline_s=5, max_staleness=None)
    rows = decode(lease.frame)
    assert [str(x.id)[:4] for x in rows] == ["0001"] * 4 + ["0000"] * 5
    assert [x.reward for x in rows[4:]] == [0.0, 1.0, 0.0, 1.0, 0.0]
    assert len({x.id for x in rows}) == 9
    await buffer.reader(1).use(1)
    await buffer.close()
    with (
        open_run(tmp_path) as questions,
        questions.ask("SELECT count(*), min(step) FROM mixed_uses") as answer,
    ):
        assert list(answer.rows) == [(5, 1)]


def test_a_demonstration_has_neither_reward_nor_version() -> None:
    (row,) = shown(1)
    assert (row.is_expert, row.has_logprobs, row.reward, row.oldest_version) == (
        True,
        False,
        None,
        None,
    )

"""The tests that every payload storage must pass, together with the real buffer and ledger.  Ships
to users.

    class TestDuck(StorageContract):
        def settings(self, folder):
            return BufferSettings(folder=folder, storage_type="duck")

Needs pytest with asyncio_mode=auto.  Depends on storages only through `Buffer`, and tests nothing
that only the ledger decides; expectations after a restart depend on `durable`.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rft.buffer.buffer import Buffer
from rft.buffer.settings import BufferSettings
from rft.types.block import decode, encode
from rft.types.completion import VersionSpan
from rft.types.experience import Experience
from rft.types.ids import ExperienceId, GroupId, Version
from rft.types.ports import EndOfData, Lease


def row(
    id: ExperienceId,
    *,
    reward: float | None = 1.0,
    tokens: int = 12,
    version: Version | None = None,
    trained: bool = True,
) -> Experience:
    """Return a small valid experience whose tokens are derived from its id."""
    half = tokens // 2
    mask = np.zeros(tokens, np.bool_)
    mask[half:] = trained
    values = (
        np.random.default_rng([id.batch, id.task, id.run])
        .integers(0, 1000, tokens)
        .astype(np.int32)
    )
    return Experience(
        id=id,
        taskset="toy",
        task_index=id.task,
        workflow="toy",
        status="complete",
        finish_reason="stop",
        tokens=values,
        loss_mask=mask,
        logprobs=np.where(mask, np.float32(-0.5), np.float32(0)),
        version_spans=(VersionSpan(version or Version(id.lineage, 0), half, tokens),),
        reward=reward,
        reward_parts={} if reward is None else {"exact": reward},
        prompt_text="a",
        response_text="b",
    )


def group(
    lineage: int,
    batch: int,
    task: int,
    *,
    runs: int = 4,
    version: Version | None = None,
    explorer: int = 0,
    tokens: int = 12,
) -> list[Experience]:
    """Return a group with rewards 0, 1, 0, 1 ..."""
    name = GroupId(lineage, explorer, batch, task)
    return [
        row(name.run(i), reward=float(i % 2), version=version, tokens=tokens) for i in range(runs)
    ]


async def fill(
    buffer: Buffer,
    lineage: int,
    batch: int,
    *,
    groups: int = 2,
    version: Version | None = None,
    close: bool = True,
    explorer: int = 0,
) -> None:
    """Append the groups of a batch that are not stored yet, and close the batch."""
    writer = buffer.writer(lineage, explorer)
    stored = {(h.batch, h.task) for h in await writer.stored_groups(batch)}
    for task in range(groups):
        if (batch, task) not in stored:
            await writer.append(
                encode(group(lineage, batch, task, version=version, explorer=explorer)),
                accepted=True,
            )
    if close:
        await writer.close_batch(batch, accepted=groups, expected=groups, reasons={})


async def take(
    buffer: Buffer, lineage: int, step: int, groups: int = 2, deadline_s: float = 5.0
) -> Lease:
    return await buffer.reader(lineage).lease(
        step, groups=groups, rows=None, deadline_s=deadline_s, max_staleness=None
    )


def ids(lease: Lease) -> list[tuple[int, int, int]]:
    """Return (batch, task, run) of the leased rows."""
    return [(x.id.batch, x.id.task, x.id.run) for x in decode(lease.frame)]


class StorageContract:
    """Subclass it, define `settings`, and set `durable` to whether the storage survives a restart."""

    durable = True

    def settings(self, folder: Path) -> BufferSettings:
        raise NotImplementedError

    @cached_property
    def _buffers(self) -> list[Buffer]:
        return []

    async def close(self) -> None:
        for buffer in self._buffers:
            await buffer.close()

    @pytest.fixture(autouse=True)
    async def _closed(self) -> AsyncIterator[None]:
        yield
        await self.close()

    async def opened(self, folder: Path, **changed: Any) -> Buffer:
        """Open a buffer with changed settings; it is closed after the test."""
        buffer = Buffer(dataclasses.replace(self.settings(folder / "buffer"), **changed))
        self._buffers.append(buffer)
        await buffer.open()
        return buffer

    async def started(self, folder: Path, **changed: Any) -> Buffer:
        """Open a buffer and start lineage 1."""
        buffer = await self.opened(folder, **changed)
        await buffer.start_lineage(None, None)
        return buffer

    async def test_four_explorers_at_once(self, tmp_path: Path) -> None:
        buffer = await self.started(tmp_path, num_explorers=4)

        async def explore(number: int) -> None:
            writer = buffer.writer(1, number)
            for batch in range(3):
                frames = [encode(group(1, batch, task, explorer=number)) for task in range(2)]
                await asyncio.gather(*(writer.append(f, accepted=True) for f in frames))
                await writer.close_batch(batch, accepted=2, expected=2, reasons={})
            await writer.finish("done")

        await asyncio.gather(*(explore(n) for n in range(4)))
        order = []
        for step in range(1, 13):
            lease = await take(buffer, 1, step)
            order += [(x.id.batch, x.id.explorer, x.id.task) for x in decode(lease.frame)][::4]
            await buffer.reader(1).use(step)
        assert order == [(b, e, t) for b in range(3) for e in range(4) for t in range(2)]
        with pytest.raises(EndOfData):
            await take(buffer, 1, 13)
        assert (await buffer.audit()).ok

    async def test_what_comes_out_is_what_went_in(self, tmp_path: Path) -> None:
        buffer = await self.opened(tmp_path)
        start = await buffer.start_lineage(None, None)
        rows = group(start.lineage, 0, 0)
        result = await buffer.writer(1).append(encode(rows), accepted=True)
        await buffer.writer(1).close_batch(0, accepted=1, expected=1, reasons={})
        lease = await take(buffer, 1, 1, groups=1)
        assert (start.lineage, result.appended, result.duplicates) == (1, 4, 0)
        assert encode(decode(lease.frame)) == encode(rows)
        assert lease.groups[0].rewards == (0.0, 1.0, 0.0, 1.0)
        assert lease.groups[0].mean == 0.5
        assert lease.groups[0].std == pytest.approx((1 / 3) ** 0.5)

    async def test_each_row_is_leased_once_and_the_audit_balances(self, tmp_path: Path) -> None:
        buffer = await self.started(tmp_path)
        for batch in range(3):
            await fill(buffer, 1, batch)
        taken = []
        for step in (1, 2):
            taken += ids(await take(buffer, 1, step))
            assert (await buffer.audit()).leased == 8
            await buffer.reader(1).use(step)
            await buffer.reader(1).use(step)  # repeated after a lost reply: a no-op
        await take(buffer, 1, 3)
        await buffer.reader(1).discard(3, "nonfinite")
        audit = await buffer.audit()
        assert taken == [(b, t, r) for b in range(2) for t in range(2) for r in range(4)]
        assert (audit.used, audit.discarded, audit.available, audit.used_twice, audit.ok) == (
            16,
            {"nonfinite": 8},
            0,
            0,
            True,
        )

    async def test_resume_goes_on_where_the_manifest_was(self, tmp_path: Path) -> None:
        """Steps 1 to 3 are trained, the manifest is of step 2: step 3 no longer counts, and rows of
        its weights are orphaned.
        """
        buffer = await self.started(tmp_path)
        for batch in range(4):  # batch b is generated by the weights of step b
            await fill(buffer, 1, batch, version=Version(1, batch))
            if batch < 3:
                await take(buffer, 1, batch + 1)
                await buffer.reader(1).use(batch + 1)
                if batch == 1:
                    consumption = await buffer.reader(1).consumption(2)
        assert (consumption.num_uses, consumption.cursor) == (16, 2)
        await buffer.close()

        buffer = await self.opened(tmp_path)
        start = await buffer.start_lineage(Version(1, 2), consumption)
        stored = await buffer.writer(2).stored_groups(start.cursor)
        audit = await buffer.audit()
        count = 8 if self.durable else 0  # batch 2, of weights 1:2
        assert (start.lineage, start.orphaned, start.available, start.cursor) == (2, 8, count, 2)
        assert [(h.batch, h.task) for h in stored] == ([(2, 0), (2, 1)] if self.durable else [])
        assert (audit.used, audit.num_uses, audit.discarded.get("orphaned"), audit.ok) == (
            16,
            16,
            8,
            True,
        )
        assert audit.discarded.get("not_durable", 0) == 8 - count
        await fill(buffer, 2, 2, version=Version(2, 2))
        await fill(buffer, 2, 3, version=Version(2, 2))
        taken = []
        for step in (3, 4):
            taken += ids(await take(buffer, 2, step))
            await buffer.reader(2).use(step)
        assert taken == [(b, t, r) for b in (2, 3) for t in range(2) for r in range(4)]
        after = await buffer.reader(2).consumption(4)
        assert (after.num_uses, after.cursor, (await buffer.audit()).ok) == (32, 4, True)

    async def test_rows_are_used_as_often_as_allowed(self, tmp_path: Path) -> None:
        buffer = await self.started(tmp_path, max_uses=2)
        await fill(buffer, 1, 0)
        for step in (1, 2):
            assert ids(await take(buffer, 1, step)) == [
                (0, t, r) for t in range(2) for r in range(4)
            ]
            await buffer.reader(1).use(step)
        await buffer.writer(1).finish("done")
        with pytest.raises(EndOfData):
            await take(buffer, 1, 3)
        audit = await buffer.audit()
        assert (audit.used, audit.num_uses, audit.used_twice, audit.ok) == (8, 16, 0, True)

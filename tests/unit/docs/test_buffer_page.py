"""docs/howto/buffer.md: a reward that is changed before the lease is what is trained, for the row
and for its group.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from rft.buffer.buffer import Buffer
from rft.buffer.settings import BufferSettings
from rft.testing.storage_contract import fill, take
from rft.types.block import decode


async def test_a_changed_reward_is_what_the_trainer_gets(tmp_path: Path) -> None:
    buffer = Buffer(BufferSettings(folder=tmp_path))
    await buffer.open()
    await buffer.start_lineage(None, None)
    await fill(buffer, 1, 0, groups=1)
    # another connection, while the buffer is open
    with sqlite3.connect(tmp_path / "experience_buffer.db") as db:
        db.execute("UPDATE experiences SET reward = 4 WHERE state = 'available' AND run = 0")
    db.close()
    lease = await take(buffer, 1, 1, groups=1)
    assert [row.reward for row in decode(lease.frame)] == [4.0, 1.0, 0.0, 1.0]
    assert lease.groups[0].rewards == (4.0, 1.0, 0.0, 1.0) and lease.groups[
        0
    ].mean == pytest.approx(1.5)
    await buffer.reader(1).use(1)
    assert (await buffer.audit()).ok
    await buffer.close()

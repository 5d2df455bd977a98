"""A ledger of another format is refused, with what to do, and stays as it is."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from rft.buffer.audit import audit_run
from rft.buffer.buffer import Buffer
from rft.buffer.schema import FORMAT
from rft.buffer.settings import BufferSettings
from rft.errors import BufferFailed


@pytest.mark.parametrize("written", [str(FORMAT - 1), str(FORMAT + 1), "x", ""])
async def test_another_format_is_refused_with_what_to_do(tmp_path: Path, written: str) -> None:
    buffer = Buffer(BufferSettings(folder=tmp_path / "buffer", run="a/run"))
    await buffer.open()
    await buffer.close()
    path = tmp_path / "buffer/experience_buffer.db"
    with closing(sqlite3.connect(path)) as raw:
        raw.execute("UPDATE meta SET value = ? WHERE key = 'format'", (written,))
        raw.commit()
        before = list(raw.iterdump())
    with pytest.raises(
        BufferFailed,
        match=f"made with format '{written}', this rft knows format {FORMAT}. Use the rft",
    ):
        await Buffer(BufferSettings(folder=tmp_path / "buffer", run="a/run")).open()
    with closing(sqlite3.connect(path)) as raw:
        assert list(raw.iterdump()) == before
    with pytest.raises(BufferFailed, match=f"has format {written}"):
        audit_run(tmp_path)

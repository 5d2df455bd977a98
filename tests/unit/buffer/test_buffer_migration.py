"""A ledger of an older format becomes one of the present format, whole or not at all; each `format*.sql` was written by the last rft that
made it."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from itertools import cycle
from pathlib import Path

import msgspec
import pytest

from rft.buffer.audit import audit_run
from rft.buffer.buffer import Buffer
from rft.buffer.schema import FORMAT, experiences
from rft.buffer.settings import BufferSettings
from rft.errors import BufferFailed
from rft.testing.storage_contract import fill, ids, take
from rft.types.block import decode
from rft.types.ids import Version
from rft.types.ports import Consumption
from tests.helpers.ledger_contract import ask

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
STATED = Consumption(num_uses=4, digest="2b27f298c3a44ebf78e5bfe235ea954b", cursor=1)  # what its trainer was told after step 1


def old(folder: Path, number: int = 1) -> Path:
    """A ledger of that format: two batches of two groups of two, the first batch trained."""
    path = folder / "buffer/experience_buffer.db"
    path.parent.mkdir(parents=True)
    with closing(sqlite3.connect(path)) as raw:
        raw.executescript((HERE / f"format{number}.sql").read_text())
        raw.execute("PRAGMA journal_mode = WAL")
    return path


def rows(path: Path, sql: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(path)) as raw:
        return raw.execute(sql).fetchall()


def contents(path: Path) -> dict[str, object]:
    """Everything an old ledger holds, and its tables."""
    tables = "SELECT type, name, sql FROM sqlite_master ORDER BY name"
    kept = "SELECT id, reward, content_hash, state, created FROM experiences ORDER BY id"
    return {
        "schema": rows(path, tables),
        "rows": rows(path, kept),
        "payloads": rows(path, "SELECT id, block FROM payloads ORDER BY id"),
    }


async def opened(folder: Path) -> Buffer:
    buffer = Buffer(BufferSettings(folder=folder / "buffer", run="old/run/name"))
    await buffer.open()
    return buffer


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5])
async def test_an_old_ledger_goes_on(tmp_path: Path, number: int) -> None:
    path = old(tmp_path, number)
    before = contents(path)
    manifest = tmp_path / "checkpoints/global_step_1/manifest.json"
    manifest.parent.mkdir(parents=True)
    manifest.write_bytes(msgspec.json.encode({"format": 1, "version": Version(1, 1), "parent": None, "consumption": STATED}))
    audit = audit_run(tmp_path)
    assert audit.ok and audit.manifests == 1
    buffer = await opened(tmp_path)
    assert rows(path, "SELECT value FROM meta WHERE key = 'format'") == [(str(FORMAT),)]
    assert contents(path)["rows"] == before["rows"]
    columns = {name for _, name, *_ in rows(path, "PRAGMA table_info(experiences)")}
    assert columns == {c.name for c in experiences.columns}
    start = await buffer.start_lineage(Version(1, 1), STATED)
    assert (start.lineage, start.available, start.cursor) == (2, 4, 1)
    settings = BufferSettings(folder=tmp_path / "buffer", run="old/run/name")
    typed = "SELECT DISTINCT run_name, num_turns, top_p, has_logprobs FROM v_experiences"
    assert ask(settings, typed) == [("old/run/name", 0, None, 1)]
    assert ask(settings, "SELECT prompt_text, response_text, count(*) FROM v_experiences GROUP BY 1, 2") == [("a", "b", 8)]
    assert ask(settings, "SELECT count(*) FROM texts t JOIN experiences e ON e.id = t.experience") == [(8,)]
    assert ask(settings, "SELECT version_lineage, version_step, sum(num_tokens) FROM v_tokens GROUP BY 1, 2") == [(1, 0, 48)]
    assert ask(settings, "SELECT DISTINCT trainer_logprob, advantage FROM v_tokens") == [(None, None)]
    assert ask(
        settings, "SELECT train_step, checkpoint_step, counts, count(*) FROM v_lineage WHERE counts = 1 GROUP BY 1, 2, 3"
    ) == [(1, 1, 1, 4)]
    assert ask(settings, "SELECT min(num_bytes) > 500 FROM groups") == [(1,)]
    ask(settings, "UPDATE experiences SET reward = 0.5 WHERE batch = 1 AND task = 0 AND run = 0")
    with pytest.raises(Exception, match="is leased or was trained"):
        ask(settings, "UPDATE experiences SET reward = 0.5 WHERE batch = 0 AND task = 0 AND run = 0")
    writer = buffer.writer(2)
    await writer.close_batch(1, accepted=2, wanted=2, reasons={})
    lease = await take(buffer, 2, 2)
    assert ids(lease) == [(1, t, r) for t in range(2) for r in range(2)]
    assert [x.reward for x in decode(lease.frame)] == [0.5, 1.0, 0.0, 1.0]
    await buffer.reader(2).use(2)
    await fill(buffer, 2, 2)
    audit = await buffer.audit()
    assert (audit.acked, audit.used, audit.available, audit.ok) == (16, 8, 8, True)
    await buffer.close()
    assert audit_run(tmp_path).ok


async def test_lost_payload_leaves_the_new_columns_unknown(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = old(tmp_path)
    with closing(sqlite3.connect(path)) as raw:
        raw.execute("UPDATE payloads SET block = x'00' WHERE id = 1")
        raw.commit()
    await (await opened(tmp_path)).close()
    assert "the payload of 1 groups cannot be read" in caplog.text
    assert rows(path, "SELECT count(*), count(version_spans), count(num_turns) FROM experiences") == [(8, 6, 6)]


MIGRATE = """
import asyncio, os, signal, sys
from pathlib import Path
from sqlalchemy import event
from sqlalchemy.engine import Engine
from rft.buffer.buffer import Buffer
from rft.buffer.settings import BufferSettings
async def main(folder, nth):
    seen = 0
    def count(*_):
        nonlocal seen
        seen += 1
        if seen == nth:
            os.kill(os.getpid(), signal.SIGKILL)
    event.listen(Engine, "before_cursor_execute", count)
    event.listen(Engine, "commit", count)
    buffer = Buffer(BufferSettings(folder=Path(folder) / "buffer", run="old/run/name"))
    await buffer.open()
    await buffer.close()
    return seen
for line in sys.argv[1:]:
    folder, nth = line.rsplit(":", 1)
    child = os.fork()
    if not child:
        seen = asyncio.run(main(folder, int(nth)))
        os._exit(seen)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def migrate(*folders: Path, dies: Sequence[int] = (0,)) -> list[int]:
    """Each in a process that ends at that event, by -9, or else with their number."""
    orders = [f"{folder}:{nth}" for folder, nth in zip(folders, cycle(dies), strict=False)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", MIGRATE, *orders], capture_output=True, text=True, check=True, env=environment, timeout=600
    )
    return [int(line) for line in done.stdout.split()]


@pytest.mark.e2e
def test_a_death_at_any_event_leaves_the_old_ledger(tmp_path: Path) -> None:
    """Before a statement, or before a commit, which is the last event."""
    old(tmp_path)
    before = contents(tmp_path / "buffer/experience_buffer.db")
    (whole,) = migrate(tmp_path)
    folders = [tmp_path / str(nth) for nth in range(1, whole + 1)]
    paths = [old(folder) for folder in folders]
    assert migrate(*folders, dies=range(1, whole + 1)) == [-signal.SIGKILL] * whole
    for folder, path in zip(folders, paths, strict=True):
        assert contents(path) == before, f"half migrated by a death at event {folder.name}"
        assert audit_run(folder).ok
    assert all(events > 0 for events in migrate(*folders))
    assert all(audit_run(folder).ok for folder in folders)


async def test_an_old_sqlite_cannot_take_columns_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = old(tmp_path, 2)
    before = contents(path)
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 34, 1))
    with pytest.raises(BufferFailed, match=r"open it once where SQLite is 3\.35 or newer"):
        await opened(tmp_path)
    assert contents(path) == before


@pytest.mark.parametrize("given", [str(FORMAT + 1), "99", "x", ""])
async def test_another_format_is_refused_with_what_to_do(tmp_path: Path, given: str) -> None:
    path = old(tmp_path)
    with closing(sqlite3.connect(path)) as raw:
        raw.execute("UPDATE meta SET value = ? WHERE key = 'format'", (given,))
        raw.commit()
    before = contents(path)
    with pytest.raises(BufferFailed, match=f"was made with format '{given}', this rft knows formats 1 to {FORMAT}. Use the rft"):
        await opened(tmp_path)
    assert contents(path) == before
    with pytest.raises(BufferFailed, match=f"has format {given}"):
        audit_run(tmp_path)

"""The write-ahead log is moved beside the owner's transactions; a failure of that costs nothing."""

from __future__ import annotations

import logging
import shutil
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rft.buffer import database
from rft.buffer.database import Checkpointer


class Told(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.event = threading.Event()
        self.level_told = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.level_told = max(self.level_told, record.levelno)
        if "checkpoint of" in record.getMessage():
            self.event.set()


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[Told]:
    monkeypatch.setattr(database, "QUIET_S", 0.05)
    logger = logging.getLogger(database.__name__)
    handler = Told()
    before = logger.level
    logger.setLevel(logging.DEBUG)  # not the attribute: loggers remember what is enabled
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(before)


def test_what_was_written_gets_into_the_file_while_the_owner_stays_connected(
    tmp_path: Path, told: Told
) -> None:
    path = tmp_path / "a.db"
    owner = sqlite3.connect(path, isolation_level=None)
    owner.execute("PRAGMA journal_mode = WAL")
    owner.execute("PRAGMA wal_autocheckpoint = 0")
    moving = Checkpointer(path)
    owner.execute("CREATE TABLE t (x)")
    owner.execute("INSERT INTO t VALUES (7)")
    moving.written(0)
    assert told.event.wait(30)
    moving.close()
    shutil.copy(path, tmp_path / "alone.db")  # without its log
    alone = sqlite3.connect(tmp_path / "alone.db")
    assert alone.execute("SELECT x FROM t").fetchall() == [(7,)]
    alone.close()
    owner.close()


def test_a_failure_is_told_and_the_next_write_tries_again(tmp_path: Path, told: Told) -> None:
    path = tmp_path / "a.db"
    path.write_bytes(b"this is no database at all, but longer than its header would be" * 20)
    moving = Checkpointer(path)
    for _ in range(2):
        moving.written(0)
        assert told.event.wait(30)
        told.event.clear()
    moving.close()
    assert told.level_told == logging.WARNING


def test_an_owner_that_is_never_quiet_is_not_put_off_for_ever(
    tmp_path: Path, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "QUIET_S", 3600.0)
    monkeypatch.setattr(database, "MUCH_BYTES", 1 << 20)
    moving = Checkpointer(tmp_path / "a.db")
    moving.written((1 << 20) - 1)
    assert not told.event.wait(0.1)
    moving.written(1)
    assert told.event.wait(30)
    moving.close()

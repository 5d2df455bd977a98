"""Moves what SQLite's write-ahead log holds into the database file, beside the owner's transactions instead of inside them.

Knows one file.  The one invariant: nothing depends on it; the log alone is enough to read and recover everything, and where this
thread cannot keep up SQLite itself does the work in a commit (`wal_autocheckpoint`).
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from pathlib import Path

log = logging.getLogger(__name__)
QUIET_S = 0.5  # without a transaction: the owner has other things to do
MUCH_BYTES = 96 << 20  # written since the last checkpoint: it is not put off any longer
SMALL_BYTES = 64 << 10  # what a transaction without payload counts for


class Checkpointer:
    """A checkpoint when the owner has written and is quiet now, or has written much: its transactions meet few of them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written = threading.Event()
        self._due = threading.Event()
        self._closed = False
        self._count = self._bytes = 0  # of transactions; changed by the owner's thread only
        self._moved = 0  # of the bytes; changed by this thread only
        self._thread = threading.Thread(target=self._run, name="rft-buffer-checkpoint", daemon=True)
        self._thread.start()

    def written(self, size: int) -> None:
        """A transaction with payload of `size` bytes was committed."""
        self._count += 1
        self._bytes += max(size, SMALL_BYTES)
        if self._bytes - self._moved >= MUCH_BYTES:
            self._due.set()
        if not self._written.is_set():
            self._written.set()

    def close(self) -> None:
        self._closed = True
        self._due.set()
        self._written.set()
        self._thread.join()

    def _run(self) -> None:
        connection = sqlite3.connect(self._path, isolation_level=None, timeout=0.0)
        try:
            while self._written.wait() and not self._closed:
                self._written.clear()
                seen = -1
                while seen != self._count and not self._due.is_set():
                    seen = self._count
                    self._due.wait(QUIET_S)
                if self._closed:
                    return
                self._moved = self._bytes
                self._due.clear()
                if not self._closed:  # what was cleared may have been the call to end
                    self._move(connection)
        finally:
            connection.close()

    def _move(self, connection: sqlite3.Connection) -> None:
        began = time.monotonic()
        try:
            connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        except sqlite3.Error as e:  # a full or failing disk: the next commit meets it too, and tells
            log.warning("buffer %s: its write-ahead log could not be moved: %s", self._path, e)
        log.debug("buffer %s: checkpoint of %.3f s", self._path, time.monotonic() - began)

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
EVERY_S = 1.0


class Checkpointer:
    """At most one checkpoint each `EVERY_S`, and only after something was written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rft-buffer-checkpoint", daemon=True)
        self._thread.start()

    def written(self) -> None:
        """A transaction was committed."""
        self._written.set()

    def close(self) -> None:
        self._closed.set()
        self._written.set()
        self._thread.join()

    def _run(self) -> None:
        connection = sqlite3.connect(self._path, isolation_level=None, timeout=0.0)
        try:
            while self._written.wait() and not self._closed.wait(EVERY_S):
                self._written.clear()
                if self._closed.is_set():  # what was cleared may have been the call to end
                    return
                began = time.monotonic()
                try:
                    connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
                except sqlite3.Error as e:  # a full or failing disk: the next commit meets it too, and tells
                    log.warning("buffer %s: its write-ahead log could not be moved: %s", self._path, e)
                log.debug("buffer %s: checkpoint of %.3f s", self._path, time.monotonic() - began)
        finally:
            connection.close()

"""Replies of judges, kept in an SQLite file, with what they cost so far.

Knows neither judges nor models.  Several processes may use one file.  Invariant: what is given back was written whole, under the same key.
"""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path
from typing import NamedTuple

from rft.errors import ConfigError, RunFailed

_SCHEMA = """
CREATE TABLE IF NOT EXISTS replies (key BLOB PRIMARY KEY, judge TEXT NOT NULL, model TEXT NOT NULL, reply TEXT NOT NULL,
  verdict_key TEXT NOT NULL, prompt_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL, created REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS spent (model TEXT PRIMARY KEY, calls INTEGER NOT NULL, cost_usd REAL NOT NULL) WITHOUT ROWID;
"""


class Reply(NamedTuple):
    text: str
    verdict_key: str  # the key that this reply had to repeat


class Cache:
    """One file, for one event loop."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError for a file that is something else, or in a folder that cannot be written."""
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(path, timeout=30, isolation_level=None)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.executescript(_SCHEMA)
        except (sqlite3.Error, OSError) as e:
            raise ConfigError(
                f"{path} cannot be used as a judge's cache ({e}); name another file, or off", key="reward_fn_args.cache"
            ) from None

    def get(self, key: bytes) -> Reply | None:
        row = self._db.execute("SELECT reply, verdict_key FROM replies WHERE key = ?", (key,)).fetchone()
        return None if row is None else Reply(*row)

    def put(self, key: bytes, reply: Reply, *, judge: str, model: str, tokens: tuple[int, int]) -> None:
        """Raises RunFailed where it cannot be written."""
        row = (key, judge, model, reply.text, reply.verdict_key, *tokens, time.time())
        self._write("INSERT OR REPLACE INTO replies VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)

    def spend(self, model: str, cost_usd: float) -> None:
        """Raises RunFailed where it cannot be written: a budget that is forgotten is none."""
        more = "ON CONFLICT (model) DO UPDATE SET calls = calls + 1, cost_usd = cost_usd + excluded.cost_usd"
        self._write(f"INSERT INTO spent VALUES (?, 1, ?) {more}", (model, cost_usd))

    def _write(self, statement: str, row: tuple[object, ...]) -> None:
        try:
            self._db.execute(statement, row)
        except (sqlite3.Error, UnicodeError) as e:
            raise RunFailed(f"the judge's cache {self.path} cannot be written ({e}); make room, or use cache: off") from e

    def spent(self, model: str) -> float:
        """US dollars, of this and every earlier process."""
        row = self._db.execute("SELECT cost_usd FROM spent WHERE model = ?", (model,)).fetchone()
        return 0.0 if row is None else float(row[0])

    def close(self) -> None:
        self._db.close()

"""Replies of judges in an SQLite file.

Depends on neither judges nor models.  Several processes may use one file.
Invariant: a returned reply was completely written under the same key.
"""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path
from typing import NamedTuple

from rft.errors import RunFailed
from rft.reward.judge_costs import opened

_SCHEMA = """
CREATE TABLE IF NOT EXISTS replies (key BLOB PRIMARY KEY, judge TEXT NOT NULL, model TEXT NOT NULL, reply TEXT NOT NULL,
  verdict_key TEXT NOT NULL, prompt_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL, created REAL NOT NULL) WITHOUT ROWID;
"""


class CachedReply(NamedTuple):
    text: str
    verdict_key: str  # the key that this reply had to repeat


class Cache:
    """One file, for one event loop."""

    def __init__(self, path: Path) -> None:
        """Open the file.  Raises ConfigError for a foreign file, or a folder that cannot be
        written.
        """
        self.path = path
        self._db = opened(path, _SCHEMA, key="reward_fn_args.cache")

    def get(self, key: bytes) -> CachedReply | None:
        row = self._db.execute(
            "SELECT reply, verdict_key FROM replies WHERE key = ?", (key,)
        ).fetchone()
        return None if row is None else CachedReply(*row)

    def put(
        self, key: bytes, reply: CachedReply, *, judge: str, model: str, tokens: tuple[int, int]
    ) -> None:
        """Store a reply.  Raises RunFailed if writing fails."""
        row = (key, judge, model, reply.text, reply.verdict_key, *tokens, time.time())
        try:
            self._db.execute("INSERT OR REPLACE INTO replies VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
        except (sqlite3.Error, UnicodeError) as e:
            raise RunFailed(
                f"the judge's cache {self.path} cannot be written ({e}); make room, or use cache: "
                f"off"
            ) from e

    def close(self) -> None:
        self._db.close()

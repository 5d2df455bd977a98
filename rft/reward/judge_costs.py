"""Costs of judges in an SQLite file shared by all its users: a hard bound even if processes are
killed.

    spent = settled costs + maximum costs of calls in progress

The maximum cost of a call is added before it is sent and corrected when it returns, so a lost call
stays counted at its maximum.  Depends on neither judges nor models.
Invariant: `reserve` never lets `spent` exceed the limit, however many processes use the file.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rft.errors import ConfigError, RunFailed

_SCHEMA = """
CREATE TABLE IF NOT EXISTS spent (model TEXT PRIMARY KEY, calls INTEGER NOT NULL, cost_usd REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS under_way (id INTEGER PRIMARY KEY, model TEXT NOT NULL, most REAL NOT NULL, owner TEXT NOT NULL);
"""
_TABLES = {"replies", "spent", "under_way"}
_ROUNDING = 1e-9  # US dollars


class BudgetUsedUp(RunFailed):
    """A judge's `max_cost_usd` is spent."""


class CostLedger:
    """One file, for one event loop; in memory without `path`."""

    def __init__(self, path: Path | None) -> None:
        """Open the file.  Raises ConfigError for a foreign file, or a folder that cannot be
        written.
        """
        self.path = path
        self._db = opened(path, _SCHEMA, key="reward_fn_args.cost_ledger")
        self._me = _process(os.getpid())

    def reserve(self, model: str, most: float, limit: float | None) -> int | None:
        """Count a call that may cost `most`; return its number, or None if calls in progress may
        still leave enough budget.

        Raises BudgetUsedUp if the cost cannot fit.
        """
        with self._changing() as db:
            spent = self._spent(model)
            if limit is not None and spent + most > limit + _ROUNDING:
                if self._other_calls(model):
                    return None
                raise BudgetUsedUp(
                    f"the judge {model} has cost ${spent:.4f} of max_cost_usd ${limit:g}, and the "
                    f"next call may cost ${most:.4f}.  "
                    "Raise reward_fn_args.max_cost_usd and start again (it goes on from its last "
                    "checkpoint), use a cheaper judge, or "
                    "leave what is left unscored with over_budget: unscored"
                )
            self._add(model, 1, most)
            row = db.execute(
                "INSERT INTO under_way (model, most, owner) VALUES (?, ?, ?)",
                (model, most, self._me),
            )
            return row.lastrowid

    def settle(self, call: int, cost: float) -> None:
        """Replace the maximum cost of a finished call by its actual cost."""
        with self._changing() as db:
            model, most = db.execute(
                "SELECT model, most FROM under_way WHERE id = ?", (call,)
            ).fetchone()
            self._add(model, 0 if cost else -1, cost - most)
            db.execute("DELETE FROM under_way WHERE id = ?", (call,))

    def spent(self, model: str) -> float:
        """Return US dollars spent by all users of the file, including maximum costs of calls in
        progress.
        """
        with self._changing():
            return self._spent(model)

    def _spent(self, model: str) -> float:
        row = self._db.execute("SELECT cost_usd FROM spent WHERE model = ?", (model,)).fetchone()
        return 0.0 if row is None else float(row[0])

    def _add(self, model: str, calls: int, cost_usd: float) -> None:
        more = (
            "ON CONFLICT (model) DO UPDATE SET calls = calls + excluded.calls, cost_usd = "
            "cost_usd + excluded.cost_usd"
        )
        self._db.execute(f"INSERT INTO spent VALUES (?, ?, ?) {more}", (model, calls, cost_usd))

    def _other_calls(self, model: str) -> bool:
        """Return whether a living process on this machine has calls of this model in progress."""
        owners = [
            o
            for (o,) in self._db.execute(
                "SELECT DISTINCT owner FROM under_way WHERE model = ?", (model,)
            )
        ]
        return any(owner and _process(int(owner.partition(" ")[0])) == owner for owner in owners)

    @contextmanager
    def _changing(self) -> Iterator[sqlite3.Connection]:
        """Run one exclusive transaction.  Raises RunFailed on errors, since a lost entry would
        break the budget.
        """
        try:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")
        except (sqlite3.Error, UnicodeError) as e:
            raise RunFailed(
                f"the ledger of a judge's costs, {self.path}, cannot be written ({e}); make room, "
                f"or name another"
            ) from e

    def close(self) -> None:
        self._db.close()


def opened(path: Path | None, schema: str, *, key: str) -> sqlite3.Connection:
    """Open the file with permissions for its owner only.  Raises ConfigError at `key` for a foreign
    or unwritable file.
    """
    try:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        db = sqlite3.connect(path or ":memory:", timeout=60, isolation_level=None)
        tables = {
            name
            for (name,) in db.execute(
                "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
            )
        }
        if foreign := sorted(tables - _TABLES):
            raise sqlite3.DatabaseError(f"it has a table {foreign[0]} of another program")
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=NORMAL")
        db.executescript(schema)
        return db
    except (sqlite3.Error, OSError) as e:
        raise ConfigError(
            f"{path} cannot be used as a judge's cache or ledger of costs ({e}); name another file",
            key=key,
            given=str(path),
        ) from None


def _process(pid: int) -> str:
    """Return a unique name of a process on this machine (id, host, start time); "" without such a
    process or /proc.
    """
    try:
        began = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
    return f"{pid} {os.uname().nodename} {began}"

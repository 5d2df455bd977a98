"""Questions to a small SQLite database: the model tries queries, sees what they give, and says when
it is done.

explorer_input:
  taskset: {path: questions.jsonl, default_workflow_type: sql_workflow, format: {prompt_key:
  question, response_key: query}}

A row has `question`, `query` (gold) and `database`: a script of CREATE and INSERT statements, or
the path of a database file.
"""

import sqlite3
import time
from pathlib import Path
from typing import Any

from pydantic import Field

from rft import EnvWorkflow, Step, Task, TurnArgs, register

INSTRUCTION = (
    "Answer the question with one SQLite query. In every turn write one query in a block that "
    "begins with ```sql and ends with ```; "
    "you are shown its result. When the last result answers the question, write SUBMIT alone."
)
_READS = {
    sqlite3.SQLITE_SELECT,
    sqlite3.SQLITE_READ,
    sqlite3.SQLITE_FUNCTION,
    sqlite3.SQLITE_RECURSIVE,
}
_MAX_VALUE = 1 << 20  # bytes of one text or blob that a query may make


class SqlArgs(TurnArgs):
    """As TurnArgs, with limits of a query."""

    max_turns: int = Field(6, ge=1, description="answers at most")
    query_s: float = Field(2.0, gt=0, description="seconds that a query may take")
    max_rows: int = Field(20, ge=1, description="rows of a result that are shown")
    max_chars: int = Field(600, ge=20, description="characters of a result that are shown")
    ordered: bool = Field(
        False, description="rows of the result must come in the gold query's order"
    )


class QueryFailed(Exception):
    """A query is wrong, not allowed, or too slow."""


@register.workflow("sql_workflow", args=SqlArgs)
class SqlWorkflow(EnvWorkflow):
    """Reward 1 if the last query gives what the gold query gives, else 0.  Queries can only read."""

    blocking = True
    scores_itself = True
    observed = 0  # the question

    def __init__(self, **args: Any) -> None:
        super().__init__(**args)
        self.db: sqlite3.Connection | None = None
        self.last: list[tuple[Any, ...]] | None = None

    def instruction(self, task: Task) -> str:
        return task.system_prompt or INSTRUCTION

    def reset(self, task: Task) -> str:
        self.db = opened(str(task.row["database"]))
        schema = "\n".join(
            sql
            for (sql,) in self.db.execute(
                "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY rowid"
            )
        )
        self.db.set_authorizer(_only_reads)
        self.gold = self.query(str(task.truth), limit=None)
        return f"{schema}\n\n{task.prompt or task.row.get('question', '')}"

    def step(self, action: str) -> Step:
        *blocks, rest = _blocks(action)
        if not blocks and "SUBMIT" in action.upper().split():
            return self._over("Submitted.")
        text = blocks[-1] if blocks else action.strip()
        try:
            self.last = self.query(text, limit=None)
        except QueryFailed as e:
            return Step(f"Error: {e}", reward=0.0, info={"success": False})
        if blocks and "SUBMIT" in rest.upper().split():
            return self._over("Submitted.")
        return Step(self.shown(self.last), reward=0.0, info={"success": False})

    def outcome(self) -> dict[str, float]:
        return {"success": float(self._right())}

    def leftover(self) -> float:
        """A run that has the answer and does not submit it is right all the same."""
        return float(self._right())

    def _over(self, text: str) -> Step:
        right = self._right()
        return Step(text, reward=float(right), done=True, info={"success": right})

    def _right(self) -> bool:
        if self.last is None:
            return False
        if self.args.ordered:
            return self.last == self.gold
        return sorted(map(repr, self.last)) == sorted(map(repr, self.gold))

    def query(self, text: str, *, limit: int | None) -> list[tuple[Any, ...]]:
        """The rows of one reading query.  Raises QueryFailed."""
        assert self.db is not None, "reset comes first"
        until = time.monotonic() + self.args.query_s
        self.db.set_progress_handler(lambda: time.monotonic() > until, 2000)
        try:
            rows = self.db.execute(text).fetchmany(limit or 10_001)
        except (sqlite3.Error, sqlite3.Warning, OverflowError, MemoryError) as e:
            slow = time.monotonic() > until
            raise QueryFailed(
                f"the query took longer than {self.args.query_s:g} s" if slow else str(e)
            ) from None
        if len(rows) > 10_000:
            raise QueryFailed("the result has more than 10,000 rows")
        return rows

    def shown(self, rows: list[tuple[Any, ...]]) -> str:
        lines = [
            " | ".join("NULL" if v is None else str(v) for v in row)
            for row in rows[: self.args.max_rows]
        ]
        more = (
            f"\n... {len(rows) - self.args.max_rows} more rows"
            if len(rows) > self.args.max_rows
            else ""
        )
        text = "\n".join(lines) or "(no rows)"
        return (
            text[: self.args.max_chars] + ("..." if len(text) > self.args.max_chars else "") + more
        )

    def close(self) -> None:
        if self.db is not None:
            self.db.close()


def opened(database: str) -> sqlite3.Connection:
    """A database of its own from a script, or a file opened for reading only."""
    if "\n" not in database and ";" not in database:
        return sqlite3.connect(
            f"{Path(database).expanduser().resolve().as_uri()}?mode=ro",
            uri=True,
            check_same_thread=False,
        )
    db = sqlite3.connect(":memory:", check_same_thread=False)
    db.executescript(database)
    db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_VALUE)
    return db


def _only_reads(
    action: int, first: str | None, second: str | None, database: str | None, trigger: str | None
) -> int:
    if action == sqlite3.SQLITE_FUNCTION and second == "load_extension":
        return sqlite3.SQLITE_DENY
    return sqlite3.SQLITE_OK if action in _READS else sqlite3.SQLITE_DENY


def _blocks(action: str) -> list[str]:
    """The queries between ```, and as the last item everything else."""
    parts = action.split("```")
    inside = parts[1:-1:2]
    outside = [*parts[::2], *(parts[-1:] if len(parts) % 2 == 0 else [])]
    queries = [block[3:] if block[:3].lower() == "sql" else block for block in inside]
    return [*(query.strip() for query in queries), "".join(outside)]

"""Read-only queries on a run's ledger, during or after the run.

Does not know how answers are displayed.  Invariant: no query can change the ledger or hold up the
run: readers of SQLite's write-ahead log and of PostgreSQL's READ ONLY transactions take no lock
that a writer waits for.
"""

from __future__ import annotations

import difflib
import re
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from sqlalchemy import Connection, select
from sqlalchemy.exc import SQLAlchemyError

from rft.buffer import schema, text_functions
from rft.buffer.image_files import file_of
from rft.buffer.location import Location, connect, find
from rft.buffer.schema import FORMAT, VIEWS, experiences, groups, meta
from rft.buffer.storage.base import Storage
from rft.buffer.storage_choice import stored_by
from rft.errors import BufferFailed, ConfigError, PayloadDamaged
from rft.secrets import redact
from rft.types.block import UNREADABLE, decode_with_contents
from rft.types.experience import Experience
from rft.types.token_logprobs import TrainerTokens, of_trainer

TIMEOUT_S = 60.0  # limit of a user's query
READ_TIMEOUT_S = 600.0  # limit of internal queries
Order = Literal["random", "best", "worst"]  # by reward
# largest value in bytes: a query may create values, each within one uninterruptible step
_LONGEST = 1 << 28
LOCK_WAIT_S = 5
_PORTION_BYTES = 16 << 20  # payload read at once
# steps of SQLite's machine between two checks of the deadline: well below a millisecond
_PROGRESS = 20_000
_HEAD = re.compile(r"(?:\s+|--[^\n]*(?:\n|$)|/\*.*?\*/|\()*(\w*)", re.DOTALL)
_ASKS = ("select", "with", "values", "explain")
_REFUSED = (
    "a query may only read (SELECT, WITH, VALUES, EXPLAIN); to change a reward see the "
    "how-to page “Asking the buffer”"
)


@dataclass(frozen=True)
class QueryResult:
    """Rows of a query, read lazily; complete tuples in the order of `columns`."""

    columns: tuple[str, ...]
    rows: Iterator[tuple[Any, ...]]


@contextmanager
def open_run(
    run_dir: Path, ledger_url: str | None = None, *, longest: int = _LONGEST
) -> Iterator[Questions]:
    """Open the ledger of a run folder for reading; `ledger_url` as for `location.find`, `longest`
    as for `Questions.open`.

    Raises ConfigError if it cannot be read.
    """
    questions = Questions(locate(run_dir, ledger_url), run_dir)
    try:
        questions.open(longest=longest)
        yield questions
    finally:
        questions.close()


def locate(run_dir: Path, ledger_url: str | None = None) -> Location:
    """Return the location of a run folder's ledger.  Raises ConfigError if it is missing."""
    try:
        where = find(run_dir, ledger_url)
    except BufferFailed as e:
        raise ConfigError(f"{e}{_several(run_dir)}", key="RUN", given=str(run_dir)) from e
    if where.path is not None and not where.path.is_file():
        raise ConfigError(f"{where.path} is missing", key="RUN", given=str(run_dir))
    return where


def _several(run_dir: Path) -> str:
    """Return a hint for the folder of a program of stages, or of several runs."""
    runs = sorted(str(p.parent) for p in run_dir.glob("*/buffer") if p.is_dir())
    return f" It holds the runs {', '.join(runs[:5])}." if runs else ""


class Questions:
    """An open read-only ledger, created by `open_run`, for one thread."""

    def __init__(self, where: Location, run_dir: Path) -> None:
        self.where = where
        self.run_dir = run_dir
        self.sqlite = where.url is None
        self.about: dict[str, str] = {}  # content of the ledger's table `meta`
        self._engine = connect(where, read_only=True)
        self._connection: Connection | None = None
        self._deadline: float | None = None

    def open(self, *, longest: int = _LONGEST) -> None:
        """Connect; `longest`: bytes of one value in SQLite.

        Raises ConfigError if the ledger is unreachable, damaged, or of another format.
        """
        with self.errors("RUN", TIMEOUT_S):
            self._connection = self._engine.connect()
            raw = self._raw
            if self.sqlite:
                raw.execute(f"PRAGMA busy_timeout = {1000 * LOCK_WAIT_S}")
                raw.execute("PRAGMA query_only = ON")
                raw.text_factory = lambda b: b.decode("utf-8", "replace")
                raw.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, longest)
                text_functions.install(raw)
                raw.set_authorizer(_allowed)
                raw.set_progress_handler(
                    lambda: self._deadline is not None and time.monotonic() > self._deadline,
                    _PROGRESS,
                )
            with self.reading(TIMEOUT_S) as tx:
                self.about = {r.key: r.value for r in tx.execute(select(meta))}
        if (version := self.about.get("format")) != str(FORMAT):
            raise ConfigError(
                f"{self.where} has format {version}, this rft reads format {FORMAT}; use the rft "
                f"that wrote it",
                key="RUN",
            )

    @cached_property
    def storage(self) -> Storage:
        """Return the payload storage, unopened, because only its owner may open it."""
        return stored_by(self.about, self.where.name, self.run_dir / "buffer")

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._engine.dispose()

    @property
    def connection(self) -> Connection:
        assert self._connection is not None, "asked before open"
        return self._connection

    @property
    def _raw(self) -> Any:
        return self.connection.connection.driver_connection

    @contextmanager
    def ask(self, sql: str, *, timeout_s: float | None = TIMEOUT_S) -> Iterator[QueryResult]:
        """Run a user's statement.

        Raises ConfigError with the problem, also while rows are read.
        """
        word = m[1].lower() if (m := _HEAD.match(sql)) else ""
        if not word and not sql.strip(" \t\r\n;"):
            raise ConfigError(
                'is empty; ask e.g. "SELECT state, count(*) FROM v_experiences GROUP BY state"',
                key="SQL",
            )
        if word not in _ASKS:
            raise ConfigError(
                f"begins with {word.upper() or sql.strip()[:10]!r}: {_REFUSED}", key="SQL"
            )
        with (
            self.errors("SQL", timeout_s),
            self.reading(timeout_s),
            self._sqlite(sql) if self.sqlite else self._postgres(sql) as answer,
        ):
            yield answer

    @contextmanager
    def reading(self, timeout_s: float | None = READ_TIMEOUT_S) -> Iterator[Connection]:
        """Begin a read transaction, which sees one snapshot of the run."""
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        watch = (
            threading.Timer(timeout_s, self._raw.interrupt)
            if timeout_s is not None and self.sqlite
            else None
        )
        try:
            if watch is not None:
                watch.daemon = True
                watch.start()
            with self.connection.begin():
                if not self.sqlite:
                    self.connection.exec_driver_sql(
                        f"SET LOCAL statement_timeout = {int(1000 * (timeout_s or 0))}"
                    )
                yield self.connection
        finally:
            self._deadline = None
            if watch is not None:
                watch.cancel()

    @contextmanager
    def errors(self, key: str, timeout_s: float | None = READ_TIMEOUT_S) -> Iterator[None]:
        """Translate errors of the database inside the block to ConfigError."""
        try:
            yield
        except SQLAlchemyError as e:
            raise self._translate(getattr(e, "orig", None) or e, key, timeout_s) from e
        except MemoryError as e:
            raise ConfigError(
                "needs more memory than a query may take; ask for fewer or shorter values", key=key
            ) from e
        except Exception as e:
            if not (isinstance(e, sqlite3.Error) or type(e).__module__.startswith("psycopg")):
                raise
            raise self._translate(e, key, timeout_s) from e

    def columns(self, view: str) -> tuple[str, ...]:
        """Return the columns of a documented view."""
        with self.errors("SQL", TIMEOUT_S), self.reading(TIMEOUT_S):
            return tuple(self.connection.exec_driver_sql(f"SELECT * FROM {view} LIMIT 0").keys())

    def page(self, where: str, after: str, size: int) -> list[dict[str, Any]]:
        """Return at most `size` rows of v_experiences with an id after `after` that fulfil the
        user's condition `where`, by id.
        """
        return self._rows(where, "WHERE id > {0} ORDER BY id LIMIT {0}", (after, size))

    def draw(
        self, where: str, num: int, *, step: int | None = None, order: Order = "random"
    ) -> list[dict[str, Any]]:
        """Return `num` rows of v_experiences that fulfil `where` and were trained in `step`.

        "random": random rows, by id; "best" and "worst": scored rows, from the best or worst reward
        on.
        """
        by = {"random": "random()", "best": "reward DESC, id", "worst": "reward, id"}[order]
        only = [
            *(["reward IS NOT NULL"] if order != "random" else []),
            *([] if step is None else [f"used_step = {step:d}"]),
        ]
        rest = f"{'WHERE' if only else ''} {' AND '.join(only)} ORDER BY {by} LIMIT {{0}}"
        ids = [row["id"] for row in self._rows(where, rest, (num,), what="id")]
        return [row for x in (sorted(ids) if order == "random" else ids) for row in self.row(x)]

    def row(self, id: str) -> list[dict[str, Any]]:
        """Return the row of v_experiences with this id, or an empty list."""
        return self._rows("", "WHERE id = {0}", (id,))

    def group_reward(self, group_id: str) -> tuple[float | None, int]:
        """Return the mean reward of a group's runs, and the number of scored runs."""
        what = "avg(reward) AS mean, count(reward) AS scored"
        (row,) = self._rows("", "WHERE group_id = {0}", (group_id,), view="v_runs", what=what)
        return row["mean"], row["scored"]

    def lineage(self, id: str) -> list[dict[str, Any]]:
        """Return the rows of v_lineage with a use of this experience, by lineage and step."""
        order = "WHERE id = {0} AND train_step IS NOT NULL ORDER BY train_lineage, train_step"
        return self._rows("", order, (id,), view="v_lineage")

    def _rows(
        self,
        where: str,
        rest: str,
        values: tuple[Any, ...],
        *,
        view: str = "v_experiences",
        what: str = "*",
    ) -> list[dict[str, Any]]:
        """Select rows; the condition is a subquery, so that it cannot affect `rest`."""
        condition = where if self.sqlite else where.replace("%", "%%")
        chosen = (
            f"(SELECT * FROM {view} WHERE ({condition}\n)) AS chosen" if where.strip() else view
        )
        sql = f"SELECT {what} FROM {chosen} {rest.format('?' if self.sqlite else '%s')}"
        with (
            self.errors("--where" if where.strip() else "RUN", TIMEOUT_S),
            self.reading(TIMEOUT_S) as tx,
        ):
            return [dict(row) for row in tx.exec_driver_sql(sql, values).mappings()]

    def payload(self, ids: Sequence[str]) -> dict[str, Experience]:
        """Return experiences as their explorer stored them; an edited reward is only in the ledger.

        Raises PayloadDamaged, ConfigError.
        """
        by_id: dict[str, Experience] = {}
        e = experiences.c
        locators_query = select(groups.c.locator, groups.c.num_bytes).where(
            groups.c.id.in_(select(e.group_id).where(e.id.in_(ids)).distinct())
        )
        with self.errors("RUN"), self.reading() as tx:
            hashes = {
                r.id: r.content_hash
                for r in tx.execute(select(e.id, e.content_hash).where(e.id.in_(ids)))
            }
            for locators in _portions(tx.execute(locators_query).all()):
                for block in self.blocks(locators, tx):
                    by_id.update(_as_stored(block, hashes))
        if missing := sorted(set(ids) - by_id.keys()):
            raise PayloadDamaged(
                f"the payload of {missing[0]} is not as it was stored; restore the buffer's folder "
                f"from a copy"
            )
        return by_id

    def blocks(self, locators: Sequence[str], tx: Connection) -> list[bytes]:
        """Return payload blocks by locator.  Raises PayloadDamaged, ConfigError."""
        try:
            return self.storage.get(locators, tx)
        except OSError as e:
            raise ConfigError(
                f"{e.filename} cannot be read: {e.strerror or e}",
                key="RUN",
                given=str(self.run_dir),
            ) from e

    def image(self, name: str) -> bytes:
        """Return the file of an image that a row shows.  Raises PayloadDamaged, ConfigError."""
        with self.errors("RUN"), self.reading() as tx:
            data = file_of(tx, self.storage, name)
        if data is None:
            raise PayloadDamaged(f"the ledger does not name image {name}, which a row shows")
        return data

    def trainer_tokens(self, ids: Sequence[str]) -> dict[str, TrainerTokens]:
        """Return the trainer's numbers of these experiences that are kept, by id."""
        k = schema.token_logprobs.c
        with self.errors("RUN"), self.reading() as tx:
            rows = tx.execute(
                select(k.experience, k.token_start, k.pairs).where(k.experience.in_(ids))
            ).all()
        return {r.experience: of_trainer(r.token_start, r.pairs) for r in rows}

    @contextmanager
    def _sqlite(self, sql: str) -> Iterator[QueryResult]:
        with closing(self._raw.execute(sql)) as cursor:
            yield QueryResult(tuple(d[0] for d in cursor.description or ()), iter(cursor))

    @contextmanager
    def _postgres(self, sql: str) -> Iterator[QueryResult]:
        cursor = self._raw.cursor()
        # the server prepares the statement, and refuses a second one
        with closing(cursor.stream(sql)) as rows:
            first = next(rows, None)
            if first is None:
                # a stream without rows does not report its columns
                cursor.execute(sql, prepare=True)
            columns = tuple(d.name for d in cursor.description or ())
            yield QueryResult(columns, rows if first is None else chain([first], rows))

    def _translate(self, error: BaseException, key: str, timeout_s: float | None) -> ConfigError:
        text = str(error).strip()
        state = getattr(error, "sqlstate", None)
        line = text.splitlines()[0] if text else type(error).__name__
        if line == "interrupted" or state == "57014":
            remedy = "ask for less, or let `rft buffer query` take longer (--timeout)"
            return ConfigError(
                f"took longer than {timeout_s or 0:g} s and was ended; {remedy}", key=key
            )
        if "one statement" in line or "multiple commands" in line:
            return ConfigError("holds more than one statement; ask one at a time", key=key)
        if "not authorized" in line or "prohibited" in line or state == "25006":
            return ConfigError(f"{line}: {_REFUSED}", key=key)
        if "database is locked" in line or "database table is locked" in line:
            return ConfigError(
                f"{self.where} is locked by another program; close its transaction and ask again",
                key="RUN",
            )
        if (
            not self.sqlite
            and (state is None or state[:2] in ("08", "28", "3D", "57"))
            and self._connection is None
        ):
            remedy = (
                "start the server; a password is taken from --config, RFT_LEDGER_URL, "
                "PGPASSWORD or ~/.pgpass"
            )
            return ConfigError(
                redact(f"{self.where} cannot be reached: {line}; {remedy}"), key="RUN"
            )
        if "unable to open" in line or "readonly database" in line:
            rights = (
                "a reader needs the right to read it and, while no run has it open, to write "
                "in its folder (SQLite's shared memory)"
            )
            return ConfigError(f"{self.where} cannot be opened: {line}; {rights}", key="RUN")
        if not self.about or any(
            x in line for x in ("not a database", "malformed", "disk I/O error")
        ):
            return ConfigError(
                f"{self.where} cannot be read, it is damaged or not a ledger: {line}; `rft buffer "
                f"audit` says more",
                key="RUN",
            )
        return ConfigError(line + self._hint(line), key=key)

    def _hint(self, line: str) -> str:
        if m := re.search(r"no such column: (\S+)|column \"?([\w.]+)\"? does not exist", line):
            column = (m[1] or m[2]).rpartition(".")[2]
            with suppress(ConfigError):
                columns = dict.fromkeys(c for v in VIEWS for c in self.columns(v))
                near = difflib.get_close_matches(column, columns, 1)
                return (
                    f". Did you mean {near[0]}?"
                    if near
                    else f". v_experiences has {', '.join(self.columns('v_experiences'))}"
                )
        if re.search(r"no such table: (\S+)|relation \"?([\w.]+)\"? does not exist", line):
            return (
                f". The views are {', '.join(VIEWS)}; `rft buffer query RUN` without SQL lists "
                f"their columns"
            )
        return ""


def limit_memory(num_bytes: int) -> None:
    """Bound the memory of every SQLite connection of this process: a program that only reads."""
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.execute(f"PRAGMA hard_heap_limit = {num_bytes}")


def row_portions(
    rows: Iterable[Sequence[Any]], num_rows: int = 1000, num_bytes: int = 4 << 20
) -> Iterator[list[Sequence[Any]]]:
    """Parts of an answer that are in memory together: a part ends with its last row of `num_rows`,
    or with the row that passes `num_bytes`.
    """
    portion: list[Sequence[Any]] = []
    size = 0
    for row in rows:
        portion.append(row)
        size += sum(map(num_bytes_of, row))
        if len(portion) == num_rows or size > num_bytes:
            yield portion
            portion = []
            size = 0
    if portion:
        yield portion


def num_bytes_of(value: Any) -> int:
    """Bytes that a value takes, about."""
    return len(value) if isinstance(value, str | bytes | memoryview) else 8


def _as_stored(block: bytes, hashes: Mapping[str, str]) -> dict[str, Experience]:
    """Return the experiences of a block whose hashes match, by id."""
    try:
        rows, contents = decode_with_contents(block)
    except UNREADABLE:
        return {}
    return {
        str(x.id): x
        for x, content in zip(rows, contents, strict=True)
        if content.hash == hashes.get(str(x.id))
    }


def _portions(blocks: Iterable[Any]) -> Iterator[list[str]]:
    """Split locators of blocks, given as (locator, bytes), into portions that fit into memory."""
    portion: list[str] = []
    size = 0
    for locator, num_bytes in blocks:
        if portion and size + num_bytes > _PORTION_BYTES:
            yield portion
            portion = []
            size = 0
        portion.append(locator)
        size += num_bytes
    if portion:
        yield portion


def _allowed(action: int, _: str | None, name: str | None, *more: str | None) -> int:
    """Allow reading and harmless functions."""
    reads = action in _READS and not (
        action == sqlite3.SQLITE_FUNCTION and name in _FUNCTIONS_OF_THE_LIBRARY
    )
    return sqlite3.SQLITE_OK if reads else sqlite3.SQLITE_DENY


# these load code or reveal a memory address
_FUNCTIONS_OF_THE_LIBRARY = ("load_extension", "fts3_tokenizer")
_READS = {  # SQLite asks for each part of a statement at compilation
    sqlite3.SQLITE_SELECT,
    sqlite3.SQLITE_READ,
    sqlite3.SQLITE_FUNCTION,
    sqlite3.SQLITE_RECURSIVE,
    sqlite3.SQLITE_TRANSACTION,
}

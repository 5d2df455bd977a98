"""Questions of people to a run's ledger: opened for reading only, while the run goes on or after
it.

It does not know how answers are shown.  The one invariant: nothing here can change the ledger, and
no question holds up the run: readers of SQLite's write-ahead log and of PostgreSQL's READ ONLY
transactions take no lock that a writer waits for.
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
from rft.buffer.base import Storage, stored_by
from rft.buffer.location import Location, connect, find
from rft.buffer.schema import FORMAT, VIEWS, experiences, groups, meta
from rft.errors import BufferFailed, ConfigError, PayloadDamaged
from rft.secrets import redact
from rft.types.block import UNREADABLE, read
from rft.types.experience import Experience
from rft.types.token_logprobs import TrainerTokens, of_trainer

TIMEOUT_S = 60.0  # of a person's question
READ_TIMEOUT_S = 600.0  # of anything else
Order = Literal["random", "best", "worst"]  # of reward
# bytes of a value: one that a query makes takes memory, and its time is that of one step
_LONGEST = 1 << 28
LOCK_WAIT_S = 5
_PORTION_BYTES = 16 << 20  # of payload that is read at once
# steps of SQLite's machine between two looks at the clock: well below a millisecond
_PROGRESS = 20_000
_HEAD = re.compile(r"(?:\s+|--[^\n]*(?:\n|$)|/\*.*?\*/|\()*(\w*)", re.DOTALL)
_ASKS = ("select", "with", "values", "explain")
_REFUSED = (
    "a query may only read (SELECT, WITH, VALUES, EXPLAIN); to change a reward see the "
    "how-to page “Asking the buffer”"
)


@dataclass(frozen=True)
class QueryResult:
    """Rows of a question, read as they are asked for; whole tuples in the order of `columns`."""

    columns: tuple[str, ...]
    rows: Iterator[tuple[Any, ...]]


@contextmanager
def open_run(run_dir: Path, ledger_url: str | None = None) -> Iterator[Questions]:
    """The ledger of a run folder, for reading; `ledger_url` as for `location.find`.  Raises
    ConfigError where there is none to read.
    """
    questions = Questions(locate(run_dir, ledger_url), run_dir)
    try:
        questions.open()
        yield questions
    finally:
        questions.close()


def locate(run_dir: Path, ledger_url: str | None = None) -> Location:
    """Where the ledger of a run folder is.  Raises ConfigError where there is none."""
    try:
        where = find(run_dir, ledger_url)
    except BufferFailed as e:
        raise ConfigError(f"{e}{_several(run_dir)}", key="RUN", given=str(run_dir)) from e
    if where.path is not None and not where.path.is_file():
        raise ConfigError(f"{where.path} is missing", key="RUN", given=str(run_dir))
    return where


def _several(run_dir: Path) -> str:
    """For the folder of a program of stages, or of several runs."""
    runs = sorted(str(p.parent) for p in run_dir.glob("*/buffer") if p.is_dir())
    return f" It holds the runs {', '.join(runs[:5])}." if runs else ""


class Questions:
    """An open ledger that can only be asked; made by `open_run`, for one thread."""

    def __init__(self, where: Location, run_dir: Path) -> None:
        self.where = where
        self.run_dir = run_dir
        self.sqlite = where.url is None
        self.about: dict[str, str] = {}  # the ledger's own table of facts
        self._engine = connect(where, read_only=True)
        self._connection: Connection | None = None
        self._deadline: float | None = None

    def open(self) -> None:
        """Raises ConfigError when the ledger cannot be reached, is damaged, or of another format."""
        with self.errors("RUN", TIMEOUT_S):
            self._connection = self._engine.connect()
            raw = self._raw
            if self.sqlite:
                raw.execute(f"PRAGMA busy_timeout = {1000 * LOCK_WAIT_S}")
                raw.execute("PRAGMA query_only = ON")
                raw.text_factory = lambda b: b.decode("utf-8", "replace")
                raw.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST)
                text_functions.install(raw)
                raw.set_authorizer(_allowed)
                raw.set_progress_handler(
                    lambda: self._deadline is not None and time.monotonic() > self._deadline,
                    _PROGRESS,
                )
            with self.reading(TIMEOUT_S) as tx:
                self.about = {r.key: r.value for r in tx.execute(select(meta))}
        if (found := self.about.get("format")) != str(FORMAT):
            raise ConfigError(
                f"{self.where} has format {found}, this rft reads format {FORMAT}; use the rft "
                f"that wrote it",
                key="RUN",
            )

    @cached_property
    def storage(self) -> Storage:
        """Where the payload is; not opened, as that is its owner's."""
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
        """The answer to one statement of a person.  Raises ConfigError, also while rows are read,
        that says what is wrong with it.
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
        """A read transaction: everything in it sees one moment of the run."""
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
        """What the database says, as a message for people."""
        try:
            yield
        except SQLAlchemyError as e:
            raise self._said(getattr(e, "orig", None) or e, key, timeout_s) from e
        except Exception as e:
            if not (isinstance(e, sqlite3.Error) or type(e).__module__.startswith("psycopg")):
                raise
            raise self._said(e, key, timeout_s) from e

    def columns(self, view: str) -> tuple[str, ...]:
        """Columns of a documented view."""
        with self.errors("SQL", TIMEOUT_S), self.reading(TIMEOUT_S):
            return tuple(self.connection.exec_driver_sql(f"SELECT * FROM {view} LIMIT 0").keys())

    def page(self, where: str, after: str, size: int) -> list[dict[str, Any]]:
        """At most `size` rows of v_experiences with a greater id than `after` that fulfil `where`,
        a person's condition; by id.
        """
        return self._rows(where, "WHERE id > {0} ORDER BY id LIMIT {0}", (after, size))

    def draw(
        self, where: str, num: int, *, step: int | None = None, order: Order = "random"
    ) -> list[dict[str, Any]]:
        """`num` rows of v_experiences that fulfil `where` and were trained in `step`: random ones
        by id, or those of the best or worst reward, which have one, from it on.
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
        """The row of v_experiences with this id, or none."""
        return self._rows("", "WHERE id = {0}", (id,))

    def group_reward(self, group_id: str) -> tuple[float | None, int]:
        """The mean reward of a group's runs, and how many of them have one."""
        what = "avg(reward) AS mean, count(reward) AS scored"
        (found,) = self._rows("", "WHERE group_id = {0}", (group_id,), view="v_runs", what=what)
        return found["mean"], found["scored"]

    def lineage(self, id: str) -> list[dict[str, Any]]:
        """Rows of v_lineage of this experience that tell of a use; by lineage and step."""
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
        """The condition is a subquery, so that nothing in it can affect `rest`."""
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
        """These experiences as their explorer stored them; an edited reward is in the ledger alone.
        Raises PayloadDamaged, ConfigError.
        """
        found: dict[str, Experience] = {}
        e = experiences.c
        mine = select(groups.c.locator, groups.c.num_bytes).where(
            groups.c.id.in_(select(e.group_id).where(e.id.in_(ids)).distinct())
        )
        with self.errors("RUN"), self.reading() as tx:
            hashes = {
                r.id: r.content_hash
                for r in tx.execute(select(e.id, e.content_hash).where(e.id.in_(ids)))
            }
            for locators in _portions(tx.execute(mine).all()):
                for block in self.blocks(locators, tx):
                    found.update(_as_stored(block, hashes))
        if missing := sorted(set(ids) - found.keys()):
            raise PayloadDamaged(
                f"the payload of {missing[0]} is not as it was stored; restore the buffer's folder "
                f"from a copy"
            )
        return found

    def blocks(self, locators: Sequence[str], tx: Connection) -> list[bytes]:
        """Payload by its locators.  Raises PayloadDamaged, ConfigError."""
        try:
            return self.storage.get(locators, tx)
        except OSError as e:
            raise ConfigError(
                f"{e.filename} cannot be read: {e.strerror or e}",
                key="RUN",
                given=str(self.run_dir),
            ) from e

    def trainer_tokens(self, ids: Sequence[str]) -> dict[str, TrainerTokens]:
        """Of these experiences, as far as they are kept."""
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
        # prepared by the server, which refuses a second statement
        with closing(cursor.stream(sql)) as rows:
            first = next(rows, None)
            if first is None:
                # a stream without rows does not say what its columns are
                cursor.execute(sql, prepare=True)
            columns = tuple(d.name for d in cursor.description or ())
            yield QueryResult(columns, rows if first is None else chain([first], rows))

    def _said(self, error: BaseException, key: str, timeout_s: float | None) -> ConfigError:
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
            given = (m[1] or m[2]).rpartition(".")[2]
            with suppress(ConfigError):
                known = dict.fromkeys(c for v in VIEWS for c in self.columns(v))
                near = difflib.get_close_matches(given, known, 1)
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


def _as_stored(block: bytes, hashes: Mapping[str, str]) -> dict[str, Experience]:
    """Experiences of a block by their ids, those of these hashes alone."""
    try:
        rows, held = read(block)
    except UNREADABLE:
        return {}
    return {
        str(x.id): x
        for x, content in zip(rows, held, strict=True)
        if content.hash == hashes.get(str(x.id))
    }


def _portions(blocks: Iterable[Any]) -> Iterator[list[str]]:
    """Locators of blocks, given as (locator, bytes), that may be in memory together."""
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
    """Reading, and functions that compute."""
    reads = action in _READS and not (
        action == sqlite3.SQLITE_FUNCTION and name in _FUNCTIONS_OF_THE_LIBRARY
    )
    return sqlite3.SQLITE_OK if reads else sqlite3.SQLITE_DENY


# load code, tell an address of memory
_FUNCTIONS_OF_THE_LIBRARY = ("load_extension", "fts3_tokenizer")
_READS = {  # SQLite asks before it compiles each part of a statement
    sqlite3.SQLITE_SELECT,
    sqlite3.SQLITE_READ,
    sqlite3.SQLITE_FUNCTION,
    sqlite3.SQLITE_RECURSIVE,
    sqlite3.SQLITE_TRANSACTION,
}

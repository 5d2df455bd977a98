"""The owner's connection to the ledger's database: one owner process, and every transaction exactly
once, even if the connection is lost.

Depends on the database's location and failures, not on its content.  Invariant: the work given to
`run` takes effect exactly once, or not at all with an error.
"""

from __future__ import annotations

import logging
import os
import resource
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from sqlalchemy import Connection, text
from sqlalchemy.engine import Engine, Row
from sqlalchemy.exc import DBAPIError, OperationalError, SQLAlchemyError

from rft.buffer.location import (
    connect,
    leave_pointer,
    ledger_location,
    refuse_foreign,
    refuse_network,
)
from rft.buffer.schema import put_meta, tables_size
from rft.buffer.settings import BufferSettings
from rft.errors import BufferFailed, DiskFull, SetupError
from rft.files.disk import FULL, REMEDY, sync_path
from rft.files.owner_lock import OwnerLock, make_folder
from rft.secrets import redact
from rft.worker.waiting import works

log = logging.getLogger(__name__)
QUIET_S = 0.5  # seconds without a transaction after which the owner counts as idle
MUCH_BYTES = 96 << 20  # written bytes after which a checkpoint is no longer postponed
SMALL_BYTES = 64 << 10  # assumed size of a transaction without payload

R = TypeVar("R")
MOST_PAUSE_S = 10.0
AWAY_PAUSE_S = 2.0  # between two attempts to reach a server that stays away
_BUSY = 5  # SQLITE_BUSY, also as the low byte of its variants
# serialization failure, deadlock, lock not available
_RETRIED = frozenset({"40001", "40P01", "55P03"})
_LOCK_KEY = "hashtextextended('rft ledger ' || :schema, 0)"
# key in meta: the owner's newest transaction; tells after a lost connection whether it committed
_MARK = "transaction"
_OWNER = "owner"  # key in meta: the owner's random name


class Checkpointer:
    """Moves SQLite's write-ahead log into the database file, beside the owner's transactions.

    Runs when the owner is idle after writing, or has written much.  It is optional: the log alone
    suffices for reading and recovery, and if this thread cannot keep up SQLite moves the log within
    a commit (pragma wal_autocheckpoint).
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written = threading.Event()
        self._due = threading.Event()
        self._closed = False
        self._count = self._bytes = 0  # of transactions; changed by the owner's thread only
        self._moved = 0  # bytes moved; changed by this thread only
        self._thread = threading.Thread(target=self._run, name="rft-buffer-checkpoint", daemon=True)
        self._thread.start()

    def written(self, size: int) -> None:
        """Note a committed transaction with payload of `size` bytes."""
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
                count = -1
                while count != self._count and not self._due.is_set():
                    count = self._count
                    self._due.wait(QUIET_S)
                self._moved = self._bytes
                self._due.clear()
                if self._closed:  # clear() may have erased the signal of close()
                    return
                self._move(connection)
        finally:
            connection.close()

    def _move(self, connection: sqlite3.Connection) -> None:
        began = time.monotonic()
        try:
            connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        except sqlite3.Error as e:  # a full or failing disk, which the next commit reports
            log.warning("buffer %s: its write-ahead log could not be moved: %s", self._path, e)
        log.debug("buffer %s: checkpoint of %.3f s", self._path, time.monotonic() - began)


class _Patience:
    """Pauses between the attempts of one transaction.

    The first retry is at once: it is all that a terminated server process needs.
    """

    def __init__(self, settings: BufferSettings) -> None:
        times = settings.max_retry_times
        first = settings.max_retry_interval_s
        self._pauses = (
            [0.0, *(min(MOST_PAUSE_S, first * 2**n) for n in range(times))] if times else []
        )
        self._can_wait = bool(times)
        self._deadline = time.monotonic() + settings.full_disk_wait_s
        self._waits = False
        self.begins_to_wait = False  # the server is away, and has been told so in no earlier pause

    def pause(self, *, away: bool) -> float | None:
        """Return seconds until the next attempt; None: no more.

        `away`: the server of a run that has begun, which is waited for as long as for a disk.
        """
        pause = self._pauses.pop(0) if self._pauses else None
        if pause is None and away and self._can_wait and time.monotonic() < self._deadline:
            pause = AWAY_PAUSE_S
        self.begins_to_wait = bool(pause) and away and not self._waits
        self._waits |= self.begins_to_wait
        return pause


class Database:
    """The owner's database, used by one thread.  `run` executes transactions.

    `location` is for messages.
    """

    def __init__(self, settings: BufferSettings) -> None:
        self.location = ledger_location(settings)
        self._settings = settings
        path = self.location.path
        self._file_lock = None if path is None else OwnerLock(path.with_name(path.name + ".lock"))
        self._engine: Engine | None = None
        self._connection: Connection | None = None
        self._checkpointer: Checkpointer | None = None  # of SQLite
        # PostgreSQL: process id and start of the connection's server process
        self._backend: tuple[int, object] | None = None
        self._name = secrets.token_hex(8)
        self._count = 0
        self._owned = False
        self._unknown = False  # whether the outcome of a commit is unknown
        self._stop = threading.Event()
        # SQLite's file, open all the time: closing a descriptor would drop SQLite's own locks
        self._fd: int | None = None

    def open(self, prepare: Callable[[Connection], R]) -> R:
        """Become the owner; `prepare` creates or checks the tables in the first transaction.

        Raises SetupError on a network file system or without a server, BufferFailed if another
        process is the owner.
        """
        if self._file_lock is not None:
            assert self.location.path is not None
            make_folder(self.location.path.parent, sync=self._settings.durability == "power")
            refuse_network(self.location.path.parent)
            refuse_foreign(self.location.path)
            self._file_lock.acquire()
        leave_pointer(self.location, self._settings.folder)
        self._engine = connect(self.location, durability=self._settings.durability)

        def begin(tx: Connection) -> R:
            result = prepare(tx)
            put_meta(tx, _OWNER, self._name)
            return result

        result = self.run(begin)
        self._owned = True
        if self.location.path is not None:
            self._fd = os.open(self.location.path, os.O_RDONLY | os.O_CLOEXEC)
            self._checkpointer = Checkpointer(self.location.path)
        return result

    def close(self) -> None:
        """Close the database.  May be called twice."""
        if self._checkpointer is not None:
            self._checkpointer.close()
            self._checkpointer = None
        self._leave()
        if self._engine is not None:
            self._engine.dispose()
            self._engine = None
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        if self._file_lock is not None:
            self._file_lock.release()

    def stop(self) -> None:
        """Stop waiting for a lost server; called from another thread."""
        self._stop.set()

    @property
    def connection(self) -> Connection:
        """Return the owner's connection, outside of transactions."""
        if self._connection is None:
            raise BufferFailed(f"the buffer {self.location} is closed")
        return self._connection

    def run(self, work: Callable[[Connection], R], *, size: int = 0) -> R:
        """Run `work` in one transaction, which writes about `size` bytes of payload.

        After a failed lock the transaction is retried `max_retry_times`, without a server for
        `full_disk_wait_s`.  `work` may run several times; one run is committed.  Raises
        BufferFailed: then nothing is stored, or the message says that the outcome is unknown.
        """
        if self._engine is None:
            raise BufferFailed(f"the buffer {self.location} is closed")
        if self._unknown:
            raise BufferFailed(
                f"the buffer {self.location} was lost in the middle of a commit; end the run and "
                f"resume it"
            )
        mark = ""
        patience = _Patience(self._settings)
        results: list[R] = []  # of the newest attempt
        while True:
            try:
                tx = self._usable()
                if mark:
                    with tx.begin():
                        committed = tx.scalar(
                            text("SELECT value FROM meta WHERE key = :key"), {"key": _MARK}
                        )
                    if committed == mark:  # the commit with the lost answer succeeded
                        return results[0]
                mark = ""
                with tx.begin():
                    results = [work(tx)]
                    mark = self._mark(tx)
                if self._checkpointer is not None:
                    self._checkpointer.written(size)
                return results[0]
            except (SQLAlchemyError, OSError) as e:
                lost = self._lost(e)
                pause = patience.pause(away=lost and self._owned)
                if self._stop.is_set() or pause is None or not self._passing(e):
                    self._unknown = bool(mark) and lost
                    raise self._failed(e) from e
                log.warning("buffer %s: %s; trying again in %g s", self.location, cause(e), pause)
                if patience.begins_to_wait:
                    message = "The database of the buffer %s is away: %s.  Retrying for %g s, then the run stops."
                    log.error(message, self.location, cause(e), self._settings.full_disk_wait_s)
                if lost:
                    self._leave()
                with works(f"the buffer's database is away: {cause(e)}"):
                    self._stop.wait(pause)

    def sync(self) -> None:
        """Make committed transactions survive a power loss, whatever the durability."""
        path = self.location.path
        # with durability power each commit has synced
        if path is None or self._fd is None or self._settings.durability == "power":
            return
        try:
            os.fsync(self._fd)
            # SQLite has no locks on these
            for file in (path.with_name(path.name + "-wal"), path.parent):
                sync_path(file)
        except OSError as e:
            raise self._failed(e) from e

    def size(self, tx: Connection) -> int:
        """Return the bytes of the database: SQLite's files, or tables and indexes of the schema."""
        path = self.location.path
        if path is not None:
            return sum(p.stat().st_size for p in path.parent.glob(path.name + "*"))
        return tables_size(tx)

    # ------------------------------------------------------------ inside

    def _usable(self) -> Connection:
        if self._connection is not None:
            return self._connection
        assert self._engine is not None
        connection = self._engine.connect()
        try:
            if self.location.url is not None:
                with connection.begin():
                    self._acquire_lock(connection)
            self._connection = connection
        finally:
            if self._connection is None:
                connection.close()
        return connection

    def _leave(self) -> None:
        connection = self._connection
        self._connection = None
        if connection is not None:
            try:
                connection.invalidate()
                connection.close()
            except SQLAlchemyError as e:  # the connection was lost and is unused
                log.info("buffer %s: closing a lost connection: %s", self.location, cause(e))

    def _acquire_lock(self, tx: Connection) -> None:
        """Take the advisory lock; it belongs to this connection, so only the owner can write."""
        schema = {"schema": self.location.schema}
        if not tx.scalar(text(f"SELECT pg_try_advisory_lock({_LOCK_KEY})"), schema):
            holder = self._holder(tx)
            # this owner's connection from before the loss
            if holder is not None and self._backend == (holder.pid, holder.backend_start):
                tx.execute(text("SELECT pg_terminate_backend(:pid)"), {"pid": holder.pid})
            try:  # give a just killed owner time to end
                with tx.begin_nested():
                    tx.execute(text("SET LOCAL lock_timeout = '1s'"))
                    tx.execute(text(f"SELECT pg_advisory_lock({_LOCK_KEY})"), schema)
            except DBAPIError as e:
                if getattr(e.orig, "sqlstate", None) != "55P03":
                    raise
                raise BufferFailed(
                    f"the buffer {self.location} is open in process "
                    f"{_described(self._holder(tx))}; a buffer has one owner. "
                    "End that run first, or give this one another name."
                ) from None
        me = tx.execute(
            text("SELECT pid, backend_start FROM pg_stat_activity WHERE pid = pg_backend_pid()")
        ).one()
        if (
            self._owned
            and tx.scalar(text("SELECT value FROM meta WHERE key = :key"), {"key": _OWNER})
            != self._name
        ):
            raise BufferFailed(
                f"another process took the buffer {self.location} over while the connection was "
                f"lost; this run must end"
            )
        self._backend = (me.pid, me.backend_start)
        if not self._owned:
            self._make_schema(tx)

    def _holder(self, tx: Connection) -> Row[tuple[int, object, str, str]] | None:
        key = f"(SELECT {_LOCK_KEY} AS k) AS key"
        return tx.execute(
            text(
                "SELECT a.pid, a.backend_start, a.application_name, coalesce(a.client_addr::text, "
                "'local') AS client "
                f"FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid CROSS JOIN {key} "
                "WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1 "
                "AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database()) "
                "AND ((l.classid::bigint << 32) | l.objid::bigint) = key.k"
            ),
            {"schema": self.location.schema},
        ).one_or_none()

    def _make_schema(self, tx: Connection) -> None:
        query = text("SELECT 1 FROM pg_namespace WHERE nspname = :schema")
        # IF NOT EXISTS would need the CREATE right even for an existing schema
        if tx.scalar(query, {"schema": self.location.schema}) is None:
            tx.execute(text(f'CREATE SCHEMA "{self.location.schema}"'))

    def _mark(self, tx: Connection) -> str:
        """Mark this transaction in the database; return "" if its outcome cannot be in doubt."""
        if self.location.url is None:
            return ""
        self._count += 1
        mark = f"{self._name}-{self._count}"
        put_meta(tx, _MARK, mark)
        return mark

    def _lost(self, error: BaseException) -> bool:
        """Return whether the connection is gone, could not be opened, or is unusable."""
        # for SQLite a retry cannot help
        if self.location.url is None or not isinstance(error, DBAPIError):
            return False
        # an error of the driver, not of the server
        unanswered = (
            isinstance(error, OperationalError) and getattr(error.orig, "sqlstate", None) is None
        )
        return error.connection_invalidated or self._connection is None or unanswered

    def _passing(self, error: BaseException) -> bool:
        original = getattr(error, "orig", None)
        busy = (getattr(original, "sqlite_errorcode", 0) & 0xFF) == _BUSY
        return self._lost(error) or busy or getattr(original, "sqlstate", None) in _RETRIED

    def _failed(self, error: BaseException) -> Exception:
        if self._unknown:
            what = "It is unknown whether the last call was stored; resume the run to find out."
        else:
            what = "Nothing of the last call is stored."
        if self._lost(error) and not self._owned:
            return SetupError(
                f"the database of the buffer, {self.location}, cannot be reached: {cause(error)}. "
                "Start the server, or correct buffer.trainer_input.experience_buffer.path"
            )
        message = f"the buffer {self.location} could not be written or read: {cause(error)}. {what}"
        return DiskFull(f"{message}  {REMEDY}") if _no_space(error) else BufferFailed(message)


def _no_space(error: BaseException) -> bool:
    original = getattr(error, "orig", None) or error
    if isinstance(original, OSError):
        return original.errno in FULL
    code = getattr(original, "sqlite_errorcode", 0)
    if (
        code == sqlite3.SQLITE_IOERR_WRITE
        and resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY
    ):
        return True  # the file may not grow
    return (
        code == sqlite3.SQLITE_IOERR_SHMSIZE
        or code & 0xFF == sqlite3.SQLITE_FULL
        or getattr(original, "sqlstate", "") == "53100"
    )


def cause(error: BaseException) -> str:
    """Return the driver's message in one line without secrets."""
    lines = str(getattr(error, "orig", None) or error).strip().splitlines()
    return redact("; ".join(line.strip() for line in lines if line.strip())) or type(error).__name__


def _described(holder: Row[tuple[int, object, str, str]] | None) -> str:
    if holder is None:
        return "unknown"
    return (
        f"{holder.application_name.rpartition(' ')[2] or 'unknown'} ({holder.application_name}, "
        f"{holder.client}, backend {holder.pid})"
    )

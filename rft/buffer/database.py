"""The owner's connection to the ledger's database: one process at a time, every transaction once,
also when the connection is lost.

It knows where the ledger is and how its database fails, not what is in it.  The one invariant: what
`run` is given takes effect exactly once, or not at all and the caller is told.
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
    OwnerLock,
    connect,
    leave_pointer,
    ledger_location,
    make_folder,
    refuse_foreign,
    refuse_network,
)
from rft.buffer.schema import put_meta, tables_size
from rft.buffer.settings import BufferSettings
from rft.errors import BufferFailed, DiskFull, SetupError
from rft.files.disk import FULL, REMEDY, sync_path
from rft.secrets import redact

log = logging.getLogger(__name__)
QUIET_S = 0.5  # without a transaction: the owner has other things to do
MUCH_BYTES = 96 << 20  # written since the last checkpoint: it is not put off any longer
SMALL_BYTES = 64 << 10  # what a transaction without payload counts for

R = TypeVar("R")
MOST_PAUSE_S = 10.0
_BUSY = 5  # SQLITE_BUSY, also as the low byte of its variants
# serialization failure, deadlock, lock not available
_RETRIED = frozenset({"40001", "40P01", "55P03"})
_LOCK_KEY = "hashtextextended('rft ledger ' || :schema, 0)"
# meta: the owner's newest transaction; shows after a lost connection whether it was committed
_MARK = "transaction"
_OWNER = "owner"  # meta: the owner's random name


class Checkpointer:
    """Moves what SQLite's write-ahead log holds into the database file, beside the owner's
    transactions instead of inside them.

    It does so when the owner has written and is quiet now, or has written much.  Nothing depends on
    it: the log alone is enough to read and recover everything, and where this thread cannot keep up
    SQLite does the work in a commit (`wal_autocheckpoint`).
    """

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
                self._moved = self._bytes
                self._due.clear()
                if self._closed:  # what was cleared may have been the call to end
                    return
                self._move(connection)
        finally:
            connection.close()

    def _move(self, connection: sqlite3.Connection) -> None:
        began = time.monotonic()
        try:
            connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        except (
            sqlite3.Error
        ) as e:  # a full or failing disk: the next commit meets it too, and tells
            log.warning("buffer %s: its write-ahead log could not be moved: %s", self._path, e)
        log.debug("buffer %s: checkpoint of %.3f s", self._path, time.monotonic() - began)


class Database:
    """One thread uses it.  `run` does the work; `location` is for messages."""

    def __init__(self, settings: BufferSettings) -> None:
        self.location = ledger_location(settings)
        self._settings = settings
        path = self.location.path
        self._file_lock = None if path is None else OwnerLock(path.with_name(path.name + ".lock"))
        self._engine: Engine | None = None
        self._connection: Connection | None = None
        self._checkpointer: Checkpointer | None = None  # of SQLite
        # of PostgreSQL: process id and start of our server process
        self._backend: tuple[int, object] | None = None
        self._name = secrets.token_hex(8)
        self._count = 0
        self._owned = False
        self._unknown = False  # a commit whose outcome could not be learnt
        self._stop = threading.Event()
        # of SQLite's file; closing one while it is in use would drop SQLite's own locks on it
        self._fd: int | None = None

    def open(self, prepare: Callable[[Connection], R]) -> R:
        """Become the owner; `prepare` makes or checks the tables, in the first transaction.

        Raises SetupError on a network file system or without a server, BufferFailed when another
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
        """Lets go of the database.  May be called twice."""
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
        """From another thread: wait for a lost server no longer."""
        self._stop.set()

    @property
    def connection(self) -> Connection:
        """The owner's connection, inside no transaction."""
        if self._connection is None:
            raise BufferFailed(f"the buffer {self.location} is closed")
        return self._connection

    def run(self, work: Callable[[Connection], R], *, size: int = 0) -> R:
        """`work` in one transaction, which writes payload of about `size` bytes.

        Where the connection is lost or a lock cannot be had, it is repeated as the settings say.

        `work` may run several times; only one of them is committed.  Raises BufferFailed: then
        nothing of it is stored, or the message says that this is not known.
        """
        if self._engine is None:
            raise BufferFailed(f"the buffer {self.location} is closed")
        if self._unknown:
            raise BufferFailed(
                f"the buffer {self.location} was lost in the middle of a commit; end the run and "
                f"resume it"
            )
        mark = ""
        pauses = self._pauses()
        results: list[R] = []  # of the newest attempt
        while True:
            try:
                tx = self._usable()
                if mark:
                    with tx.begin():
                        found = tx.scalar(
                            text("SELECT value FROM meta WHERE key = :key"), {"key": _MARK}
                        )
                    if found == mark:  # the commit whose answer was lost did take place
                        return results[0]
                mark = ""
                with tx.begin():
                    results = [work(tx)]
                    mark = self._mark(tx)
                if self._checkpointer is not None:
                    self._checkpointer.written(size)
                return results[0]
            except (SQLAlchemyError, OSError) as e:
                if self._stop.is_set() or not pauses or not self._passing(e):
                    self._unknown = bool(mark) and self._lost(e)
                    raise self._failed(e) from e
                pause = pauses.pop(0)
                log.warning("buffer %s: %s; trying again in %g s", self.location, cause(e), pause)
                if self._lost(e):
                    self._leave()
                self._stop.wait(pause)

    def sync(self) -> None:
        """What was committed survives a power loss from now on, whatever the durability."""
        path = self.location.path
        # each commit has done so
        if path is None or self._fd is None or self._settings.durability == "power":
            return
        try:
            os.fsync(self._fd)
            # nothing is locked in these
            for file in (path.with_name(path.name + "-wal"), path.parent):
                sync_path(file)
        except OSError as e:
            raise self._failed(e) from e

    def size(self, tx: Connection) -> int:
        """Bytes of the database: files of SQLite, tables and indexes of the schema."""
        path = self.location.path
        if path is not None:
            return sum(p.stat().st_size for p in path.parent.glob(path.name + "*"))
        return tables_size(tx)

    # ------------------------------------------------------------ inside

    def _pauses(self) -> list[float]:
        """The first retry is at once: it is all that a terminated server process needs."""
        times = self._settings.max_retry_times
        first = self._settings.max_retry_interval_s
        return [0.0, *(min(MOST_PAUSE_S, first * 2**n) for n in range(times))] if times else []

    def _usable(self) -> Connection:
        if self._connection is not None:
            return self._connection
        assert self._engine is not None
        connection = self._engine.connect()
        try:
            if self.location.url is not None:
                with connection.begin():
                    self._own(connection)
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
            except SQLAlchemyError as e:  # it was lost; nothing hangs on it any more
                log.info("buffer %s: closing a lost connection: %s", self.location, cause(e))

    def _own(self, tx: Connection) -> None:
        """Take the advisory lock: it is this connection's, so a connection that may write without
        being the owner cannot exist.
        """
        schema = {"schema": self.location.schema}
        if not tx.scalar(text(f"SELECT pg_try_advisory_lock({_LOCK_KEY})"), schema):
            holder = self._holder(tx)
            # ours, from before the loss
            if holder is not None and self._backend == (holder.pid, holder.backend_start):
                tx.execute(text("SELECT pg_terminate_backend(:pid)"), {"pid": holder.pid})
            try:  # an owner that was just killed is given a moment
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
        there = text("SELECT 1 FROM pg_namespace WHERE nspname = :schema")
        # IF NOT EXISTS asks for the right to create it all the same
        if tx.scalar(there, {"schema": self.location.schema}) is None:
            tx.execute(text(f'CREATE SCHEMA "{self.location.schema}"'))

    def _mark(self, tx: Connection) -> str:
        """Name this transaction in the database; "" where a commit cannot be in doubt."""
        if self.location.url is None:
            return ""
        self._count += 1
        mark = f"{self._name}-{self._count}"
        put_meta(tx, _MARK, mark)
        return mark

    def _lost(self, error: BaseException) -> bool:
        """Whether the connection is gone, could not be made, or cannot be used any more."""
        # a file that cannot be opened stays so
        if self.location.url is None or not isinstance(error, DBAPIError):
            return False
        # the driver's error, not the server's
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
        said = f"the buffer {self.location} could not be written or read: {cause(error)}. {what}"
        return DiskFull(f"{said}  {REMEDY}") if _no_space(error) else BufferFailed(said)


def _no_space(error: BaseException) -> bool:
    original = getattr(error, "orig", None) or error
    if isinstance(original, OSError):
        return original.errno in FULL
    code = getattr(original, "sqlite_errorcode", 0)
    if (
        code == sqlite3.SQLITE_IOERR_WRITE
        and resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY
    ):
        return True  # of a file that may not grow
    return (
        code == sqlite3.SQLITE_IOERR_SHMSIZE
        or code & 0xFF == sqlite3.SQLITE_FULL
        or getattr(original, "sqlstate", "") == "53100"
    )


def cause(error: BaseException) -> str:
    """What the driver said, in one line and without secrets."""
    lines = str(getattr(error, "orig", None) or error).strip().splitlines()
    return redact("; ".join(line.strip() for line in lines if line.strip())) or type(error).__name__


def _described(holder: Row[tuple[int, object, str, str]] | None) -> str:
    if holder is None:
        return "unknown"
    return (
        f"{holder.application_name.rpartition(' ')[2] or 'unknown'} ({holder.application_name}, "
        f"{holder.client}, backend {holder.pid})"
    )

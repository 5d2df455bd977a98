"""Location of a ledger: an SQLite file on a local disk, or a schema of a PostgreSQL database; how
to connect to it and find its owner.

Depends on no tables.  Invariant: no displayed or written form of a location contains a password.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import psutil
from sqlalchemy import URL, Connection, NullPool, create_engine, event, make_url
from sqlalchemy.engine import Engine
from sqlalchemy.exc import ArgumentError

from rft.buffer.settings import BufferSettings
from rft.errors import BufferFailed, ConfigError, SetupError
from rft.secrets import learn_secrets

NETWORK_FILE_SYSTEMS = frozenset(
    "nfs nfs4 cifs smb smb2 smb3 smbfs afs ncpfs lustre gpfs beegfs panfs pvfs2 orangefs weka "
    "wekafs ceph "
    "fuse.ceph fuse.glusterfs fuse.sshfs fuse.s3fs fuse.gcsfuse fuse.rclone".split()
)

_SECTION = "buffer.trainer_input.experience_buffer"
KEY = f"{_SECTION}.path"
OUR_TABLES = {"meta", "lineages", "groups", "experiences"}  # in every format
LEDGER_SUFFIX = ".db"
POINTER_SUFFIX = ".ledger.json"
LOG_BYTES = 256 << 20  # size of SQLite's write-ahead log at which a commit moves it into the file
LOCK_WAIT_S = 30  # how long a statement waits for another process's transaction
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}")
_DRIVER = "postgresql+psycopg"
_SECRET_PARTS = frozenset({"password", "sslpassword", "passfile", "sslkey"})
_POWER = ("fsync", "full_page_writes")


def refuse_network(folder: Path) -> None:
    """Raise SetupError if `folder` is on a network file system, where SQLite's locks fail."""
    path = folder.resolve()
    mounts = [p for p in psutil.disk_partitions(all=True) if path.is_relative_to(p.mountpoint)]
    kind, best = max(
        ((p.fstype, p.mountpoint) for p in reversed(mounts)),
        key=lambda m: len(m[1]),
        default=("", ""),
    )
    if kind in NETWORK_FILE_SYSTEMS:
        raise SetupError(
            f"the buffer's folder {folder} is on a network file system ({kind}, mounted at "
            f"{best}), where SQLite can lose data. "
            "Put the run on a local disk (checkpoint_root_dir), or keep the ledger in PostgreSQL "
            "(buffer.trainer_input.experience_buffer.path: postgresql://...)."
        )


def refuse_foreign(path: Path) -> None:
    """Raise ConfigError for another program's file, which is opened read-only."""
    if not path.exists() or not path.stat().st_size:
        return
    try:
        with contextlib.closing(
            sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True)
        ) as database:
            tables = {
                name
                for (name,) in database.execute(
                    "SELECT name FROM sqlite_master WHERE type = 'table'"
                )
            }
    except sqlite3.Error as e:
        if e.sqlite_errorcode not in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
            return  # locked or inaccessible: opening it reports the error
        tables = {"?"}
        what = f"is no database that can be read ({e})"
    else:
        what = f"is a database of another program, with the tables {', '.join(sorted(tables)[:5])}"
    if tables and not tables >= OUR_TABLES:
        raise ConfigError(f"{path} {what}; name another file", key=KEY, given=str(path))


@dataclass(frozen=True)
class Location:
    """Location of buffer `name`: either `path` (SQLite), or `url` and `schema` (PostgreSQL)."""

    name: str
    path: Path | None = None
    url: URL | None = None
    schema: str = ""

    def __str__(self) -> str:
        if self.url is None:
            return str(self.path)
        port = f":{self.url.port}" if self.url.port else ""
        host = self.url.host or self.url.query.get("host", "localhost")
        return f"postgresql://{host}{port}/{self.url.database or ''} schema {self.schema}"


class _Pointer(msgspec.Struct):
    """Content of the file in a run's folder that locates a ledger outside of it."""

    name: str
    url: str
    schema: str = ""


def ledger_location(settings: BufferSettings) -> Location:
    """Return the ledger's location.  Raises ConfigError for an invalid name or URL."""
    if not _IDENTIFIER.fullmatch(settings.name):
        raise ConfigError(
            f"{settings.name!r} is no name for a buffer; letters, digits and _, at most 63",
            key=f"{_SECTION}.name",
        )
    if settings.ledger_url is None:
        return Location(settings.name, settings.folder / f"{settings.name}{LEDGER_SUFFIX}")
    return _at(settings.ledger_url, settings.name, schema_name(settings.run, settings.name))


def schema_name(run: str, name: str) -> str:
    """Return the schema of buffer `name` of `run` ("project/group/name"): both joined by _, the
    last 62 characters if longer than 63.

    Opening the ledger detects two runs with equal schemas: a schema belongs to the run that created
    it.
    """
    joined = re.sub(r"[^A-Za-z0-9_]", "_", f"{run}/{name}" if run else name).lower()
    joined = joined if joined[0].isalpha() or joined[0] == "_" else f"_{joined}"
    short = joined if len(joined) <= 63 else f"_{joined[-62:]}"
    # PostgreSQL reserves the prefix pg_
    return f"run_{short}"[:63] if short.startswith("pg_") else short


def find(run_dir: Path | str, ledger_url: str | None = None) -> Location:
    """Return the location of a run folder's ledger, without the run's configuration.

    `ledger_url`, or the variable RFT_LEDGER_URL, replaces the folder's server address, user and
    password. Passwords are not stored in a run's folder: without either, libpq finds them as for
    psql (PGPASSWORD, ~/.pgpass). Raises BufferFailed if the folder has no ledger or several.
    """
    folder = Path(run_dir) / "buffer"
    ledgers = {p.name.removesuffix(LEDGER_SUFFIX): p for p in folder.glob(f"*{LEDGER_SUFFIX}")}
    ledgers |= {p.name.removesuffix(POINTER_SUFFIX): p for p in folder.glob(f"*{POINTER_SUFFIX}")}
    if len(ledgers) != 1:
        names = ", ".join(sorted(p.name for p in ledgers.values())) or "none"
        raise BufferFailed(
            f"{folder} must hold one buffer (*{LEDGER_SUFFIX} or *{POINTER_SUFFIX}); found "
            f"{names}. "
            "Give the folder of a run that has begun."
        )
    ((name, path),) = ledgers.items()
    if path.name.endswith(LEDGER_SUFFIX):
        return Location(name, path)
    try:
        pointer = msgspec.json.decode(path.read_bytes(), type=_Pointer)
    except (msgspec.MsgspecError, OSError) as e:
        raise BufferFailed(f"{path} is damaged ({e}); name the database with RFT_LEDGER_URL") from e
    if pointer.schema and not _IDENTIFIER.fullmatch(pointer.schema):
        raise BufferFailed(
            f"{path} names schema {pointer.schema!r}, which is no identifier; the file was changed"
        )
    return _at(ledger_url or os.environ.get("RFT_LEDGER_URL") or pointer.url, name, pointer.schema)


def leave_pointer(where: Location, folder: Path) -> None:
    """Write the location of a ledger outside the run's folder into that folder.

    Raises BufferFailed if the ledger was in another schema before.
    """
    file = folder / f"{where.name}{POINTER_SUFFIX}"
    if where.path is not None and where.path.parent == folder:
        file.unlink(missing_ok=True)  # of an earlier run of this name
        return
    with contextlib.suppress(msgspec.MsgspecError, OSError):
        then = msgspec.json.decode(file.read_bytes(), type=_Pointer)
        if where.schema and then.schema not in ("", where.schema):
            raise BufferFailed(
                f"{file}: the ledger is schema {then.schema}; under its present name the run would "
                f"begin an empty one, {where.schema}.  "
                "Give it the old name again (project, group, name), or remove that file to begin "
                "anew"
            )
    url = f"sqlite:///{where.path}" if where.url is None else _without_secrets(where.url)
    folder.mkdir(parents=True, exist_ok=True)
    aside = file.with_suffix(".tmp")
    aside.write_bytes(msgspec.json.encode(_Pointer(where.name, url, where.schema)))
    aside.replace(file)


def connect(where: Location, *, durability: str = "process", read_only: bool = False) -> Engine:
    """Return an engine for one connection at a time.  Raises SetupError without the driver."""
    return (
        _sqlite(where, durability, read_only)
        if where.url is None
        else _postgres(where, durability, read_only)
    )


def _at(text: str, name: str, schema: str) -> Location:
    if text.startswith("sqlite:///"):
        return Location(name, Path(text.removeprefix("sqlite:///")).expanduser())
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):  # the text may contain a password, so do not repeat it
        raise ConfigError(
            "is no database URL; give postgresql://USER:PASSWORD@HOST:PORT/DATABASE or "
            "sqlite:///FILE",
            key=KEY,
        ) from None
    if url.get_backend_name() not in ("postgresql", "postgres"):
        raise ConfigError(
            f"is a database of {url.get_backend_name()}; give "
            f"postgresql://USER:PASSWORD@HOST:PORT/DATABASE, sqlite:///FILE, or leave it "
            "out (SQLite in the run folder)",
            key=KEY,
        )
    secrets = [url.password, *(url.query.get(k) for k in _SECRET_PARTS)]
    learn_secrets(str(s) for s in secrets if s)
    return Location(name, url=url.set(drivername=_DRIVER), schema=schema)


def _without_secrets(url: URL) -> str:
    query = {k: v for k, v in url.query.items() if k not in _SECRET_PARTS}
    return URL.create(
        "postgresql", url.username, None, url.host, url.port, url.database, query
    ).render_as_string()


def _sqlite(where: Location, durability: str, read_only: bool) -> Engine:
    """Return an SQLite engine: WAL, waiting for foreign writers, every transaction of the owner a
    writing one.
    """
    query = {"mode": "ro", "uri": "true"} if read_only else {}
    assert where.path is not None
    if (
        read_only
        and not os.access(where.path.parent, os.W_OK)
        and not Path(f"{where.path}-wal").exists()
    ):
        # no run has it open, and SQLite cannot create its shared memory file
        query["immutable"] = "1"
    database = f"file:{quote(str(where.path))}" if read_only else str(where.path)
    engine = create_engine(
        URL.create("sqlite", database=database, query=query),
        connect_args={"timeout": float(LOCK_WAIT_S), "check_same_thread": False},
        hide_parameters=True,
    )

    @event.listens_for(engine, "connect")
    def prepare(raw: Any, _: object) -> None:
        raw.isolation_level = None  # transactions are begun below, not by the driver
        if not read_only:
            raw.execute("PRAGMA page_size = 16384")  # for a new file; the size that writes least
            raw.execute("PRAGMA journal_mode = WAL")
            raw.execute(f"PRAGMA synchronous = {'FULL' if durability == 'power' else 'NORMAL'}")
            pages = LOG_BYTES // raw.execute("PRAGMA page_size").fetchone()[0]
            # normally `rft.buffer.database.Checkpointer` does it earlier
            raw.execute(f"PRAGMA wal_autocheckpoint = {pages}")
            # KiB; a larger transaction is written twice
            raw.execute("PRAGMA cache_size = -16384")
            raw.execute("PRAGMA temp_store = MEMORY")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN" if read_only else "BEGIN IMMEDIATE")

    return engine


def _postgres(where: Location, durability: str, read_only: bool) -> Engine:
    """Return a PostgreSQL engine with the schema as search path; both sides detect a lost peer
    within seconds.

    A commit returns when the server has flushed it (`synchronous_commit` local): with off a kill -9
    of the server would lose acknowledged rows, so no weaker level exists.  `power` also waits for
    synchronous standbys, and refuses a server that does not flush.
    """
    assert where.url is not None
    try:
        engine = create_engine(
            where.url,
            poolclass=NullPool,
            hide_parameters=True,
            isolation_level="REPEATABLE READ" if read_only else "READ COMMITTED",
            connect_args={
                "connect_timeout": 5,
                "application_name": f"rft {socket.gethostname()[:32]} process {os.getpid()}",
                "keepalives_idle": 5,
                "keepalives_interval": 2,
                "keepalives_count": 2,
                "tcp_user_timeout": 10000,
            },
        )
    except ModuleNotFoundError as e:
        raise SetupError(
            f'the ledger {where} needs the package psycopg: pip install "rft-platform[postgres]", '
            f"or leave the path out "
            "(SQLite in the run folder)"
        ) from e

    @event.listens_for(engine, "connect")
    def prepare(raw: Any, _: object) -> None:
        raw.autocommit = True
        raw.execute(f'SET search_path TO "{where.schema}"')
        if read_only:
            raw.execute("SET default_transaction_read_only = on")
        else:
            raw.execute(f"SET synchronous_commit = {'on' if durability == 'power' else 'local'}")
            raw.execute(f"SET lock_timeout = '{LOCK_WAIT_S}s'")
            raw.execute(
                "SET tcp_keepalives_idle = 5; SET tcp_keepalives_interval = 2; SET "
                "tcp_keepalives_count = 2"
            )
            if durability == "power":
                _refuse_unflushed(raw, where)
        raw.autocommit = False

    return engine


def _refuse_unflushed(raw: Any, where: Location) -> None:
    for name in _POWER:
        (value,) = raw.execute("SELECT current_setting(%s)", (name,)).fetchone()
        if value != "on":
            raise SetupError(
                f"durability: power needs {name} = on, the server of {where} has {value}; change "
                f"the server, or use durability: process"
            )

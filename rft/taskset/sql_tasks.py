"""Tasksets from a database table or query (SQLite, PostgreSQL, other SQLAlchemy databases), read
once, never written.

`path` is a SQLite file or a URL.  `args` holds `table` (null: the taskset's name) or `query`, and
`order_by`.  A column `raw_task` holds whole rows as JSON, as in Trinity-RFT's task tables;
otherwise every column of the table is a column of the row.
Invariant: the same data give the same rows in the same order, because a table is read by its
primary key or by `order_by`.
"""

from __future__ import annotations

import datetime
import decimal
import re
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from sqlalchemy import (
    URL,
    Connection,
    Engine,
    MetaData,
    Table,
    create_engine,
    inspect,
    make_url,
    select,
)
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError

from rft.errors import ConfigError
from rft.files.strict_json import parse_json
from rft.secrets import learn_secrets, redact, url_passwords
from rft.taskset.base import FoundRows, Row, Taskset, sample_fingerprint
from rft.taskset.settings import TasksetSettings

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}(\.[A-Za-z_][A-Za-z0-9_]{0,62})?")
RAW = "raw_task"


class SqlArgs(BaseModel):
    """Selects the rows: a table and its order, or a query."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    table: str | None = None  # optionally with its schema: public.tasks
    query: str | None = None  # one SELECT, with its own ORDER BY
    order_by: tuple[str, ...] = ()  # columns; empty = the primary key

    @model_validator(mode="after")
    def _table_or_query(self) -> SqlArgs:
        if self.query is not None and (self.table is not None or self.order_by):
            raise ValueError(
                "query cannot be combined with table and order_by; put them into the query"
            )
        for name in (*([self.table] if self.table is not None else []), *self.order_by):
            if not _NAME.fullmatch(name):
                raise ValueError(
                    f"{name!r} is no name of a table or column; letters, digits and _, at most 63"
                )
        if self.query is not None and not re.match(
            r"\s*(select|with)\b", self.query, re.IGNORECASE
        ):
            raise ValueError("query must begin with SELECT or WITH; it only reads")
        return self


def open_sql(settings: TasksetSettings) -> Taskset:
    """Read the rows of the table or query in one read-only transaction.  Raises ConfigError without
    secrets.
    """
    learn_secrets(url_passwords(settings.path))
    try:
        args = SqlArgs(**settings.args)
    except ValidationError as e:
        faults = "; ".join(
            f"{'.'.join(map(str, f['loc'])) or 'args'}: {f['msg'].removeprefix('Value error, ')}"
            for f in e.errors()
        )
        raise _error(settings, faults, "args") from None
    engine = _engine(settings)
    shown = redact(settings.path)
    try:
        with engine.connect() as connection:
            rows, what = (
                _query(connection, args)
                if args.query is not None
                else _table(connection, args, settings)
            )
    except SQLAlchemyError as e:
        raise _error(
            settings, f"{shown} cannot be read: {redact(str(getattr(e, 'orig', None) or e))}"
        ) from None
    finally:
        engine.dispose()

    collected = FoundRows(settings)
    for i, values in enumerate(rows):
        try:
            collected.row(_row(settings, values, f"{shown}, {what}, row {i}"), i)
        except ConfigError as e:
            collected.bad(e)
    fingerprint = sample_fingerprint(collected.rows, what, limit=len(collected.rows))
    return Taskset(
        settings, collected.source(lambda place: f"{shown}, {what}, row {place}", fingerprint)
    )


def _engine(settings: TasksetSettings) -> Engine:
    path = settings.path
    try:
        url = (
            make_url(path)
            if "://" in path
            else URL.create("sqlite", database=str(Path(path).expanduser()))
        )
    except ArgumentError as e:
        raise _error(
            settings, f"{redact(path)} is neither a file nor a database URL: {redact(str(e))}"
        ) from None
    if url.drivername in ("postgres", "postgresql"):
        url = url.set(drivername="postgresql+psycopg")
    if url.get_backend_name() == "sqlite":
        file = Path(url.database or "").expanduser()
        if not file.is_file():
            raise _error(
                settings,
                f"{file} does not exist; name a SQLite file, sqlite:///FILE or another database's "
                f"URL",
            )
        return create_engine(
            URL.create(
                "sqlite", database=f"file:{quote(str(file))}", query={"mode": "ro", "uri": "true"}
            )
        )
    try:
        engine = create_engine(url)
    except (NoSuchModuleError, ModuleNotFoundError) as e:
        raise _error(
            settings, f"{redact(path)}: no driver for this database is installed ({e})"
        ) from None
    return (
        engine.execution_options(postgresql_readonly=True)
        if url.get_backend_name() == "postgresql"
        else engine
    )


def _table(
    connection: Connection, args: SqlArgs, settings: TasksetSettings
) -> tuple[Sequence[Any], str]:
    name = args.table or settings.name
    if not _NAME.fullmatch(name):
        raise _error(
            settings, f"the taskset's name {name!r} is no name of a table; write args.table", "args"
        )
    schema, _, table_name = name.rpartition(".")
    inspector = inspect(connection)
    tables = [*inspector.get_table_names(schema or None), *inspector.get_view_names(schema or None)]
    all_of = ", ".join(tables) or "none"
    if table_name not in tables:
        raise _error(
            settings,
            f"there is no table {name!r} (args.table, else the taskset's name); there are {all_of}",
            "args",
        )
    table = Table(table_name, MetaData(), schema=schema or None, autoload_with=connection)
    if unknown := [c for c in args.order_by if c not in table.c]:
        raise _error(
            settings,
            f"table {name} has no column {unknown[0]!r} to order by; it has "
            f"{', '.join(table.c.keys())}",
            "args",
        )
    order = [table.c[c] for c in args.order_by] or list(table.primary_key.columns)
    if not order:
        raise _error(
            settings,
            f"table {name} has no primary key, so its rows have no order; write args.order_by",
            "args",
        )
    return connection.execute(select(table).order_by(*order)).mappings().all(), f"table {name}"


def _query(connection: Connection, args: SqlArgs) -> tuple[Sequence[Any], str]:
    assert args.query is not None
    # with parameters the driver would interpret percent signs
    return connection.execution_options(no_parameters=True).exec_driver_sql(
        args.query
    ).mappings().all(), "query"


def _row(settings: TasksetSettings, values: Any, where: str) -> Row:
    """Return a database row as JSON values; the content of `raw_task` if that column exists."""
    if RAW in values:
        raw = values[RAW]
        try:
            row = (
                parse_json(raw if isinstance(raw, str) else raw.decode())
                if isinstance(raw, str | bytes)
                else raw
            )
        except ValueError as e:
            raise _error(settings, f"{where}: column {RAW} is not JSON ({e})") from None
        if not isinstance(row, dict):
            raise _error(
                settings, f"{where}: column {RAW} must be a JSON object, not {type(row).__name__}"
            )
        return row
    return {
        str(name): _json_value(settings, value, f"{where}, column {name}")
        for name, value in values.items()
    }


def _json_value(settings: TasksetSettings, value: Any, where: str) -> Any:
    if isinstance(value, decimal.Decimal):
        return (
            int(value) if value.is_finite() and value == value.to_integral_value() else float(value)
        )
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, uuid.UUID):
        return str(value)
    if value is None or isinstance(value, str | int | float | bool | dict | list):
        return value
    raise _error(
        settings,
        f"{where}: holds {type(value).__name__}; rows are made of texts, numbers and JSON.  Leave "
        f"it out by args.query",
    )


def _error(settings: TasksetSettings, message: str, rest: str = "path") -> ConfigError:
    value = redact(settings.path) if rest == "path" else settings.args
    return ConfigError(message, key=f"taskset {settings.name}.{rest}", given=value)

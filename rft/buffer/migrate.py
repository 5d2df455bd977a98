"""A ledger's tables made, checked, or brought from an older format to the present one.

It knows formats, not what a run does with them.  The one invariant: `prepare` is part of one transaction, so a ledger is of the old
format or of the new one, whenever the process dies.
"""

from __future__ import annotations

import json
import logging
import sqlite3
import time
from collections.abc import Callable

from sqlalchemy import Connection, Table, insert, inspect, select, text, update
from sqlalchemy.schema import CreateColumn

from rft.buffer.base import Storage, storage_reference
from rft.buffer.intake import MADE_COLUMNS, made
from rft.buffer.location import Location
from rft.buffer.schema import (
    FORMAT,
    V_EXPERIENCES,
    V_GROUPS,
    V_RUNS,
    create_views,
    experiences,
    groups,
    meta,
    metadata,
    mixed_uses,
    put_meta,
    texts,
    token_logprobs,
    v_tokens,
)
from rft.buffer.settings import BufferSettings
from rft.errors import BufferFailed
from rft.types.block import UNREADABLE, decode

log = logging.getLogger(__name__)
_PAGE = 256  # groups whose payload is read at once


def prepare(tx: Connection, settings: BufferSettings, location: Location, storage: Storage) -> None:
    """Tables of the present format.  Raises BufferFailed for a newer one, or for a ledger that another run or storage made."""
    there = inspect(tx).get_table_names()
    if there and not {"meta", "experiences"} <= set(there):
        raise BufferFailed(f"{location} holds tables of another program ({', '.join(sorted(there)[:5])}); name another place")
    if not there:
        metadata.create_all(tx, checkfirst=False)
        create_views(tx)
        tx.execute(insert(meta), [{"key": k, "value": v} for k, v in _fixed(settings).items()])
    else:
        then = {r.key: r.value for r in tx.execute(select(meta))}
        migrate(tx, then.get("format", ""), location, storage)
        for index in mixed_uses.indexes:  # ledgers of format 5 may lack it; every rft of that format can use them with it
            index.create(tx, checkfirst=True)
        _compare(then, _fixed(settings), location)
        for key, value in _fixed(settings).items():
            put_meta(tx, key, value)
    changing = {"max_uses": str(settings.max_uses), "resume_rows": settings.resume_rows}
    for key, value in {**changing, "storage": storage_reference(settings.storage_type)}.items():
        put_meta(tx, key, value)


def migrate(tx: Connection, found: str, location: Location, storage: Storage) -> None:
    """From format `found` up to FORMAT, step by step."""
    if not found.isdecimal() or not 1 <= int(found) <= FORMAT:
        raise BufferFailed(
            f"{location} was made with format {found!r}, this rft knows formats 1 to {FORMAT}. "
            "Use the rft that made it, or give the run another name."
        )
    for number in range(int(found), FORMAT):
        began = time.monotonic()
        _STEPS[number](tx, storage)
        log.info("buffer %s: format %d became %d in %.1f s", location, number, number + 1, time.monotonic() - began)


def _fixed(settings: BufferSettings) -> dict[str, str]:
    """What never changes in a ledger's life."""
    fixed = {"format": str(FORMAT), "storage_type": settings.storage_type, "storage_path": settings.storage_path or ""}
    return fixed | {"storage_args": json.dumps(settings.storage_args, sort_keys=True), "run": settings.run}


def _compare(then: dict[str, str], now: dict[str, str], location: Location) -> None:
    """A file may be moved along with a renamed run, a schema may not."""
    for key, value in now.items():
        if key == "format" or key not in then or then[key] == value or (key == "run" and location.url is None):
            continue
        raise BufferFailed(
            f"{location} was made with {key} {then[key]!r}, this run has {value!r}. Use that, or give the run another name."
        )


def _from_1(tx: Connection, storage: Storage) -> None:
    """Typed columns that were only in the payload, leases, checkpoints, edits, views."""
    there = set(inspect(tx).get_table_names())
    for table in metadata.sorted_tables:
        if table.name in there:
            _add_columns(tx, table)
        else:
            table.create(tx)
    create_views(tx)
    g = groups.c
    last, unread = "", 0
    while page := tx.execute(select(g.id, g.locator).where(g.id > last).order_by(g.id).limit(_PAGE)).all():
        for name, locator in page:
            unread += not _fill(tx, storage, name, locator)
        last = page[-1].id
    if unread:
        log.warning("the payload of %d groups cannot be read; how their experiences were sampled stays unknown (null)", unread)


def _from_2(tx: Connection, _: Storage) -> None:
    """Texts in their own table."""
    if tx.dialect.name == "sqlite" and sqlite3.sqlite_version_info < (3, 35):
        raise BufferFailed(
            f"SQLite {sqlite3.sqlite_version} cannot migrate this ledger to the present format: open it once where SQLite is 3.35 or newer "
            '(python -c "import sqlite3; print(sqlite3.sqlite_version)"), or use the rft that made it.'
        )
    texts.create(tx, checkfirst=True)
    columns = ("prompt_text", "response_text")
    names = ", ".join(columns)
    tx.exec_driver_sql(f"INSERT INTO texts (experience, {names}) SELECT id, {names} FROM experiences")
    tx.exec_driver_sql("DROP VIEW v_experiences")
    for column in columns:
        tx.exec_driver_sql(f"ALTER TABLE experiences DROP COLUMN {column}")


def _from_3(tx: Connection, _: Storage) -> None:
    """The trainer's log-probs, which a run before did not keep."""
    token_logprobs.create(tx, checkfirst=True)


def _from_4(tx: Connection, _: Storage) -> None:
    """Advantages beside the log-probs."""
    tx.exec_driver_sql("DROP VIEW v_tokens")
    tx.execute(text(v_tokens(tx)))


def _from_5(tx: Connection, _: Storage) -> None:
    """Whose reward a row has: that of its run, as far as an older ledger knows; views of runs."""
    _add_columns(tx, experiences)
    for view in ("v_groups", "v_runs", "v_experiences"):
        tx.exec_driver_sql(f"DROP VIEW IF EXISTS {view}")
    for view in (V_EXPERIENCES, V_RUNS, V_GROUPS):
        tx.exec_driver_sql(view)


def _add_columns(tx: Connection, table: Table) -> None:
    there = {c["name"] for c in inspect(tx).get_columns(table.name)}
    for column in table.columns:
        if column.name not in there:
            default = "" if column.nullable or column.server_default is not None else " DEFAULT 0"
            tx.exec_driver_sql(f"ALTER TABLE {table.name} ADD COLUMN {CreateColumn(column).compile(dialect=tx.dialect)}{default}")


def _fill(tx: Connection, storage: Storage, group: str, locator: str) -> bool:
    """The new columns of one group from its payload; False where that is gone or damaged."""
    try:
        (block,) = storage.get([locator], tx)
        rows = decode(block)
    except (BufferFailed, *UNREADABLE):
        return False
    tx.execute(update(groups).where(groups.c.id == group).values(num_bytes=len(block)))
    for row in rows:
        tx.execute(
            update(experiences).where(experiences.c.id == str(row.id)).values(**dict(zip(MADE_COLUMNS, made(row), strict=True)))
        )
    return True


_STEPS: dict[int, Callable[[Connection, Storage], None]] = {1: _from_1, 2: _from_2, 3: _from_3, 4: _from_4, 5: _from_5}

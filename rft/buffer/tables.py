"""Create a ledger's tables, or check that an existing ledger has this format, run and storage.

`prepare` is part of one transaction: a ledger has all of its tables or none, even after a crash.
"""

from __future__ import annotations

import json

from sqlalchemy import Connection, insert, inspect, select

from rft.buffer.location import Location
from rft.buffer.schema import FORMAT, create_views, meta, metadata, put_meta
from rft.buffer.settings import BufferSettings
from rft.buffer.storage_choice import storage_reference
from rft.errors import BufferFailed


def prepare(tx: Connection, settings: BufferSettings, location: Location) -> None:
    """Create or check the tables.  Raises BufferFailed for another format, run or storage."""
    names = inspect(tx).get_table_names()
    if names and not {"meta", "experiences"} <= set(names):
        raise BufferFailed(
            f"{location} holds tables of another program ({', '.join(sorted(names)[:5])}); name "
            f"another place"
        )
    if not names:
        metadata.create_all(tx, checkfirst=False)
        create_views(tx)
        tx.execute(insert(meta), [{"key": k, "value": v} for k, v in _fixed(settings).items()])
    else:
        then = {r.key: r.value for r in tx.execute(select(meta))}
        if then.get("format") != str(FORMAT):
            raise BufferFailed(
                f"{location} was made with format {then.get('format')!r}, this rft knows format "
                f"{FORMAT}. "
                "Use the rft that made it, or give the run another name."
            )
        _compare(then, _fixed(settings), location)
        for key, value in _fixed(settings).items():
            put_meta(tx, key, value)
    changing = {"max_uses": str(settings.max_uses), "resume_rows": settings.resume_rows}
    for key, value in {**changing, "storage": storage_reference(settings.storage_type)}.items():
        put_meta(tx, key, value)


def _fixed(settings: BufferSettings) -> dict[str, str]:
    """Return the entries of `meta` that never change."""
    fixed = {
        "format": str(FORMAT),
        "storage_type": settings.storage_type,
        "storage_path": settings.storage_path or "",
    }
    return fixed | {
        "storage_args": json.dumps(settings.storage_args, sort_keys=True),
        "run": settings.run,
    }


def _compare(then: dict[str, str], now: dict[str, str], location: Location) -> None:
    """Raise BufferFailed for a changed entry; an SQLite file may move to a renamed run, a schema
    may not.
    """
    for key, value in now.items():
        if key not in then or then[key] == value or (key == "run" and location.url is None):
            continue
        raise BufferFailed(
            f"{location} was made with {key} {then[key]!r}, this run has {value!r}. Use that, or "
            f"give the run another name."
        )

"""Payload in the ledger's own database: one transaction stores header and block, so neither exists
without the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from sqlalchemy import Connection, TextClause, bindparam, text

from rft.buffer.storage.base import REMEDY, Storage, storage
from rft.errors import PayloadDamaged
from rft.fault_injection import fault

_MAX_IDS = 500  # per statement: SQLite allows a limited number


def _by_ids(sql: str) -> TextClause:
    return text(f"{sql} WHERE id IN :ids").bindparams(bindparam("ids", expanding=True))


_INSERT = text("INSERT INTO payloads (id, block) VALUES (:id, :block)")
_SELECT = _by_ids("SELECT id, block FROM payloads")
_DELETE = _by_ids("DELETE FROM payloads")
_LAST = text("SELECT coalesce(max(id), 0) FROM payloads")


@storage("sql")
class SqlStorage(Storage):
    """Stores blocks as rows of table `payloads`; a locator is the row's number."""

    def put(self, blocks: Sequence[bytes], connection: Connection) -> list[str]:
        fault("storage.put")
        last = connection.execute(_LAST).scalar_one()  # the owner is the only writer
        rows = [{"id": id, "block": block} for id, block in zip(count(last + 1), blocks)]
        if rows:
            connection.execute(_INSERT, rows)
        return [str(row["id"]) for row in rows]

    def get(self, locators: Sequence[str], connection: Connection) -> list[bytes]:
        if invalid := [x for x in locators if not x.isdecimal() or len(x) > 18]:
            raise PayloadDamaged(
                f"payload {invalid[0][:80]!r} is no row of table payloads. {REMEDY}"
            )
        blocks: dict[str, bytes] = {}
        for ids in _chunks(locators):
            blocks |= {str(id): block for id, block in connection.execute(_SELECT, {"ids": ids})}
        if missing := [x for x in locators if x not in blocks]:
            raise PayloadDamaged(
                f"payload {missing[0]} is not in table payloads ({len(missing)} missing). {REMEDY}"
            )
        return [blocks[x] for x in locators]

    def drop(self, locators: Sequence[str], connection: Connection) -> None:
        for ids in _chunks(locators):
            connection.execute(_DELETE, {"ids": ids})


def _chunks(locators: Sequence[str]) -> list[list[int]]:
    ids = [int(x) for x in locators]
    return [ids[i : i + _MAX_IDS] for i in range(0, len(ids), _MAX_IDS)]

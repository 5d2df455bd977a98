"""Payload in the ledger's own database: one transaction covers header and block, so neither exists
without the other.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, delete, insert

from rft.buffer.base import REMEDY, Storage, storage
from rft.buffer.schema import ask, parts, payloads, put_many
from rft.errors import PayloadDamaged
from rft.fault_injection import fault


@storage("sql")
class SqlStorage(Storage):
    """Blocks are blobs of table `payloads`; a locator is the row's number.  The ledger's connection
    is all it needs.
    """

    def put(self, blocks: Sequence[bytes], connection: Connection) -> list[str]:
        fault("storage.put")
        if connection.dialect.name != "sqlite":
            statement = insert(payloads).returning(payloads.c.id, sort_by_parameter_order=True)
            return [str(x) for x in connection.scalars(statement, [{"block": b} for b in blocks])]
        # this is the only writer
        last = connection.exec_driver_sql("SELECT max(id) FROM payloads").scalar() or 0
        numbers = range(last + 1, last + 1 + len(blocks))
        put_many(connection, payloads, list(zip(numbers, blocks, strict=True)))
        return [str(n) for n in numbers]

    def get(self, locators: Sequence[str], connection: Connection) -> list[bytes]:
        found: dict[str, bytes] = {}
        if odd := [x for x in locators if not x.isdecimal() or len(x) > 18]:
            raise PayloadDamaged(f"payload {odd[0][:80]!r} is no row of table payloads. {REMEDY}")
        for part in parts([int(x) for x in locators]):
            for number, block in ask(
                connection, "SELECT id, block FROM payloads WHERE id IN (??)", many=part
            ).all():
                found[str(number)] = block
        if missing := [x for x in locators if x not in found]:
            raise PayloadDamaged(
                f"payload {missing[0]} is not in table payloads ({len(missing)} missing). {REMEDY}"
            )
        return [found[x] for x in locators]

    def drop(self, locators: Sequence[str], connection: Connection) -> None:
        for part in parts([int(x) for x in locators]):
            connection.execute(delete(payloads).where(payloads.c.id.in_(part)))

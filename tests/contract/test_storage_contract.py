"""The shipped suite on every storage, and what the ledger answers, with the ledger in SQLite and in
PostgreSQL; `power` in short.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rft.buffer.settings import BufferSettings
from rft.testing.storage_contract import StorageContract
from tests.helpers.ledger_contract import LedgerContract, OnPostgres


class TestSql(LedgerContract):
    def settings(self, folder: Path) -> BufferSettings:
        return BufferSettings(folder=folder)


class TestFile(LedgerContract):
    def settings(self, folder: Path) -> BufferSettings:
        return BufferSettings(folder=folder, storage_type="file")


class TestQueue(LedgerContract):
    def settings(self, folder: Path) -> BufferSettings:
        return BufferSettings(folder=folder, storage_type="queue")


class TestQueueInMemory(LedgerContract):
    durable = False

    def settings(self, folder: Path) -> BufferSettings:
        return BufferSettings(folder=folder, storage_type="queue", storage_path="none")


@pytest.mark.e2e
class TestSqlOnPostgres(OnPostgres, TestSql): ...


@pytest.mark.e2e
class TestFileOnPostgres(OnPostgres, TestFile): ...


@pytest.mark.e2e
class TestQueueOnPostgres(OnPostgres, TestQueue): ...


@pytest.mark.e2e
class TestQueueInMemoryOnPostgres(OnPostgres, TestQueueInMemory): ...


@pytest.mark.parametrize("ledger", ["sqlite", "postgres"])
@pytest.mark.parametrize("storage", [TestSql, TestFile, TestQueue])
async def test_power(
    storage: type[StorageContract], ledger: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The same with what survives a power loss; that it does is shown elsewhere."""

    class Contract(storage):  # type: ignore[valid-type,misc]
        def settings(self, folder: Path) -> BufferSettings:
            url = request.getfixturevalue("postgres").url if ledger == "postgres" else None
            return replace(
                super().settings(folder), durability="power", ledger_url=url, run=folder.as_posix()
            )

    contract = Contract()
    await contract.test_resume_goes_on_where_the_manifest_was(tmp_path)
    await contract.close()

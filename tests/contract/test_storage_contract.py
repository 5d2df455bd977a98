"""The shipped suite on every storage."""

from __future__ import annotations

from pathlib import Path

from rft.buffer.settings import BufferSettings
from rft.testing.storage_contract import StorageContract


class TestSql(StorageContract):
    def settings(self, folder: Path) -> BufferSettings:
        return BufferSettings(folder=folder)


class TestSqlPower(StorageContract):
    def settings(self, folder: Path) -> BufferSettings:
        return BufferSettings(folder=folder, durability="power")


class TestQueue(StorageContract):
    def settings(self, folder: Path) -> BufferSettings:
        return BufferSettings(folder=folder, storage_type="queue")


class TestQueuePower(StorageContract):
    def settings(self, folder: Path) -> BufferSettings:
        return BufferSettings(folder=folder, storage_type="queue", durability="power")


class TestQueueInMemory(StorageContract):
    durable = False

    def settings(self, folder: Path) -> BufferSettings:
        return BufferSettings(folder=folder, storage_type="queue", storage_path="none")

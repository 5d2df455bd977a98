"""The base class of payload storages.

A storage keeps blocks of bytes only: ids, states, uses and every queryable column are in the
ledger.  Invariant: a block whose locator the ledger has committed stays readable and unchanged, for
as long as the storage promises durability.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from sqlalchemy import Connection

from rft.plugins import kind

storage = kind("storage")
REMEDY = (  # for missing or damaged payload
    "Restore it from a copy and resume, or resume with "
    "buffer.trainer_input.experience_buffer.on_damaged_payload: explain "
    "to leave these groups out (counted as payload_damaged)"
)


class StorageSettings(Protocol):
    """Settings of the buffer that storages read."""

    @property
    def name(self) -> str: ...
    @property
    def folder(self) -> Path: ...
    @property
    def storage_path(self) -> str | None: ...
    @property
    def durability(self) -> str: ...


class Storage:
    """Payload: a block for each group (encoded rows, see `rft.types.block`) and each image file.

    A subclass defines `put` and `get`.

    All methods run on the ledger's thread.  `connection` is the ledger's open transaction: a
    storage in the same database writes into it; other storages ignore it and are durable when `put`
    returns.  `__init__` takes the settings and, as keyword arguments, the storage arguments that
    the plugin's pydantic model has checked.  `__init__` must not open files, and `get` must work
    without `open`: an audit calls nothing else.
    """

    durable: bool = True  # whether blocks survive the process

    def __init__(self, settings: StorageSettings) -> None: ...

    def open(self) -> None:
        """Prepare for `put`."""

    def put(self, blocks: Sequence[bytes], connection: Connection) -> list[str]:
        """Store blocks; return one locator each."""
        raise NotImplementedError

    def get(self, locators: Sequence[str], connection: Connection) -> list[bytes]:
        """Return the blocks in the order of `locators`.

        Raises PayloadDamaged, naming the place, for a missing or damaged block.
        """
        raise NotImplementedError

    def drop(self, locators: Sequence[str], connection: Connection) -> None:
        """Free blocks that are never read again."""

    def close(self) -> None:
        """Release files and locks.  May be called twice, and without `open`."""

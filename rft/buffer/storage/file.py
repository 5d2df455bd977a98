"""Payload as files: one immutable segment per block, in folders of at most 1000.

A segment is written under another name, synced if the durability requires it, and renamed: a file
with the final name is always complete.  Reading a segment needs neither the ledger nor this
program. Invariant: a segment never changes after its rename, and its number is never reused.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from sqlalchemy import Connection

from rft.buffer.storage.base import REMEDY, StorageSettings, storage
from rft.buffer.storage.segment import SegmentFolder, read, write
from rft.errors import PayloadDamaged
from rft.fault_injection import fault
from rft.files.disk import sync_path

MAGIC = b"RFTF"
SUFFIX = ".blk"
_ASIDE = ".tmp"
_PER_FOLDER = 1000


@storage("file")
class FileStorage(SegmentFolder):
    """Stores segments; a locator is "folder/number", and every process begins a new folder."""

    def __init__(self, settings: StorageSettings) -> None:
        super().__init__(settings)
        self._part = 0
        self._count = 0

    def open(self) -> None:
        super().open()
        self._part = max(
            (int(p.name) for p in self._folder.iterdir() if p.name.isdecimal()), default=0
        )
        # left by a killed process
        for partial in (self._folder / f"{self._part:06d}").glob(f"*{_ASIDE}"):
            partial.unlink()
        self._next_part()

    def put(self, blocks: Sequence[bytes], connection: Connection) -> list[str]:
        locators: list[str] = []
        try:
            for start in range(0, len(blocks), _PER_FOLDER):
                if self._count + len(blocks[start : start + _PER_FOLDER]) > _PER_FOLDER:
                    self._next_part()
                for block in blocks[start : start + _PER_FOLDER]:
                    locators.append(f"{self._part:06d}/{self._count:04d}")
                    self._count += 1
                    self._write(self._path(locators[-1]), block)
                if self._power:
                    sync_path(self._folder / f"{self._part:06d}")
        except BaseException:
            for locator in locators:  # the ledger does not refer to them, and the disk may be full
                self._path(locator).unlink(missing_ok=True)
            raise
        return locators

    def get(self, locators: Sequence[str], connection: Connection) -> list[bytes]:
        return [read(self._path(x), MAGIC, alone=True) for x in locators]

    def drop(self, locators: Sequence[str], connection: Connection) -> None:
        for locator in locators:
            self._path(locator).unlink(missing_ok=True)
        for part in {self._path(x).parent for x in locators}:
            if part.name != f"{self._part:06d}" and part.is_dir() and not any(part.iterdir()):
                part.rmdir()

    def _path(self, locator: str) -> Path:
        if locator.startswith("/") or ".." in locator or "\0" in locator:
            raise PayloadDamaged(f"payload {locator[:80]!r} is no file of this buffer. {REMEDY}")
        return self._folder / f"{locator}{SUFFIX}"

    def _write(self, path: Path, block: bytes) -> None:
        aside = path.with_suffix(_ASIDE)
        try:
            fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                write(fd, MAGIC, block)
                if self._power:
                    os.fdatasync(fd)
            finally:
                os.close(fd)
            fault("storage.put.aside")
            aside.rename(path)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise

    def _next_part(self) -> None:
        self._part = self._part + 1
        self._count = 0
        (self._folder / f"{self._part:06d}").mkdir(exist_ok=True)
        if self._power:
            sync_path(self._folder)

"""Payload in memory, backed by write-ahead segments (or, with path "none", in memory only).

A segment is a file of records (see `segment`); only the process that began it appends.  The ledger
refers to a record only after it was written, so a torn tail is never read.  Memory is a bounded
cache over the segments; without segments it is the only copy.  Invariant: the newest segment is
never deleted, so no segment number or locator is reused.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from sqlalchemy import Connection, text

from rft.buffer.storage.base import REMEDY, StorageSettings, storage
from rft.buffer.storage.segment import SegmentFolder, read, write
from rft.errors import PayloadDamaged
from rft.files.disk import sync_path

MEMORY_ONLY = "none"
MAGIC = b"RFTQ"
SUFFIX = ".seg"
SEGMENT_BYTES = 64 << 20
CACHE_BYTES = 256 << 20
_REFERRED = text(
    "SELECT 1 FROM groups WHERE locator LIKE :locator UNION ALL "
    "SELECT 1 FROM images WHERE locator LIKE :locator LIMIT 1"
)


@storage("queue")
class QueueStorage(SegmentFolder):
    """Stores records; a locator is "segment:offset", or "m:number" of a block in memory only."""

    def __init__(self, settings: StorageSettings) -> None:
        self.durable = settings.storage_path != MEMORY_ONLY
        super().__init__(settings)
        self._memory: OrderedDict[str, bytes] = OrderedDict()
        self.resident_bytes = 0  # of blocks in memory
        self._file: int | None = None
        self._segment = 0
        self._offset = 0
        self._count = 0
        # part of locators, to distinguish blocks of other processes
        self._process = os.urandom(8).hex()

    def open(self) -> None:
        if self.durable:
            super().open()
            self._segment = max((int(p.stem) for p in self._folder.glob(f"*{SUFFIX}")), default=0)
            self._next_segment()

    def put(self, blocks: Sequence[bytes], connection: Connection) -> list[str]:
        if not self.durable:
            locators = [f"m:{self._process}-{self._count + i}" for i in range(len(blocks))]
            self._count += len(blocks)
            self._memory.update(zip(locators, blocks, strict=True))
            self.resident_bytes += sum(map(len, blocks))
            return locators
        if self._offset >= SEGMENT_BYTES:
            self._next_segment()
        assert self._file is not None, "put before open"
        began = self._offset
        locators = []
        try:
            for block in blocks:
                locators.append(f"{self._segment}:{self._offset}")
                self._offset += write(self._file, MAGIC, block, self._offset)
            if self._power:
                os.fdatasync(self._file)
        except OSError:
            # the ledger does not refer to these records, and the disk may be full
            self._offset = began
            os.ftruncate(self._file, began)
            raise
        self._memory.update(zip(locators, blocks, strict=True))
        self.resident_bytes += sum(map(len, blocks))
        while self.resident_bytes > CACHE_BYTES:
            self.resident_bytes -= len(self._memory.popitem(last=False)[1])
        return locators

    def get(self, locators: Sequence[str], connection: Connection) -> list[bytes]:
        return [self._memory[x] if x in self._memory else self._read(x) for x in locators]

    def drop(self, locators: Sequence[str], connection: Connection) -> None:
        """Free memory at once, and a segment once no group refers to it."""
        for x in locators:
            self.resident_bytes -= len(self._memory.pop(x, b""))
        if self.durable:
            for segment in sorted({int(x.partition(":")[0]) for x in locators} - {self._segment}):
                if connection.scalar(_REFERRED, {"locator": f"{segment}:%"}) is None:
                    self._path(segment).unlink(missing_ok=True)

    def close(self) -> None:
        self._end_segment()
        super().close()

    def _read(self, locator: str) -> bytes:
        segment, _, offset = locator.partition(":")
        if segment == "m":
            raise PayloadDamaged(
                f"payload {locator} was in memory only and was lost with its process (path: none)"
            )
        if not (segment.isdecimal() and offset.isdecimal() and len(locator) < 40):
            raise PayloadDamaged(f"payload {locator[:80]!r} is no place in a segment. {REMEDY}")
        return read(self._path(int(segment)), MAGIC, int(offset))

    def _path(self, segment: int) -> Path:
        return self._folder / f"{segment:06d}{SUFFIX}"

    def _end_segment(self) -> None:
        if self._file is not None:
            os.fdatasync(self._file)
            os.close(self._file)
            self._file = None

    def _next_segment(self) -> None:
        """Begin a new segment.  Every process does so, because an earlier process may have torn its
        last record.
        """
        self._end_segment()
        self._segment += 1
        self._offset = 0
        self._file = os.open(
            self._path(self._segment), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600
        )
        if self._power:  # the name must survive too
            sync_path(self._folder)

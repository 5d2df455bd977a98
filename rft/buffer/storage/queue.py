"""Payload in memory, with write-ahead segments behind it (or, with path "none", without).

A segment is a file of records: magic, length, xxh3-64 of the block, block.  The ledger refers to a record only after it was
written, so a torn tail is never read.  Memory is a cache of bounded size over the segments; without segments it is the only copy.
"""

from __future__ import annotations

import os
import struct
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import xxhash
from sqlalchemy import Connection

from rft.buffer.base import storage
from rft.buffer.settings import BufferSettings
from rft.errors import BufferFailed

MEMORY_ONLY = "none"
_RECORD = struct.Struct("<4sQQ")
_MAGIC = b"RFTQ"
SEGMENT_BYTES = 256 << 20
CACHE_BYTES = 256 << 20


@storage("queue")
class QueueStorage:
    """A locator is "segment:offset" of a record, or "m:number" of a block that is in memory only."""

    def __init__(self, settings: BufferSettings) -> None:
        self.durable = settings.storage_path != MEMORY_ONLY
        path = settings.storage_path if self.durable else None
        self._folder = Path(path).expanduser() if path else settings.folder / f"{settings.name}.segments"
        self._power = settings.durability == "power"
        self._memory: OrderedDict[str, bytes] = OrderedDict()
        self._cached_bytes = 0
        self._file: int | None = None
        self._segment = 0
        self._offset = 0
        self._count = 0
        self._process = os.urandom(8).hex()  # a block of another process must not be taken for this one's

    def open(self) -> None:
        if self.durable:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._segment = max((int(p.stem) for p in self._folder.glob("*.seg")), default=0)
            self._next_segment()

    def put(self, blocks: Sequence[bytes], connection: Connection) -> list[str]:
        locators = [self._remember(b) if not self.durable else self._write(b) for b in blocks]
        if self._power and self._file is not None:
            os.fdatasync(self._file)
        return locators

    def get(self, locators: Sequence[str], connection: Connection) -> list[bytes]:
        return [self._memory[x] if x in self._memory else self._read(x) for x in locators]

    def drop(self, locators: Sequence[str], connection: Connection) -> None:
        for x in locators:
            self._cached_bytes -= len(self._memory.pop(x, b""))

    def close(self) -> None:
        if self._file is not None:
            os.fdatasync(self._file)
            os.close(self._file)
            self._file = None

    def _remember(self, block: bytes) -> str:
        self._count += 1
        locator = f"m:{self._process}-{self._count}"
        self._memory[locator] = block
        self._cached_bytes += len(block)
        return locator

    def _write(self, block: bytes) -> str:
        if self._offset >= SEGMENT_BYTES:
            self._next_segment()
        assert self._file is not None, "put before open"
        record = _RECORD.pack(_MAGIC, len(block), xxhash.xxh3_64_intdigest(block)) + block
        locator = f"{self._segment}:{self._offset}"
        written = 0
        while written < len(record):  # a short write is repeated; at its own offset, so that a failed one leaves no gap behind
            written += os.pwrite(self._file, memoryview(record)[written:], self._offset + written)
        self._offset += len(record)
        self._memory[locator] = block
        self._cached_bytes += len(block)
        while self._cached_bytes > CACHE_BYTES:
            self._cached_bytes -= len(self._memory.popitem(last=False)[1])
        return locator

    def _read(self, locator: str) -> bytes:
        segment, _, offset = locator.partition(":")
        if segment == "m":
            raise BufferFailed(f"payload {locator} was in memory only and went with its process (storage_path: none)")
        path = self._folder / f"{int(segment):06d}.seg"
        try:
            with path.open("rb") as f:
                f.seek(int(offset))
                head = f.read(_RECORD.size)
                magic, size, digest = _RECORD.unpack(head) if len(head) == _RECORD.size else (b"", 0, 0)
                block = f.read(size) if magic == _MAGIC else b""
        except FileNotFoundError:
            raise BufferFailed(f"buffer segment {path} is missing; restore it, or start a new run") from None
        if magic != _MAGIC or len(block) != size or xxhash.xxh3_64_intdigest(block) != digest:
            raise BufferFailed(f"buffer segment {path} is damaged at byte {offset}; restore it, or start a new run")
        return block

    def _next_segment(self) -> None:
        """Every process begins its own segment: what an earlier one may have torn is never appended to."""
        self.close()
        self._segment += 1
        self._offset = 0
        path = self._folder / f"{self._segment:06d}.seg"
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        if self._power:  # the name must survive too
            folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

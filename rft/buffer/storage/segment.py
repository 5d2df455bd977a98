"""The record format of payload files, which detects a torn, foreign or changed record.

A record is a magic of 4 bytes, length and xxh3-64 of the block (8 bytes each, little-endian), and
the block.  The block is a frame of `rft.types.block`, which begins with the headers of its
experiences, so a file can be read without the ledger.  Invariant: `read` returns the block that was
written, or raises PayloadDamaged with the file's name.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

import xxhash

from rft.buffer.storage.base import REMEDY, Storage, StorageSettings
from rft.errors import PayloadDamaged
from rft.fault_injection import fault, planned
from rft.files.owner_lock import OwnerLock, make_folder

HEAD = struct.Struct("<4sQQ")


class SegmentFolder(Storage):
    """A storage of segments in a folder with one owner process."""

    def __init__(self, settings: StorageSettings) -> None:
        path = settings.storage_path if self.durable else None
        self._folder = (
            Path(path).expanduser() if path else settings.folder / f"{settings.name}.segments"
        )
        self._power = settings.durability == "power"
        self._lock = OwnerLock(self._folder / "segments.lock")

    def open(self) -> None:
        make_folder(self._folder, sync=self._power)
        self._lock.acquire()

    def close(self) -> None:
        self._lock.release()


def write(fd: int, magic: bytes, block: bytes, offset: int = 0) -> int:
    """Write a record at `offset`; return its size in bytes.  After an OSError no record exists."""
    fault("storage.put")
    parts = [HEAD.pack(magic, len(block), xxhash.xxh3_64_intdigest(block)), block]
    size = HEAD.size + len(block)
    if planned("storage.put.torn"):
        os.pwrite(fd, b"".join(parts)[: size // 2], offset)
        fault("storage.put.torn")
    written = os.pwritev(fd, parts, offset)
    while written < size:  # continue a short write; a full disk raises at the next write
        written += os.pwrite(fd, memoryview(b"".join(parts))[written:], offset + written)
    return size


def read(path: Path, magic: bytes, offset: int = 0, *, alone: bool = False) -> bytes:
    """Read the block of the record at `offset`; `alone`: the file contains no other record."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            head = file.read(HEAD.size)
            stored_magic, size, digest = (
                HEAD.unpack(head) if len(head) == HEAD.size else (head[:4], 0, 0)
            )
            if stored_magic != magic:
                raise PayloadDamaged(
                    f"{path} holds no rft record at byte {offset}: it begins with {stored_magic!r}. "
                    f"{REMEDY}"
                )
            available = os.fstat(file.fileno()).st_size - offset - HEAD.size
            # a damaged length must not request more memory than the file has bytes
            block = file.read(size) if size <= available else b""
    except FileNotFoundError:
        raise PayloadDamaged(f"buffer segment {path} is missing. {REMEDY}") from None
    if (
        len(block) != size
        or (alone and available != size)
        or xxhash.xxh3_64_intdigest(block) != digest
    ):
        raise PayloadDamaged(f"buffer segment {path} is damaged at byte {offset}. {REMEDY}")
    return block

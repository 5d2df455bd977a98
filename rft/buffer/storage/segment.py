"""Payload in files: one record format for all of them, by which a torn, foreign or changed record
is detected.

A record is a magic of 4 bytes, length and xxh3-64 of the block (8 bytes each, little-endian), and
the block.  The block is a frame of `rft.types.block`, which begins with the headers of its
experiences, so a file is read without the ledger. The one invariant: `read` gives back what `write`
was given, or raises PayloadDamaged with the file's name.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

import xxhash

from rft.buffer.base import REMEDY, Storage
from rft.buffer.location import OwnerLock, make_folder
from rft.buffer.settings import BufferSettings
from rft.errors import PayloadDamaged
from rft.fault_injection import fault, planned

HEAD = struct.Struct("<4sQQ")


class SegmentFolder(Storage):
    """A storage that keeps segments in its own folder, which one process owns."""

    def __init__(self, settings: BufferSettings) -> None:
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
    """Writes a record at `offset`; its size in bytes.  Raises OSError; what stands at `offset` then
    is not a record.
    """
    fault("storage.put")
    parts = [HEAD.pack(magic, len(block), xxhash.xxh3_64_intdigest(block)), block]
    size = HEAD.size + len(block)
    if planned("storage.put.torn"):
        os.pwrite(fd, b"".join(parts)[: size // 2], offset)
        fault("storage.put.torn")
    written = os.pwritev(fd, parts, offset)
    while written < size:  # a short write is gone on with; a full disk raises at the next one
        written += os.pwrite(fd, memoryview(b"".join(parts))[written:], offset + written)
    return size


def read(path: Path, magic: bytes, offset: int = 0, *, alone: bool = False) -> bytes:
    """The block of the record at `offset`; `alone`: the file holds nothing else."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            head = file.read(HEAD.size)
            found, size, digest = HEAD.unpack(head) if len(head) == HEAD.size else (head[:4], 0, 0)
            if found != magic:
                raise PayloadDamaged(
                    f"{path} holds no rft record at byte {offset}: it begins with {found!r}. "
                    f"{REMEDY}"
                )
            left = os.fstat(file.fileno()).st_size - offset - HEAD.size
            # a changed length must not ask for more memory than the file has bytes
            block = file.read(size) if size <= left else b""
    except FileNotFoundError:
        raise PayloadDamaged(f"buffer segment {path} is missing. {REMEDY}") from None
    if len(block) != size or (alone and left != size) or xxhash.xxh3_64_intdigest(block) != digest:
        raise PayloadDamaged(f"buffer segment {path} is damaged at byte {offset}. {REMEDY}")
    return block

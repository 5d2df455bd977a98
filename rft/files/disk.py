"""Small files read within a bound, written whole or not at all, and the one name of a disk that is
full.

Knows nothing of what files mean.  Invariant: a reader never waits for a pipe or a device, and never
sees half a file.
"""

from __future__ import annotations

import errno
import os
import stat
from io import FileIO
from pathlib import Path
from typing import BinaryIO

from rft.errors import DiskFull

REMEDY = (
    "Free space (`df -h`; `df -i` for the number of files) or raise the quota; the same "
    "command then goes on from the last checkpoint"
)
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_PIECE = 1 << 16  # bytes that are read at once in search of a line's end
# of libraries that hide the number
_FULL_TEXTS = ("No space left on device", "Disk quota exceeded", "File too large")


def open_regular(path: Path) -> BinaryIO:
    """A plain file, to read.  Raises OSError saying what it is instead."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(fd, "rb")
    os.close(fd)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, f"is {_kind(mode)}, not a plain file", str(path))


def read_regular(path: Path, most: int) -> bytes:
    """The content of a plain file of at most `most` bytes.  Raises OSError saying what it is
    instead, or that it is larger.
    """
    with open_regular(path) as file:
        data = file.read(most + 1)  # files of /proc say that they have no bytes
    if len(data) > most:
        raise OSError(
            errno.EINVAL,
            f"is too large; a file of this kind may have at most {most:,} bytes",
            str(path),
        )
    return data


def write_whole(path: Path, data: str | bytes, *, mode: int = 0o600) -> None:
    """Written aside, fsynced, renamed."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(aside, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(data.encode("utf-8", "backslashreplace") if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


def drop_cut_line(file: FileIO | BinaryIO) -> int:
    """Truncates `file`, open for reading and writing, after its last end of a line; how many bytes
    a crash had left there.
    """
    at = size = file.seek(0, os.SEEK_END)
    found = -1
    while at > 0 and found < 0:
        start = max(0, at - _PIECE)
        file.seek(start)
        found = file.read(at - start).rfind(b"\n")
        at = start
    whole = at + found + 1
    if whole < size:
        file.truncate(whole)
    return size - whole


def sync_path(path: Path) -> None:
    """A file's bytes, or the names in a folder, survive a power loss."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def is_full(error: BaseException) -> bool:
    """Whether this error, or one that caused it, says that no space is left."""
    return _fullness(error) is not None


def _fullness(error: BaseException) -> BaseException | None:
    """The first, of this error and those that caused it, that says so."""
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        if (
            isinstance(at, DiskFull)
            or (isinstance(at, OSError) and at.errno in FULL)
            or any(t in str(at) for t in _FULL_TEXTS)
        ):
            return at
        at = at.__cause__ or at.__context__
    return None


def full(error: BaseException, what: str = "") -> DiskFull:
    """The same as the one error that a full disk is; `what` was being written, where the error does
    not name it.
    """
    found = _fullness(error) or error
    if isinstance(found, DiskFull):
        return found
    name = (
        str(found.filename) if isinstance(found, OSError) and found.filename is not None else what
    )
    said = (
        found.strerror
        if isinstance(found, OSError) and found.strerror
        else str(found).strip().splitlines()[0]
    )
    return DiskFull(f"{name or 'a file of the run'} cannot be written: {said}.  {REMEDY}")


def _kind(mode: int) -> str:
    kinds = {
        stat.S_IFIFO: "a pipe",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
        stat.S_IFSOCK: "a socket",
    }
    return kinds.get(stat.S_IFMT(mode), "something else")

"""Bounded reads, atomic writes, and one error for a full disk.

Depends on no contents of files.  Invariant: a reader never waits for a pipe or a device, and never
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
_PIECE = 1 << 16  # bytes read at once in search of a line's end
# messages of libraries that hide errno
_FULL_TEXTS = ("No space left on device", "Disk quota exceeded", "File too large")


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading.

    Raises OSError naming any other kind.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(fd, "rb")
    os.close(fd)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, f"is {_kind(mode)}, not a plain file", str(path))


def read_regular(path: Path, most: int) -> bytes:
    """Read a regular file of at most `most` bytes.

    Raises OSError for other kinds, or larger ones.
    """
    with open_regular(path) as file:
        data = file.read(most + 1)  # files of /proc report size 0
    if len(data) > most:
        raise OSError(
            errno.EINVAL,
            f"is too large; a file of this kind may have at most {most:,} bytes",
            str(path),
        )
    return data


def write_whole(path: Path, data: str | bytes, *, mode: int = 0o600) -> None:
    """Write a file atomically: write aside, fsync, rename."""
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
    """Truncate `file` (open for reading and writing) after its last newline; return bytes cut."""
    at = size = file.seek(0, os.SEEK_END)
    newline = -1
    while at > 0 and newline < 0:
        start = max(0, at - _PIECE)
        file.seek(start)
        newline = file.read(at - start).rfind(b"\n")
        at = start
    end = at + newline + 1
    if end < size:
        file.truncate(end)
    return size - end


def sync_path(path: Path) -> None:
    """Make a file's bytes, or a folder's names, survive a power loss."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def is_full(error: BaseException) -> bool:
    """Whether this error, or a cause of it, is a full disk."""
    return _fullness(error) is not None


def _fullness(error: BaseException) -> BaseException | None:
    """Return the first error in the chain of causes that is a full disk."""
    visited: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in visited:
        visited.add(id(at))
        if (
            isinstance(at, DiskFull)
            or (isinstance(at, OSError) and at.errno in FULL)
            or any(t in str(at) for t in _FULL_TEXTS)
        ):
            return at
        at = at.__cause__ or at.__context__
    return None


def full(error: BaseException, what: str = "") -> DiskFull:
    """Convert to DiskFull; `what` was being written, if the error names no file."""
    cause = _fullness(error) or error
    if isinstance(cause, DiskFull):
        return cause
    name = what or "a file of the run"
    reason = str(cause).strip().splitlines()[0]
    if isinstance(cause, OSError):
        name = name if cause.filename is None else str(cause.filename)
        reason = cause.strerror or reason
    return DiskFull(f"{name} cannot be written: {reason}.  {REMEDY}")


def _kind(mode: int) -> str:
    kinds = {
        stat.S_IFIFO: "a pipe",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
        stat.S_IFSOCK: "a socket",
    }
    return kinds.get(stat.S_IFMT(mode), "something else")

"""Folders that survive a power loss, and files that one process owns."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from rft.errors import BufferFailed
from rft.files.disk import sync_path


def make_folder(path: Path, *, sync: bool) -> None:
    """The folder and its parents; `sync`: their names survive a power loss."""
    path.mkdir(parents=True, exist_ok=True)
    if sync:
        device = path.stat().st_dev
        for folder in (path, *path.absolute().parents):
            if folder.stat().st_dev != device:
                break
            with contextlib.suppress(PermissionError):  # not ours: it was there long before
                sync_path(folder)


class OwnerLock:
    """One process owns the ledger; the lock ends with the process, however it ends."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None

    def acquire(self) -> None:
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(fd)
            raise BufferFailed(
                f"the buffer {self._path.with_suffix('')} is open in process {holder}; a buffer "
                f"has one owner. "
                "End that run first, or give this one another name."
            ) from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        self._fd = fd

    def release(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

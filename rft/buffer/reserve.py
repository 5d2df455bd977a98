"""Space on the ledger's disk that is kept for the trainer: when the disk is full, appends wait and steps go on for a while.

The one invariant: while the reserve is not whole, `fill` raises DiskFull or makes it whole, so an append never takes its space.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from rft.errors import DiskFull


class Reserve:
    """A file that holds nothing.  One thread uses it; without a path (a ledger elsewhere) it does nothing."""

    def __init__(self, path: Path | None, size: int) -> None:
        self._path, self._size = path, size
        self._whole = path is None

    def fill(self) -> None:
        """Takes the space, if it was given away."""
        if self._whole:
            return
        assert self._path is not None
        fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, self._size)
        except OSError as e:
            if e.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            os.ftruncate(fd, 0)
            raise DiskFull(
                f"{self._path.parent} has not {self._size} bytes free for the trainer: {e.strerror}. Nothing of the last call is stored."
            ) from None
        finally:
            os.close(fd)
        self._whole = True

    def spend(self) -> bool:
        """Gives the space away; False if that was done before."""
        if self._path is None or not self._whole:
            return False
        os.truncate(self._path, 0)
        self._whole = False
        return True

    def close(self) -> None:
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            self._whole = False

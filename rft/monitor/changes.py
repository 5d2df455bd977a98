"""Report changes of files below a folder with inotify.  Depends on no run."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from rft.errors import SetupError


class FolderChanges:
    """Watches folders, and with `recursive` their subfolders.  Raises SetupError without inotify."""

    _IN_MODIFY = 0x2
    _IN_CREATE = 0x100
    _IN_MOVED_TO = 0x80

    def __init__(self, *folders: Path, recursive: bool = True) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        if not hasattr(self._libc, "inotify_init1"):
            raise SetupError(
                "this system cannot watch files (no inotify); use `tail -f` on the files in `logs`"
            )
        self._folders = folders
        self._recursive = recursive
        self._fd = int(self._libc.inotify_init1(os.O_CLOEXEC))
        try:
            self._cover()
        except BaseException:
            self.close()
            raise

    def fileno(self) -> int:
        """Return the descriptor, which is readable while `wait` would not block."""
        return self._fd

    def wait(self) -> None:
        """Wait for a change since the last call; Ctrl-C raises KeyboardInterrupt."""
        os.read(self._fd, 65536)
        if self._recursive:
            self._cover()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def _cover(self) -> None:
        """Watch all folders, including those of machines that joined later (log.group_by_node);
        watching again has no effect.
        """
        events = self._IN_MODIFY | self._IN_CREATE | self._IN_MOVED_TO
        below = (
            [p for f in self._folders for p in f.rglob("*") if p.is_dir()]
            if self._recursive
            else []
        )
        for watched in (*self._folders, *below):
            if (
                self._fd < 0
                or self._libc.inotify_add_watch(self._fd, os.fsencode(watched), events) < 0
            ):
                raise SetupError(
                    f"{watched} cannot be watched: {os.strerror(ctypes.get_errno())}; see "
                    f"fs.inotify.max_user_watches"
                )

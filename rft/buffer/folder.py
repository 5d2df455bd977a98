"""Where a ledger may live and who owns it: a local file system, one process at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from rft.errors import BufferFailed, SetupError

NETWORK_FILE_SYSTEMS = frozenset(
    {
        "nfs",
        "nfs4",
        "cifs",
        "smb",
        "smb2",
        "smb3",
        "smbfs",
        "afs",
        "ncpfs",
        "lustre",
        "gpfs",
        "beegfs",
        "panfs",
        "pvfs2",
        "orangefs",
    }
    | {"weka", "wekafs", "ceph", "fuse.ceph", "fuse.glusterfs", "fuse.sshfs", "fuse.s3fs", "fuse.gcsfuse", "fuse.rclone"}
)


def refuse_network(folder: Path, mounts: str | None = None) -> None:
    """Raises SetupError when `folder` is on a network file system, where SQLite's locks and shared memory do not hold.

    `mounts` is text in the form of /proc/self/mounts; None reads that file (nothing is known, and nothing refused, without it).
    """
    if mounts is None:
        try:
            mounts = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return
    path = str(folder.resolve())
    best, kind = "", ""
    for line in mounts.splitlines():
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        point = fields[1].replace("\\040", " ")
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, fields[2]
    if kind in NETWORK_FILE_SYSTEMS:
        raise SetupError(
            f"the buffer's folder {folder} is on a network file system ({kind}, mounted at {best}), where SQLite can lose data. "
            "Put the run on a local disk (checkpoint_root_dir), or keep the ledger in PostgreSQL "
            "(buffer.trainer_input.experience_buffer.path: postgresql://...)."
        )


def make_folder(path: Path, *, sync: bool) -> None:
    """The folder and its parents; `sync`: their names survive a power loss."""
    path.mkdir(parents=True, exist_ok=True)
    if sync:
        device = path.stat().st_dev
        for folder in (path, *path.absolute().parents):
            if folder.stat().st_dev != device:
                break
            with contextlib.suppress(PermissionError):  # not ours: it was there long before
                sync_folder(folder)


def sync_folder(path: Path) -> None:
    """The names in the folder survive a power loss."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


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
                f"the buffer {self._path.with_suffix('')} is open in process {holder}; a buffer has one owner. "
                "End that run first, or give this one another name."
            ) from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        self._fd = fd

    def release(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

"""File system, network and process space of a program, by Linux namespaces.

Inside are Python with its libraries (read-only), four devices, and for each program a private
/tmp in memory.  No network, no /proc, no other process.
Invariant: a failing step raises OSError; nothing runs half protected.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from rft.extras.sandbox import kernel

DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo")
_PLACE = "/proc"  # where a new root or /tmp is put together; every root has it
_OUTSIDE_ID = 65534


def readable(sites: Sequence[str]) -> list[str]:
    """Return the folders that a program may read: Python with its libraries, and `sites`, the
    folders of installed packages.
    """
    return [str(Path(sys.base_prefix) / "lib"), *_LIBRARIES, *sites]


def enter(sites: Sequence[str]) -> None:
    """Move this process and its children into new namespaces.  `sites`: further folders that
    programs may import from.
    """
    uid = os.geteuid()
    gid = os.getegid()
    spaces = kernel.CLONE_NEWNS | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS
    try:
        if uid != 0:
            raise PermissionError
        kernel.unshare(spaces)
    except PermissionError:  # also raised for root of a container without CAP_SYS_ADMIN
        kernel.unshare(kernel.CLONE_NEWUSER | spaces)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{_OUTSIDE_ID} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{_OUTSIDE_ID} {gid} 1")
    kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    socket.sethostname("sandbox")
    _swap_root(readable(sites), "size=1m,mode=755")
    kernel.restrict_mount("/", kernel.RDONLY | kernel.NOSUID, recursive=False)


def private_tmp(sites: Sequence[str], megabytes: int) -> None:
    """Give the next program a private /tmp, with those `sites` that are below it alone, and a
    process space.
    """
    kernel.unshare(kernel.CLONE_NEWPID | kernel.CLONE_NEWNS)
    options = f"size={megabytes}m,nr_inodes=4096,mode=1777"
    kernel.mount("sandbox", _PLACE, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options)
    inside = Path(_PLACE, "tmp")
    inside.mkdir()
    inside.chmod(0o1777)
    for folder in readable(sites):
        if Path(folder).is_relative_to("/tmp"):
            _show(Path(_PLACE), folder)
    kernel.mount(str(inside), "/tmp", "", kernel.MS_BIND | kernel.MS_REC)
    kernel.unmount(_PLACE)


def private_root(sites: Sequence[str], megabytes: int) -> None:
    """Replace the root as `private_tmp` does /tmp: new folders may be created anywhere, the
    machine's folders stay read-only.
    """
    kernel.unshare(kernel.CLONE_NEWPID | kernel.CLONE_NEWNS)
    _swap_root(readable(sites), f"size={megabytes}m,nr_inodes=8192,mode=1777")
    Path("/tmp").chmod(0o1777)


def show_processes() -> None:
    """Mount the process space's own /proc, which /dev/fd needs.

    A container may refuse it; a shell then lacks only `<(...)`.
    """
    with contextlib.suppress(PermissionError):
        kernel.mount("proc", "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV)


def _swap_root(folders: Sequence[str], options: str) -> None:
    kernel.swap_root(build_root(folders, options), "/old")
    Path("/old").rmdir()


def build_root(folders: Sequence[str], options: str, place: str = _PLACE) -> str:
    """Mount a new root in memory with `folders` and devices; return its place.

    Folders below `place`, which exists, cannot be among them.
    """
    root = Path(place)
    kernel.mount("sandbox", str(root), "tmpfs", kernel.MS_NOSUID, options)
    for name in ("tmp", "old", "dev", "proc"):
        (root / name).mkdir()
    (root / "dev/fd").symlink_to("/proc/self/fd")
    for folder in folders:
        _show(root, folder)
    for device in DEVICES:
        inside = root / device.lstrip("/")
        inside.touch()
        kernel.mount(device, str(inside), "", kernel.MS_BIND)
    return str(root)


def _show(root: Path, folder: str) -> None:
    """Bind `folder` to the same place under `root`, read-only including mounts below it."""
    source = Path(folder)
    inside = root / folder.lstrip("/")
    if not source.is_dir() or inside.exists() or inside.is_symlink():
        return
    inside.parent.mkdir(parents=True, exist_ok=True)
    if source.is_symlink():
        inside.symlink_to(source.readlink())
        _show(root, str(source.resolve()))
        return
    inside.mkdir()
    kernel.mount(folder, str(inside), "", kernel.MS_BIND | kernel.MS_REC)
    kernel.restrict_mount(str(inside), kernel.RDONLY | kernel.NOSUID | kernel.NODEV)

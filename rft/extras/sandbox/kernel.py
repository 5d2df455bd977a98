"""System calls that Python lacks: namespaces, mounts, privileges.  Each raises OSError naming the
call.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
from collections.abc import Iterable

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
MS_REC = 0x4000
MS_BIND = 0x1000
MS_PRIVATE = 0x40000
MS_NOSUID = 2
MS_NODEV = 4
RDONLY = 1  # MOUNT_ATTR_*
NOSUID = 2
NODEV = 4

_AT_FDCWD = -100
_AT_RECURSIVE = 0x8000
_MNT_DETACH = 2
_MOUNT_SETATTR = 442  # the same number on every architecture
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_PR_SET_DUMPABLE = 4
_PR_SET_NO_NEW_PRIVS = 38
_PR_SET_CHILD_SUBREAPER = 36
_PR_CAPBSET_READ = 23
_PR_CAPBSET_DROP = 24
_CAPABILITIES = 64
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 1

_libc = ctypes.CDLL(None, use_errno=True)


def unshare(flags: int) -> None:
    _check(_libc.unshare(flags), f"unshare({flags:#x})")


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    result = _libc.mount(
        source.encode(),
        target.encode(),
        kind.encode(),
        ctypes.c_ulong(flags),
        data.encode() or None,
    )
    _check(result, f"mount {kind or 'bind'} on {target}")


def restrict_mount(target: str, attributes: int, *, recursive: bool = True) -> None:
    """Set MOUNT_ATTR_* on a mount and on mounts below it.  Linux 5.12."""
    data = ctypes.create_string_buffer(struct.pack("=QQQQ", attributes, 0, 0, 0), 32)
    flags = _AT_RECURSIVE if recursive else 0
    result = _libc.syscall(
        _MOUNT_SETATTR, _AT_FDCWD, target.encode(), flags, data, ctypes.c_size_t(32)
    )
    _check(result, f"mount_setattr of {target}")


def swap_root(new: str, old: str) -> None:
    """Make `new` the root of this mount namespace and detach the old root; `old` is an empty folder
    inside `new`.
    """
    _check(
        _libc.syscall(_PIVOT_ROOT[os.uname().machine], new.encode(), f"{new}{old}".encode()),
        "pivot_root",
    )
    os.chdir("/")
    unmount(old)


def unmount(target: str) -> None:
    """Detach a mount with the mounts below it."""
    _check(_libc.umount2(target.encode(), _MNT_DETACH), f"unmount of {target}")


def join(namespace: int) -> None:
    """Enter the namespace of a descriptor."""
    _check(_libc.setns(namespace, 0), "setns")


def raise_loopback() -> None:
    """Switch on the loopback interface of this network namespace."""
    request = struct.pack("=16sH14x", b"lo", _IFF_UP)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, request)


def hide_memory() -> None:
    """Hide the memory of this process from other processes of the same user."""
    _check(_libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0), "PR_SET_DUMPABLE")


def no_new_privileges() -> None:
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "PR_SET_NO_NEW_PRIVS")


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose parents have ended."""
    _check(_libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "PR_SET_CHILD_SUBREAPER")


def drop_capabilities(but: Iterable[int] = ()) -> None:
    """Drop all capabilities but those of these numbers."""
    mask = sum(1 << number for number in but)
    # _LINUX_CAPABILITY_VERSION_3, this process
    header = ctypes.create_string_buffer(struct.pack("=Ii", 0x20080522, 0), 8)
    sets = struct.pack("=IIIIII", mask, mask, 0, 0, 0, 0)
    _check(_libc.capset(header, ctypes.create_string_buffer(sets, 24)), "capset")


def bound_capabilities(most: Iterable[int]) -> None:
    """Keep this process and its children from ever having other capabilities than these."""
    allowed = set(most)
    for number in range(_CAPABILITIES):
        if number not in allowed and _libc.prctl(_PR_CAPBSET_READ, number, 0, 0, 0) == 1:
            _check(_libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0), "PR_CAPBSET_DROP")


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")

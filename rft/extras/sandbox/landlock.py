"""Restrict file access of a program with Landlock, which needs no user namespace or privilege, only
Linux 5.13.

Source: Linux, Documentation/userspace-api/landlock.rst and include/uapi/linux/landlock.h.
Invariant: the process and its children are restricted, or OSError is raised; every right that the
running kernel knows is denied unless it is granted here.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
from collections.abc import Sequence
from pathlib import Path

from rft.extras.sandbox import kernel

_CREATE_RULESET = 444  # the same numbers on every architecture
_ADD_RULE = 445
_RESTRICT_SELF = 446
_VERSION = 1
_PATH_BENEATH = 1
_EXECUTE = 1 << 0
_WRITE_FILE = 1 << 1
_READ_FILE = 1 << 2
_READ_DIR = 1 << 3
# (version, number of file rights from that version on)
_FILES = ((1, 13), (2, 14), (3, 15), (5, 16))
_TCP = 0b11  # bind and connect; _SCOPES: abstract unix sockets and signals
_SCOPES = 0b11

_libc = ctypes.CDLL(None, use_errno=True)


def version() -> int:
    """Return the version of the running kernel's Landlock; 0 without it."""
    return max(0, int(_libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION)))


def enter(folders: Sequence[str], devices: Sequence[str], writable: str = "") -> None:
    """Restrict this process and its children: read and run files below `folders`, use `devices`,
    open nothing else.

    Writing is possible only below `writable`.  TCP is denied from version 4 on, abstract sockets
    and signals to other processes from version 6 on.
    """
    if not (abi_version := version()):
        raise OSError(
            errno.ENOSYS,
            "Landlock is not there: Linux 5.13 with CONFIG_SECURITY_LANDLOCK, and landlock among "
            "its lsm=",
        )
    rights = (1 << next(n for since, n in reversed(_FILES) if abi_version >= since)) - 1
    attributes = struct.pack(
        "=QQQ", rights, _TCP if abi_version >= 4 else 0, _SCOPES if abi_version >= 6 else 0
    )
    size = 24 if abi_version >= 6 else 16 if abi_version >= 4 else 8
    ruleset = _call(
        _CREATE_RULESET,
        ctypes.create_string_buffer(attributes[:size], size),
        ctypes.c_size_t(size),
        0,
    )
    try:
        for folder in {str(Path(f).resolve()) for f in folders if Path(f).is_dir()}:
            _allow(ruleset, folder, _READ_FILE | _READ_DIR | _EXECUTE)
        if writable:
            _allow(ruleset, writable, rights & ~_EXECUTE)
        for device in devices:
            _allow(ruleset, device, _READ_FILE | _WRITE_FILE)
        kernel.no_new_privileges()
        _call(_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            rights &= ~_READ_DIR
        rule = ctypes.create_string_buffer(struct.pack("=Qi", rights, fd), 12)
        _call(_ADD_RULE, ruleset, _PATH_BENEATH, rule, 0)
    finally:
        os.close(fd)


def _call(number: int, *arguments: object) -> int:
    if (result := int(_libc.syscall(number, *arguments))) < 0:
        raise OSError(ctypes.get_errno(), f"Landlock: {os.strerror(ctypes.get_errno())}")
    return result

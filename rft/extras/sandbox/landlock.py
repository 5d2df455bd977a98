"""Which files a program may open, by Landlock: no user namespace and no privilege is needed, only
Linux 5.13.

Source: Linux, Documentation/userspace-api/landlock.rst and include/uapi/linux/landlock.h.
Invariant: a process is restricted, with all that it starts, or OSError is raised; every right that
the running kernel knows is refused unless it is given here.
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

_CREATE_RULESET = 444  # the same numbers on every machine
_ADD_RULE = 445
_RESTRICT_SELF = 446
_VERSION = 1
_PATH_BENEATH = 1
_EXECUTE = 1 << 0
_WRITE_FILE = 1 << 1
_READ_FILE = 1 << 2
_READ_DIR = 1 << 3
# from a version on, how many rights of files there are
_FILES = ((1, 13), (2, 14), (3, 15), (5, 16))
_TCP = 0b11  # bind and connect; abstract unix sockets and signals
_SCOPES = 0b11

_libc = ctypes.CDLL(None, use_errno=True)


def version() -> int:
    """Of the running kernel's Landlock; 0 without it."""
    return max(0, int(_libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION)))


def enter(folders: Sequence[str], devices: Sequence[str], writable: str = "") -> None:
    """From here on this process, and what it starts, can read and run what is below `folders`, use
    `devices`, and open nothing else.

    Nothing can be written but below `writable`, connected to, or signalled outside (the last from
    version 6 on).
    """
    if not (known := version()):
        raise OSError(
            errno.ENOSYS,
            "Landlock is not there: Linux 5.13 with CONFIG_SECURITY_LANDLOCK, and landlock among "
            "its lsm=",
        )
    rights = (1 << next(n for since, n in reversed(_FILES) if known >= since)) - 1
    attributes = struct.pack(
        "=QQQ", rights, _TCP if known >= 4 else 0, _SCOPES if known >= 6 else 0
    )
    size = 24 if known >= 6 else 16 if known >= 4 else 8
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

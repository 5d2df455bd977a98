"""End this process with its parent, even a killed parent.  Linux only; elsewhere a no-op."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

# at import: a child that has changed its user may be unable to read files
_libc = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Make the kernel kill this process when the thread that started it ends.  Raises OSError.

    A change of user clears it.  An earlier end of the parent is not noticed: compare
    `os.getppid()`.
    """
    if sys.platform == "linux" and _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"PR_SET_PDEATHSIG: {os.strerror(number)}")

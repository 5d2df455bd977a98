"""Ending with the process that started this one, also when it is killed.  Knows nothing of what
runs here.

Invariant: on Linux the kernel sends the signal; elsewhere nothing is promised and nothing happens.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

# when this is imported: a child that has changed its user may not read files any more
_libc = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Kills this process as soon as the thread that started it ends.  A change of user clears it.
    Raises OSError.

    A parent that has ended before is not noticed: whoever needs that compares `os.getppid()`.
    """
    if sys.platform == "linux" and _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"PR_SET_PDEATHSIG: {os.strerror(number)}")

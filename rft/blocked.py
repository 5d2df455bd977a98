"""Where the main thread is held up by code that is not ours: named while it lasts.

Knows no plugin.  Invariant: nothing is ended here; whoever waits gets to read the file, the line and for how long.
"""

from __future__ import annotations

import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

NAME_AFTER_S = 30.0
_DEBUGGERS = ("bdb", "pdb", "_pydevd_bundle", "debugpy")
_OURS = str(Path(__file__).parent)
_LIBRARIES = tuple(p for name in ("stdlib", "platstdlib", "purelib", "platlib") if (p := sysconfig.get_paths().get(name)))


def is_ours(file: str) -> bool:
    """Whether a file is part of rft, of Python or of an installed library."""
    return file.startswith((_OURS, "<frozen", *_LIBRARIES))


def held_up_by(thread: int) -> tuple[FrameType, str] | None:
    """The innermost frame of a thread that is neither ours nor a library's, and where it is; None without one, and in a debugger.

    Ours has to have called it: the script or the notebook that calls rft waits for rft, not the other way round.
    """
    frame, found, called = sys._current_frames().get(thread), None, False
    while frame is not None:
        file = frame.f_code.co_filename
        if str(frame.f_globals.get("__name__", "")).split(".")[0] in _DEBUGGERS:
            return None
        if found is None and not is_ours(file):
            found = frame
        called |= found is not None and file.startswith(_OURS)
        frame = frame.f_back
    if found is None or not called:
        return None
    return found, f"{found.f_code.co_name}() in {found.f_code.co_filename}, line {found.f_lineno}"


def name_what_blocks(tell: Callable[[str], None], *, after_s: float = NAME_AFTER_S) -> threading.Event:
    """Tells, in a daemon thread, what the main thread waits for whenever that is the same code of a plugin for `after_s`.

    Ends when the event that is returned is set.
    """
    main, over = threading.main_thread().ident or 0, threading.Event()

    def watch() -> None:
        place: tuple[FrameType, str] | None = None
        since = time.monotonic()
        while not over.wait(after_s / 3):
            now = held_up_by(main)
            if now is None or place is None or now[0] is not place[0] or now[1] != place[1]:
                place, since = now, time.monotonic()
            elif (waited := time.monotonic() - since) >= after_s:
                tell(f"waiting for {waited:.0f} s for {now[1]}")
                since = time.monotonic()

    threading.Thread(target=watch, name="names-what-blocks", daemon=True).start()
    return over

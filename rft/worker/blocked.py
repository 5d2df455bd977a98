"""Where the main thread is held up by code that is not ours: named while it lasts.

Knows no plugin.  Invariant: nothing is ended here; whoever waits gets to read the file, the line
and for how long, and the program hears where it goes on for ever.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from rft.errors import PACKAGE, is_ours

NAME_AFTER_S = 30.0
END_AFTER_S = 300.0
_IDLE_SHARE = 0.02  # of one core
_DEBUGGERS = ("bdb", "pdb", "_pydevd_bundle", "debugpy")
_CHECKS = str(Path(PACKAGE, "config"))


def held_up_by(thread: int) -> tuple[FrameType, str] | None:
    """The innermost frame of a thread that is neither ours nor a library's, and where it is; None
    without one, and in a debugger.

    Ours has to have called it: the script or the notebook that calls rft waits for rft, not the
    other way round.
    """
    frame = sys._current_frames().get(thread)
    found = None
    called = False
    while frame is not None:
        file = frame.f_code.co_filename
        if str(frame.f_globals.get("__name__", "")).split(".")[0] in _DEBUGGERS:
            return None
        if found is None and not is_ours(file):
            found = frame
        called |= found is not None and file.startswith(PACKAGE)
        frame = frame.f_back
    if found is None or not called:
        return None
    return found, f"{found.f_code.co_name}() in {found.f_code.co_filename}, line {found.f_lineno}"


def name_what_blocks(
    tell: Callable[[str], None],
    end: Callable[[str], None] = lambda _: None,
    *,
    after_s: float = NAME_AFTER_S,
    end_after_s: float = END_AFTER_S,
) -> threading.Event:
    """Tells, in a daemon thread, what the main thread waits for whenever that is the same code of a
    plugin for `after_s`.

    `end` is told too where that goes on for `end_after_s` in the check of a configuration, and no
    process of ours computes anything: a run has a watch of its own.  Ends when the event that is
    returned is set.
    """
    main = threading.main_thread().ident or 0
    over = threading.Event()

    def watch() -> None:
        place: tuple[FrameType, str] | None = None
        since = told = time.monotonic()
        used = 0.0
        while not over.wait(after_s / 3):
            now = held_up_by(main)
            at = time.monotonic()
            if now is None or place is None or now[0] is not place[0] or now[1] != place[1]:
                place = now
                since = at
                told = at
                used = 0.0 if now is None else _cpu_s()
            elif at - told >= after_s:
                tell(f"waiting for {at - since:.0f} s for {now[1]}")
                told = at
                if (
                    at - since >= end_after_s
                    and _checks(main)
                    and _cpu_s() - used < _IDLE_SHARE * (at - since)
                ):
                    end(
                        f"{now[1]} has not returned for {at - since:.0f} s, in which nothing was "
                        f"computed"
                    )

    threading.Thread(target=watch, name="names-what-blocks", daemon=True).start()
    return over


def _checks(thread: int) -> bool:
    """Whether a configuration is being checked."""
    frame = sys._current_frames().get(thread)
    while frame is not None and not frame.f_code.co_filename.startswith(_CHECKS):
        frame = frame.f_back
    return frame is not None


def _cpu_s() -> float:
    """Processor time of this process and of what it has started; NaN, which is neither more nor
    less, where one of them has just ended.
    """
    import psutil

    try:
        me = psutil.Process()
        times = [p.cpu_times() for p in (me, *me.children(recursive=True))]
    except psutil.NoSuchProcess:
        return math.nan
    return float(sum(t.user + t.system for t in times))

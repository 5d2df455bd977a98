"""Name foreign code that blocks the main thread, by file and line.

Depends on no plugin.  Invariant: this module ends nothing; it tells the caller about a long block.
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
_IDLE_SHARE = 0.02  # share of one core
_DEBUGGERS = ("bdb", "pdb", "_pydevd_bundle", "debugpy")
_CHECKS = (str(Path(PACKAGE, "config")), str(Path(PACKAGE, "preflight")))


def held_up_by(thread: int) -> tuple[FrameType, str] | None:
    """Return (frame, its place) of the innermost foreign frame that rft's code called.

    None without such a frame (a script that calls rft is not one) and in a debugger.
    """
    frame = sys._current_frames().get(thread)
    foreign = None
    called = False
    while frame is not None:
        file = frame.f_code.co_filename
        if str(frame.f_globals.get("__name__", "")).split(".")[0] in _DEBUGGERS:
            return None
        if foreign is None and not is_ours(file):
            foreign = frame
        called |= foreign is not None and file.startswith(PACKAGE)
        frame = frame.f_back
    if foreign is None or not called:
        return None
    code = foreign.f_code
    return foreign, f"{code.co_name}() in {code.co_filename}, line {foreign.f_lineno}"


def name_what_blocks(
    tell: Callable[[str], None],
    end: Callable[[str], None] = lambda _: None,
    *,
    after_s: float = NAME_AFTER_S,
    end_after_s: float = END_AFTER_S,
) -> threading.Event:
    """Watch in a daemon thread until the returned event is set; call `tell` about foreign code that
    blocks the main thread for `after_s`.

    Call `end` if it blocks the check of a configuration for `end_after_s` and no process of rft
    computes; runs have their own watch.
    """
    main = threading.main_thread().ident or 0
    over = threading.Event()

    def watch() -> None:
        place: tuple[FrameType, str] | None = None
        began = last_line = time.monotonic()
        cpu_before = 0.0
        while not over.wait(after_s / 3):
            now = held_up_by(main)
            at = time.monotonic()
            if now is None or place is None or now[0] is not place[0] or now[1] != place[1]:
                place = now
                began = last_line = at
                cpu_before = 0.0 if now is None else _cpu_s()
                continue
            if at - last_line < after_s:
                continue
            last_line = at
            seconds = at - began
            tell(f"waiting for {seconds:.0f} s for {now[1]}")
            if seconds < end_after_s or not _checks(main):
                continue
            if _cpu_s() - cpu_before < _IDLE_SHARE * seconds:
                end(f"{now[1]} has not returned for {seconds:.0f} s, in which nothing was computed")

    threading.Thread(target=watch, name="names-what-blocks", daemon=True).start()
    return over


def _checks(thread: int) -> bool:
    """Return whether the thread checks a configuration."""
    frame = sys._current_frames().get(thread)
    while frame is not None and not frame.f_code.co_filename.startswith(_CHECKS):
        frame = frame.f_back
    return frame is not None


def _cpu_s() -> float:
    """Return processor time of this process and its descendants; NaN if one has just ended."""
    import psutil

    try:
        me = psutil.Process()
        times = [p.cpu_times() for p in (me, *me.children(recursive=True))]
    except psutil.NoSuchProcess:
        return math.nan
    return float(sum(t.user + t.system for t in times))

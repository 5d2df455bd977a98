"""Whether a process that has work gets on with it.  Knows no engine: it is told of each finished
step, and looks at processes itself.

Signs of life are a finished step, processor time (a long step shows nothing else) and waiting for a
disk.  Invariant: time in which the watcher itself did not run (a suspended machine, a blocked loop)
does not count.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import psutil

LOOKS = 5  # within the shorter of the two limits
# of one core, below which a process counts as doing nothing: threads that wait wake up now and then
BUSY_SHARE = 0.02


@dataclass(frozen=True)
class Usage:
    """Of all processes of one part, at one moment."""

    cpu_s: float  # processor time so far
    stopped: bool = False  # one of them is stopped, by SIGSTOP or a debugger
    on_disk: bool = False  # one of them waits for a disk


def usage(pids: Iterable[int], *, family: bool = True) -> Usage:
    """Of the processes `pids` and (`family`) what they have started; one that has ended counts with
    nothing.
    """
    cpu_s = 0.0
    states = set()
    for pid in pids:
        try:
            first = psutil.Process(pid)
            found = [first, *(first.children(recursive=True) if family else ())]
        except psutil.NoSuchProcess:
            continue
        for process in found:
            try:
                with process.oneshot():
                    times = process.cpu_times()
                    states.add(process.status())
            except psutil.NoSuchProcess:
                continue
            cpu_s += times.user + times.system
    return Usage(
        cpu_s,
        psutil.STATUS_STOPPED in states or psutil.STATUS_TRACING_STOP in states,
        psutil.STATUS_DISK_SLEEP in states,
    )


class Watch:
    """Two limits, in seconds, None = none: `stall_s` without any sign of life, `step_s` without a
    finished step.

    Call `progress` when a step is finished or there is nothing to do, else `look`, about every
    `interval_s`. `usage()` None: nothing is known of the processes (they are on another machine),
    so only `step_s` can pass.
    """

    def __init__(
        self,
        stall_s: float | None,
        step_s: float | None,
        usage: Callable[[], Usage | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stall_s = stall_s
        self._step_s = step_s
        self._usage = usage
        self._clock = clock
        self.interval_s = min(s for s in (stall_s, step_s, 60.0) if s is not None) / LOOKS
        self.progress()

    def progress(self) -> None:
        self._looked = self._clock()
        self._without_step = self._without_sign = 0.0
        self._cpu_s: float | None = None  # at the last sign of life

    def look(self) -> str:
        """Why it counts as hung; empty while it does not."""
        now = self._clock()
        passed, self._looked = min(now - self._looked, 2 * self.interval_s), now
        self._without_step += passed
        self._without_sign += passed
        found = self._usage()
        if found is None or self._alive(found):
            self._without_sign = 0.0
            self._cpu_s = None if found is None else found.cpu_s
        if self._stall_s is not None and self._without_sign >= self._stall_s:
            why = (
                "one of its processes is stopped"
                if found is not None and found.stopped
                else "its processes do nothing"
            )
            return f"no sign of life for {self._without_sign:.1f} s ({why})"
        if self._step_s is not None and self._without_step >= self._step_s:
            return f"no step was finished for {self._without_step:.0f} s"
        return ""

    def _alive(self, found: Usage) -> bool:
        if found.stopped:
            return False
        # first look; one of several has ended
        if self._cpu_s is None or found.cpu_s < self._cpu_s or found.on_disk:
            return True
        return found.cpu_s - self._cpu_s >= BUSY_SHARE * (self._stall_s or 0.0)

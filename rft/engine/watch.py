"""Decide whether a process that has work makes progress.  Depends on no engine: finished steps are
reported to it, processor time is read from the processes.

Signs of life are a finished step, processor time (the only sign during a long step), waiting for a
core and waiting for a disk.
Invariant: time in which the watcher itself did not run (a suspended machine, a blocked loop) does
not count.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

LOOKS = 5  # checks within the shorter limit
# of one core; below this share a process counts as idle, since waiting threads wake up now and then
BUSY_SHARE = 0.02


@dataclass(frozen=True)
class Usage:
    """Processor use of a group of processes at one moment."""

    cpu_s: float  # total processor time
    stopped: bool = False  # a process is stopped by SIGSTOP or a debugger
    on_disk: bool = False  # a process waits for a disk
    queued_s: float = 0.0  # time in which its threads were ready and had no core; Linux alone says


def usage(pids: Iterable[int], *, family: bool = True) -> Usage:
    """Return the usage of the processes `pids` and, with `family`, their descendants; ended
    processes count as zero.
    """
    cpu_s = queued_s = 0.0
    states = set()
    for pid in pids:
        try:
            first = psutil.Process(pid)
            processes = [first, *(first.children(recursive=True) if family else ())]
        except psutil.NoSuchProcess:
            continue
        for process in processes:
            try:
                with process.oneshot():
                    times = process.cpu_times()
                    states.add(process.status())
            except psutil.NoSuchProcess:
                continue
            cpu_s += times.user + times.system
            queued_s += _queued_s(process.pid)
    return Usage(
        cpu_s,
        psutil.STATUS_STOPPED in states or psutil.STATUS_TRACING_STOP in states,
        psutil.STATUS_DISK_SLEEP in states,
        queued_s,
    )


def _queued_s(pid: int) -> float:
    """Return how long the threads of a process waited for a core: second field of `schedstat`, in
    nanoseconds.
    """
    total = 0
    for file in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):  # the thread has ended
            total += int(file.read_text().split()[1])
    return total / 1e9


class Watch:
    """Two limits in seconds, None = no limit: `stall_s` without any sign of life, `step_s` without
    a finished step.

    Call `progress` when a step is finished or nothing is to be done, else `look`, about every
    `interval_s`.  `usage()` returns None if the processes are not visible (on another machine);
    then only `step_s` applies.
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
        self._last: Usage | None = None  # at the last sign of life

    def look(self, *, waits: bool = False) -> str:
        """Return why the processes count as hung; empty while they do not.

        `waits`: their only work waits for other processes under a deadline of its own, so to do
        nothing is no sign of a hang; to be stopped is.
        """
        now = self._clock()
        passed, self._looked = min(now - self._looked, 2 * self.interval_s), now
        self._without_step += passed
        self._without_sign += passed
        current = self._usage()
        if current is None or (waits and not current.stopped) or self._alive(current):
            self._without_sign = 0.0
            self._last = current
        if self._stall_s is not None and self._without_sign >= self._stall_s:
            reason = (
                "one of its processes is stopped"
                if current is not None and current.stopped
                else "its processes do nothing"
            )
            return f"no sign of life for {self._without_sign:.1f} s ({reason})"
        if self._step_s is not None and self._without_step >= self._step_s:
            return f"no step was finished for {self._without_step:.0f} s"
        return ""

    def _alive(self, current: Usage) -> bool:
        if current.stopped:
            return False
        # first look, or a process has ended
        if self._last is None or current.cpu_s < self._last.cpu_s or current.on_disk:
            return True
        # less if a thread has ended
        queued_s = max(0.0, current.queued_s - self._last.queued_s)
        return current.cpu_s - self._last.cpu_s + queued_s >= BUSY_SHARE * (self._stall_s or 0.0)

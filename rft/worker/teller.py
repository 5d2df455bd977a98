"""Say what a command waits for whenever it has printed nothing for QUIET_S.

A thread, so that neither an import nor a blocked event loop delays the line.  Depends on the
activities of `rft.worker.waiting`, on no run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Self

from rft.worker.waiting import ACTIVITY_S, Activity, activities, sentence

QUIET_S = 15.0  # longest time without a line
LOOK_S = ACTIVITY_S + 1.0  # limit for the activities of all processes
# limit for a service, which may wait for hours: each line about waiting doubles the time to the
# next
SERVICE_QUIET_S = 600.0

Look = Callable[[], Sequence[Activity]]


class Teller:
    """Context manager: while it is open, `show` gets what is waited for after QUIET_S without a call
    of `printed`.

    `look` returns current activities within LOOK_S; by default those of this process.  `served`:
    clients supply the work, so long waits are said ever later.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last_line = clock()
        self._quiet_s = QUIET_S
        self._over = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="says-what-is-waited-for", daemon=True
        )
        self.show: Callable[[str], None] = show
        self.look: Look = activities
        self.served = False

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def printed(self) -> None:
        """Count QUIET_S from now on: a line was printed."""
        self._last_line = self._clock()
        self._quiet_s = QUIET_S

    def due_s(self) -> float:
        """Return the seconds to the next look, or to the next call of this if a line meanwhile may
        shorten them.
        """
        return min(self._last_line + self._quiet_s - LOOK_S - self._clock(), QUIET_S - LOOK_S)

    def tell(self) -> None:
        """Look, and show what is waited for unless a line was printed meanwhile."""
        if self._last_line + self._quiet_s - LOOK_S > self._clock():
            return
        before, text = self._last_line, sentence(self.look())
        if self._last_line == before:
            quiet_s = min(2 * self._quiet_s, SERVICE_QUIET_S) if self.served else QUIET_S
            self.show(text)
            self._last_line = self._clock()
            self._quiet_s = quiet_s

    def _run(self) -> None:
        while not self._over.wait(max(0.0, self.due_s())):
            self.tell()


def show(text: str) -> None:
    """Print a line about waiting."""
    print(f"wait  {text}", flush=True)

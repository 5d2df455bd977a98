"""When a checkpoint is due: every so many train steps, and once the oldest step that none holds is
so old.

Pure but for the clock of the event loop.  Invariant: what is saved is never due.
"""

from __future__ import annotations

import asyncio


class SaveSchedule:
    """`interval` train steps, `after_s` seconds; 0: never for this."""

    def __init__(self, interval: int, after_s: float) -> None:
        self._interval = interval
        self._after_s = after_s
        self.step = 0  # the newest that was trained
        # when the oldest step that no checkpoint holds was trained
        self._since: float | None = None

    def trained(self, step: int) -> None:
        self.step = step
        if self._since is None:
            self._since = asyncio.get_running_loop().time()

    def saved(self) -> None:
        """A checkpoint of the newest step is taken."""
        self._since = None

    @property
    def due(self) -> bool:
        """Whether the newest step is to be saved now."""
        by_steps = (
            self._since is not None and self._interval > 0 and self.step % self._interval == 0
        )
        return by_steps or self.left_s == 0

    @property
    def left_s(self) -> float | None:
        """Seconds until a step is old enough; None: that never happens."""
        if self._since is None or not self._after_s:
            return None
        return max(0.0, self._since + self._after_s - asyncio.get_running_loop().time())

"""Decide when a checkpoint is due: every N train steps, or once the oldest unsaved step reaches an
age.

Pure except for the event loop's clock.  Invariant: a saved step is never due.
"""

from __future__ import annotations

import asyncio


class SaveSchedule:
    """A checkpoint every `interval` train steps and after `after_s` seconds; 0: never."""

    def __init__(self, interval: int, after_s: float) -> None:
        self._interval = interval
        self._after_s = after_s
        self.step = 0  # newest trained step
        # loop time at which the oldest unsaved step was trained
        self._since: float | None = None

    def trained(self, step: int) -> None:
        self.step = step
        if self._since is None:
            self._since = asyncio.get_running_loop().time()

    def saved(self) -> None:
        """Note that a checkpoint of the newest step was taken."""
        self._since = None

    @property
    def due(self) -> bool:
        """Return whether to save the newest step now."""
        by_steps = (
            self._since is not None and self._interval > 0 and self.step % self._interval == 0
        )
        return by_steps or self.left_s == 0

    @property
    def left_s(self) -> float | None:
        """Return the seconds until a step reaches the age limit; None: never."""
        if self._since is None or not self._after_s:
            return None
        return max(0.0, self._since + self._after_s - asyncio.get_running_loop().time())

"""When weights move: three questions, answered from numbers alone.

Knows no clock, engine or buffer. The one invariant: whatever answers yes, a row is never trained more than
`staleness_bound` optimizer steps after the version that began it, and somebody can always go on.

Fixed style with interval k and offset s, one explore batch per train step.  Batch e (from 0) feeds step e + 1:

    step t publishes when t is a multiple of k;  batch e needs a version of step >= k * floor((e - s) / k), at least the start's.

So batch e waits for steps below e only (no deadlock), and is trained when e steps are done: staleness <= e - k *
floor((e - s) / k), which is at most s + k - 1.

Where a train step does not take exactly one explore batch, `batch_units` and `step_units` count both in one unit
(groups, or rows): batch e first feeds step f(e) + 1 = floor(e * batch_units / step_units) + 1, and f(e) takes the
place of e above.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rft.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """`start_step`: of the weights the run begins or resumes with; steps count from 1, batches from 0, over the whole run.

    Raises ConfigError on an interval below 1, a negative offset, or a `max_staleness` that this schedule cannot keep.
    """

    style: Literal["fixed"] = "fixed"
    interval: int = 1
    offset: int = 0
    max_staleness: int | None = None
    start_step: int = 0
    batch_units: int = 1
    step_units: int = 1

    def __post_init__(self) -> None:
        if self.style != "fixed":
            raise ConfigError(f"{self.style!r} is not known; allowed: fixed", key="synchronizer.sync_style", given=self.style)
        if self.interval < 1:
            raise ConfigError(f"{self.interval} must be at least 1", key="synchronizer.sync_interval", given=self.interval)
        if self.offset < 0:
            raise ConfigError(f"{self.offset} must be at least 0", key="synchronizer.sync_offset", given=self.offset)
        if self.start_step < 0 or self.batch_units < 1 or self.step_units < 1:
            raise ValueError(f"{self}: start_step counts from 0, units from 1")
        if self.max_staleness is not None and self.max_staleness < self.staleness_bound:
            raise ConfigError(
                f"{self.max_staleness} cannot be kept: interval {self.interval} and offset {self.offset} let rows be up to "
                f"{self.staleness_bound} steps old. Allow {self.staleness_bound}, or lower sync_interval or sync_offset.",
                key="synchronizer.max_staleness",
                given=self.max_staleness,
            )

    @property
    def staleness_bound(self) -> int:
        """The oldest a trained row can be, in optimizer steps; 0 is on-policy.  s + k - 1 with one batch per step."""
        return self.offset + self.interval - 1 + self._spread

    @property
    def _spread(self) -> int:
        """How many steps after its first row the last row of a batch can be trained, at worst."""
        batch, step = self.batch_units, self.step_units
        if batch % step == 0:
            return batch // step - 1
        if step % batch == 0:
            return 0
        return max((e * batch + batch - 1) // step - e * batch // step for e in range(step))

    def required_step(self, batch: int) -> int:
        """The oldest train step whose weights may begin explore batch `batch`."""
        ahead = batch * self.batch_units // self.step_units - self.offset
        return max(self.start_step, ahead // self.interval * self.interval)

    def first_after(self, step: int) -> int:
        """The first explore batch that may begin only after `step` was trained (and a later version published)."""
        newest = max(self.start_step, (step - 1) // self.interval * self.interval)
        later = (newest // self.interval + 1) * self.interval  # the version after it
        return -(-(later + self.offset) * self.step_units // self.batch_units)

    def may_explore(self, batch: int, published_step: int) -> bool:
        """May explore batch `batch` start, now that the engines hold the weights of step `published_step`?"""
        return published_step >= self.required_step(batch)

    def may_train(self, step: int, oldest_version_step: int) -> bool:
        """May step `step` start with rows whose oldest token was written by the weights of `oldest_version_step`?"""
        return self.max_staleness is None or step - 1 - oldest_version_step <= self.max_staleness

    def must_publish(self, step: int) -> bool:
        """Must the weights of step `step` be published?  (The last step of a run is published whatever this says.)"""
        return step % self.interval == 0

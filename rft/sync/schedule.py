"""Decide which train steps publish their weights, and which weights an explore batch needs.

Pure arithmetic: depends on no clock, engine or buffer.  Invariant: in every style the staleness of
a trained row is at most `staleness_bound`, and explorer and trainer never wait for each other at
the same time.

k: the interval, s: the offset.  Batch e (from 0) feeds the steps f(e) + 1 to l(e) + 1; with one
batch for each step, f(e) = l(e) = e.

    style             step t publishes         explore batch e waits for
    fixed             t is a multiple of k     weights of step >= k * floor((f(e) - s) / k)
    trainer_driven    t is a multiple of k     nothing
    explorer_driven   an explorer waits for t  if e = s + k, s + 2k, ...: weights newer than at its
                                               request, if any step is newer or in training
    fully_async       t is a multiple of k     its quota, see below

With `max_staleness` batch e also waits for weights of step >= l(e) - max_staleness (in style fixed
the first rule implies it).  Before batch e is trained, the newest version is at least that of step
f(e) + 1 - k.  A `max_staleness` that asks for a newer one (below k - 1, plus the steps over which a
batch is spread) could deadlock and is refused.

fixed: batch e is trained when f(e) steps are done, so its staleness is at most f(e) - k *
floor((f(e) - s) / k) <= s + k - 1.

fully_async: a window is k steps, of W = k * step_units units (groups, or rows).  With `threshold`
sigma, unit u may begin under the version of step v if u < v * step_units + Q, Q = floor(W (1 +
sigma)): at most Q units have begun and not been consumed at the last sync.  E.g. k = 2 steps of 8
groups and sigma = 0.5: Q = 24, so groups 0 to 23 may begin under version 0, and group 24 waits for
version 2.  The last unit is at most floor((Q - 1) / step_units) steps old; sigma = 0 gives k - 1,
as fixed without offset.

If a train step does not take exactly one explore batch, `batch_units` and `step_units` count both
in one unit (groups, or rows): f(e) = floor(e * batch_units / step_units).
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from rft.errors import ConfigError

Style = Literal["fixed", "explorer_driven", "trainer_driven", "fully_async"]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Schedule of a run.  Steps count from 1, batches from 0, over the whole run.

    `start_step`: step of the weights with which the run begins or resumes. `interval` counts train
    steps; in explorer_driven it counts explore batches.  `group_units` = units of one group of a batch.
    `threshold` = units that may begin beyond a window, as a share of it (fully_async); None = no quota.

    Raises ConfigError on a `max_staleness` that this schedule cannot keep.
    """

    style: Style = "fixed"
    interval: int = 1
    offset: int = 0
    max_staleness: int | None = None
    start_step: int = 0
    batch_units: int = 1
    step_units: int = 1
    group_units: int = 1
    threshold: float | None = None

    def __post_init__(self) -> None:
        if (
            self.start_step < 0
            or min(self.interval, self.batch_units, self.step_units, self.group_units) < 1
        ):
            raise ValueError(f"{self}: start_step counts from 0, interval and units from 1")
        if self.max_staleness is not None and self.max_staleness < self.least_staleness:
            raise ConfigError(
                self._too_low(), key="synchronizer.max_staleness", given=self.max_staleness
            )

    def _too_low(self) -> str:
        least = self.least_staleness
        k = self.interval
        what = f"{self.max_staleness} cannot be kept: "
        if self.style == "fixed":
            return (
                f"{what}interval {k} and offset {self.offset} let rows be up to {least} steps old. "
                f"Allow {least}, or lower "
                "sync_interval or sync_offset."
            )
        if self.style == "explorer_driven":
            return (
                f"{what}one explore batch is spread over {least + 1} train steps. Allow "
                f"{least}, or train larger batches."
            )
        return (
            f"{what}weights move every {k} steps, so rows are up to {least} steps old. Allow "
            f"{least}, or lower sync_interval."
        )

    # ------------------------------------------------------------ bounds

    @property
    def least_staleness(self) -> int:
        """Return the lowest `max_staleness` that can be kept, if the explorer waits maximally."""
        if self.style == "fixed":
            return self.offset + self.interval - 1 + self._batch_span
        return (0 if self.style == "explorer_driven" else self.interval - 1) + self._batch_span

    @property
    def staleness_bound(self) -> int | None:
        """Return the largest staleness of a row, in optimizer steps; 0: on-policy; None: no bound.

        Style fixed reaches it: s + k - 1 + spread of a batch.
        """
        if self.style == "fixed":
            return self.least_staleness
        bounds = [b for b in (self.max_staleness, self._quota_bound) if b is not None]
        return min(bounds, default=None)

    @property
    def quota(self) -> int | None:
        """Return Q = floor(W (1 + threshold)), the units that may be begun but not consumed at the
        last sync.

        None without a threshold.
        """
        if self.style != "fully_async" or self.threshold is None:
            return None
        return int(self.interval * self.step_units * (1 + Fraction(str(self.threshold))))

    @property
    def _quota_bound(self) -> int | None:
        if self.quota is None:
            return None
        # a group's position in its batch may change (refills), so the full batch counts; this
        # repeats with batch_units steps
        return max(self._last_of(self._first_beyond(v) - 1) - v for v in range(self.batch_units))

    def _first_beyond(self, version_step: int) -> int:
        """Return the first batch that must not begin under the quota of `version_step`."""
        assert self.quota is not None
        begun = version_step * self.step_units + self.quota
        needed = (version_step + self.interval) * self.step_units
        return max(
            begun // self.batch_units + (begun % self.batch_units >= self.group_units),
            -(-needed // self.batch_units),
        )

    @property
    def _batch_span(self) -> int:
        """Return the most steps between training the first and the last row of a batch."""
        batch = self.batch_units
        step = self.step_units
        if batch % step == 0:
            return batch // step - 1
        if step % batch == 0:
            return 0
        return max((e * batch + batch - 1) // step - e * batch // step for e in range(step))

    def _last_of(self, batch: int) -> int:
        """Return the steps done before the last step that `batch` feeds."""
        return ((batch + 1) * self.batch_units - 1) // self.step_units

    # ------------------------------------------------------------ may explore batch e start?

    @property
    def on_demand(self) -> bool:
        """Return whether steps publish at the explorer's request, not at multiples of `interval`."""
        return self.style == "explorer_driven"

    @property
    def by_group(self) -> bool:
        """Return whether each group of a batch has to ask, and may begin at its own version."""
        return self.quota is not None

    def syncs_before(self, batch: int) -> bool:
        """Return whether the explorer requests new weights before `batch` (explorer_driven).

        All batches before it are complete then.
        """
        return self.on_demand and batch > self.offset and (batch - self.offset) % self.interval == 0

    def required_step(self, batch: int, group: int | None = None) -> int:
        """Return the oldest train step whose weights may generate `batch`, or its group `group`."""
        # steps done before the first step that the batch feeds
        done_before = batch * self.batch_units // self.step_units
        required = 0
        if self.style == "fixed":
            required = (done_before - self.offset) // self.interval * self.interval
        elif self.max_staleness is not None:
            required = self._last_of(batch) - self.max_staleness
        if self.quota is not None:
            units = (
                self.batch_units
                if group is None
                else min(self.batch_units, (group + 1) * self.group_units)
            )
            by_quota = -(-(batch * self.batch_units + units - self.quota) // self.step_units)
            # never block the batch that the next step needs
            required = max(required, min(by_quota, done_before - self.interval + 1))
        return max(self.start_step, required)

    def first_after(self, step: int) -> int | None:
        """Return the first explore batch that needs a version newer than all those published before
        `step` is trained.

        None = no such batch.
        """
        if self.style == "fixed":
            newest = max(self.start_step, (step - 1) // self.interval * self.interval)
            later = (newest // self.interval + 1) * self.interval  # the version after it
            return -(-(later + self.offset) * self.step_units // self.batch_units)
        k = 1 if self.on_demand else self.interval
        batch = self.batch_units
        size = self.step_units
        newest = max(self.start_step, (step - 1) // k * k)
        bounds = []
        if self.max_staleness is not None:
            bounds.append(-(-((newest + self.max_staleness + 1) * size + 1) // batch) - 1)
        if self.quota is not None:
            bounds.append(
                max((newest * size + self.quota) // batch, -(-(newest + k) * size // batch))
            )
        return min(bounds, default=None)

    def may_explore(
        self,
        batch: int,
        published_step: int,
        *,
        group: int | None = None,
        prior: int = -1,
        newest: int = 0,
        ahead: int = 0,
    ) -> bool:
        """Return whether explore batch `batch` (or its group `group`) may start with the weights of
        step `published_step`.

        If the explorer requests weights first (`syncs_before`): `prior` = step of its weights at
        the request, `newest` = newest step that is trained or in training.  `ahead` = explore
        batches begun early because a step lacked rows.
        """
        if published_step < self.required_step(max(0, batch - ahead), group):
            return False
        return not self.syncs_before(batch) or published_step > prior or published_step >= newest

    # ------------------------------------------------------------ must step t publish?

    def must_publish(self, step: int, *, requested: bool = False) -> bool:
        """Return whether to publish the weights of `step` (`Trainer._finish` publishes the last).

        `requested`: an explorer waits for them; only explorer_driven reads it.
        """
        return requested if self.on_demand else step % self.interval == 0

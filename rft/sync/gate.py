"""The state of the gate says which explore batches may start, and which rows count.  No waits or IO.

Knows the schedule and the versions, not engines.  Invariant: rows count only if the very attempt
that wrote them was verified.
"""

from __future__ import annotations

from rft.errors import WeightSyncFailed
from rft.sync.schedule import Schedule
from rft.types.ids import Version


class GateState:
    """State of the gate; `start`: the first version of the run."""

    def __init__(self, schedule: Schedule, start: Version) -> None:
        self.schedule = schedule
        self._lineage = start.lineage
        self.loaded: Version | None = None  # in all engines, verified or not
        self.verified: Version | None = None  # the newest verified version
        self._verified: set[Version] = set()
        self._rejected: set[Version] = set()
        self.trained = start.step
        self.finished = False
        self.demand: object | None = None  # set while the trainer waits for rows
        self.groups = 0  # generating groups, if counted
        self.holding = False  # a version waits for `groups` to end; no other group starts
        self._ahead = 0  # explore batches consumed early by incomplete train steps
        self._exploring: set[int] = set()  # batches in progress
        self._waiting: dict[int, int] = {}  # batch -> step of the weights loaded at its request

    # ------------------------------------------------------------ explore batches and groups

    def batches_before_are_done(self, batch: int) -> bool:
        """Return whether `batch` may request weights: on demand, after all batches before it."""
        return (
            not self.schedule.syncs_before(batch)
            or self.finished
            or min(self._exploring, default=batch) >= batch
        )

    def ask(self, batch: int) -> None:
        self._waiting[batch] = -1 if self.loaded is None else self.loaded.step

    def stop_asking(self, batch: int) -> None:
        del self._waiting[batch]

    def may_start(self, batch: int, group: int | None = None) -> bool:
        """Return whether the batch (or its group) may start now, or training is over."""
        if self.finished or self.loaded is None:
            return self.finished
        return self._allows(batch, group, self.loaded.step, self.trained + (self.demand is None))

    def start(self, batch: int) -> Version | None:
        """Start `batch`; return its version, None if the trainer is finished."""
        if self.finished:
            return None
        self._exploring.add(batch)
        return self.loaded

    def explored(self, batch: int) -> None:
        self._exploring.discard(batch)

    @property
    def playing(self) -> bool:
        """Return whether a group (paced one by one) or a batch is being explored."""
        return self.groups > 0 if self.schedule.by_group else bool(self._exploring)

    @property
    def both_wait(self) -> bool:
        """Return whether no batch is being explored and the trainer needs one for its next step."""
        return not self.playing and self.schedule.style == "fixed" and not self.schedule.offset

    def may_acquire(self, batch: int, group: int | None) -> bool:
        """Return whether group `group` (None: a replacement) may start now, or training is over."""
        if self.finished:
            return True
        return not self.holding and (
            group is None or not self.schedule.by_group or self.may_start(batch, group)
        )

    def allow(self, batch: int) -> None:
        """Let `batch` start before its turn, because the next train step lacks rows."""
        first = self.schedule.first_after(self.trained + 1)
        self._ahead = max(self._ahead, 0 if first is None else batch + 1 - first)

    def wants(self, step: int) -> bool:
        """Return whether a waiting batch needs the weights of the trained `step` to start."""
        if not self.schedule.on_demand or self.loaded is None or step <= self.loaded.step:
            return False
        return any(
            self._allows(batch, None, step, step) and not self.may_start(batch)
            for batch in self._waiting
        )

    def _allows(self, batch: int, group: int | None, step: int, newest: int) -> bool:
        prior = self._waiting.get(batch, -1)
        return self.schedule.may_explore(
            batch, step, group=group, prior=prior, newest=newest, ahead=self._ahead
        )

    # ------------------------------------------------------------ versions

    def label(self, version: Version) -> Version:
        """Return the label of the next attempt to serve `version`."""
        tried = [v.attempt for v in self._rejected if v.published == version.published]
        return Version(version.lineage, version.step, max(tried, default=-1) + 1)

    def check_order(self, version: Version) -> None:
        """Raise WeightSyncFailed for another lineage, or a version not newer than the served one."""
        if version.lineage != self._lineage:
            raise WeightSyncFailed(
                f"version {version} is of another lineage than the run's {self._lineage}"
            )
        if self.verified is not None and version.published <= self.verified.published:
            raise WeightSyncFailed(
                f"version {version} is not newer than {self.verified}, which is served"
            )

    def verify(self, version: Version) -> None:
        """Mark `version` as served: its rows count, earlier ones too."""
        self.loaded = self.verified = version
        self._verified.add(version)
        self.trained = max(self.trained, version.step)

    def reject(self, version: Version) -> None:
        """Mark an attempt whose rows never count."""
        self._rejected.add(version)

    def is_verified(self, version: Version) -> bool:
        return version in self._verified

    def is_rejected(self, version: Version) -> bool:
        return version in self._rejected

    def is_decided(self, version: Version) -> bool:
        """Return whether `version` is verified, or never can be.

        A rejected version counts as decided once its replacement is served.
        """
        if version in self._verified or version.lineage != self._lineage:
            return True
        return self.verified is not None and version < self.verified

    @property
    def ended(self) -> bool:
        """Return whether the trainer is finished and its last version is served."""
        return (
            self.finished
            and self.verified is not None
            and self.verified.published == Version(self._lineage, self.trained)
        )

    def failure(self, version: Version, reason: str, attempts: int, restored: str | None) -> str:
        """Return the message why `version` is not served, with the engines' state.

        `restored`: why the roll-back is not verified; None = it is.
        """
        if self.verified is None:
            back = "It is the first version, so the run does not start."
        elif restored is None:
            back = (
                f"The engines serve {self.verified} again, verified by its canary; resume from "
                f"the last checkpoint."
            )
        else:
            back = (
                f"The roll-back to {self.verified} is not verified ({restored}): restart the "
                f"engines, then resume."
            )
        return f"weights {version} are not served, {attempts} attempts, the last: {reason}. {back}"

    @property
    def served_text(self) -> str:
        return "nothing yet" if self.verified is None else str(self.verified)

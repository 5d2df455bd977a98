"""Who may explore and which rows count: the state of the gate, without waiting and without IO.

Knows the schedule and the versions, not engines.  Invariant: rows count only if the very attempt
that wrote them was verified.
"""

from __future__ import annotations

from rft.errors import WeightSyncFailed
from rft.sync.schedule import Schedule
from rft.types.ids import Version


class GateState:
    """`start`: the version the run begins with."""

    def __init__(self, schedule: Schedule, start: Version) -> None:
        self.schedule = schedule
        self._lineage = start.lineage
        self.loaded: Version | None = None  # in all engines, perhaps provisional
        self.verified: Version | None = None  # the newest
        self._verified: set[Version] = set()
        self._rejected: set[Version] = set()
        self.trained = start.step
        self.finished = False
        self.demand: object | None = None  # set while the trainer waits for rows
        self.groups = 0  # that generate, where they are counted
        self.holding = False  # a version waits for these groups; no other one begins
        self._ahead = 0  # explore batches consumed early by incomplete train steps
        self._exploring: set[int] = set()  # batches
        # batches that wait: step of the weights loaded when they asked
        self._asked: dict[int, int] = {}

    # ------------------------------------------------------------ explore batches and groups

    def batches_before_are_done(self, batch: int) -> bool:
        """Whether `batch` may ask: where weights move on demand, all batches before it are complete
        by then.
        """
        return (
            not self.schedule.syncs_before(batch)
            or self.finished
            or min(self._exploring, default=batch) >= batch
        )

    def ask(self, batch: int) -> None:
        self._asked[batch] = -1 if self.loaded is None else self.loaded.step

    def stop_asking(self, batch: int) -> None:
        del self._asked[batch]

    def may_start(self, batch: int, group: int | None = None) -> bool:
        """May the batch (or its group) start now, or never any more?"""
        if self.finished or self.loaded is None:
            return self.finished
        return self._allows(batch, group, self.loaded.step, self.trained + (self.demand is None))

    def start(self, batch: int) -> Version | None:
        """The version `batch` starts with; None: the trainer is finished."""
        if self.finished:
            return None
        self._exploring.add(batch)
        return self.loaded

    def explored(self, batch: int) -> None:
        self._exploring.discard(batch)

    @property
    def playing(self) -> bool:
        """Whether anything is explored: a group, where groups are paced one by one, else a batch."""
        return self.groups > 0 if self.schedule.by_group else bool(self._exploring)

    @property
    def both_wait(self) -> bool:
        """Whether nothing is explored, and the trainer has no rows to go on with until something
        is.
        """
        return not self.playing and self.schedule.style == "fixed" and not self.schedule.offset

    def may_acquire(self, batch: int, group: int | None) -> bool:
        """May group `group` (None: one that replaces another) start now, or never any more?"""
        if self.finished:
            return True
        return not self.holding and (
            group is None or not self.schedule.by_group or self.may_start(batch, group)
        )

    def allow(self, batch: int) -> None:
        """`batch` may start although its turn has not come: the next step lacks rows."""
        first = self.schedule.first_after(self.trained + 1)
        self._ahead = max(self._ahead, 0 if first is None else batch + 1 - first)

    def wants(self, step: int) -> bool:
        """Whether a batch that waits could start with the weights of `step`, which is trained, and
        cannot now.
        """
        if not self.schedule.on_demand or self.loaded is None or step <= self.loaded.step:
            return False
        return any(
            self._allows(batch, None, step, step) and not self.may_start(batch)
            for batch in self._asked
        )

    def _allows(self, batch: int, group: int | None, step: int, newest: int) -> bool:
        held = self._asked.get(batch, -1)
        return self.schedule.may_explore(
            batch, step, group=group, held=held, newest=newest, ahead=self._ahead
        )

    # ------------------------------------------------------------ versions

    def label(self, version: Version) -> Version:
        """The label of the next attempt to serve `version`."""
        tried = [v.attempt for v in self._rejected if v.published == version.published]
        return Version(version.lineage, version.step, max(tried, default=-1) + 1)

    def check_order(self, version: Version) -> None:
        """Raises WeightSyncFailed for a version of another lineage, or one that is not newer than
        the served one.
        """
        if version.lineage != self._lineage:
            raise WeightSyncFailed(
                f"version {version} is of another lineage than the run's {self._lineage}"
            )
        if self.verified is not None and version.published <= self.verified.published:
            raise WeightSyncFailed(
                f"version {version} is not newer than {self.verified}, which is served"
            )

    def verify(self, version: Version) -> None:
        """`version` is served: what it writes, and has written, counts."""
        self.loaded = self.verified = version
        self._verified.add(version)
        self.trained = max(self.trained, version.step)

    def reject(self, version: Version) -> None:
        """What this attempt wrote never counts."""
        self._rejected.add(version)

    def is_verified(self, version: Version) -> bool:
        return version in self._verified

    def is_rejected(self, version: Version) -> bool:
        return version in self._rejected

    def is_decided(self, version: Version) -> bool:
        """Whether `version` is verified or can never be; one that was rejected, once what replaces
        it is served: new rows wait for that.
        """
        if version in self._verified or version.lineage != self._lineage:
            return True
        return self.verified is not None and version < self.verified

    @property
    def ended(self) -> bool:
        """The trainer is finished and its last version is served."""
        return (
            self.finished
            and self.verified is not None
            and self.verified.published == Version(self._lineage, self.trained)
        )

    def failure(self, version: Version, reason: str, attempts: int, restored: str | None) -> str:
        """Why `version` is not served and what holds now; `restored`: why the version before is not
        verified, where it is not.
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

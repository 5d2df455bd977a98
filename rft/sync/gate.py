"""The state of the gate: which explore batches may start, and which rows may be trained.

Depends on the schedule and the versions, not on engines; no waits or IO.  Invariant: rows may be
trained only if the attempt (to serve a version) that generated them was verified.
"""

from __future__ import annotations

from rft.errors import WeightSyncFailed
from rft.sync.schedule import Schedule
from rft.types.ids import Version


class GateState:
    """State of the gate; `first`: the first version of the run."""

    def __init__(self, schedule: Schedule, first: Version) -> None:
        self.schedule = schedule
        self._lineage = first.lineage
        self.loaded: Version | None = None  # in all engines, verified or not
        self.verified: Version | None = None  # the newest verified version
        self._verified: set[Version] = set()
        self._rejected: set[Version] = set()
        self.trained_step = first.step
        self.finished = False
        # the trainer's wait for rows, between two steps; a later wait is another object
        self.trainer_wait: object | None = None
        self.num_groups = 0  # groups in progress, if each needs a permission
        self.blocked = False  # a version waits for these groups to end, so no other group starts
        self._ahead = 0  # explore batches begun early because a step lacked rows
        self._exploring: set[int] = set()  # batches in progress
        self._requests: dict[int, int] = {}  # waiting batch -> step of the weights loaded then

    # ------------------------------------------------------------ explore batches and groups

    def may_request(self, batch: int) -> bool:
        """Return whether `batch` may request weights: before an explorer_driven sync all earlier
        batches must be explored.
        """
        return (
            not self.schedule.syncs_before(batch)
            or self.finished
            or min(self._exploring, default=batch) >= batch
        )

    def request(self, batch: int) -> None:
        """Note that `batch` waits for weights."""
        self._requests[batch] = -1 if self.loaded is None else self.loaded.step

    def end_request(self, batch: int) -> None:
        del self._requests[batch]

    def may_start(self, batch: int, group: int | None = None) -> bool:
        """Return whether the batch (or its group) may start now; True once training is over, when
        `start` returns None.
        """
        if self.finished or self.loaded is None:
            return self.finished
        # the newest step that is trained or, unless the trainer waits, in training
        newest = self.trained_step + (self.trainer_wait is None)
        return self._allows(batch, group, self.loaded.step, newest)

    def start(self, batch: int) -> Version | None:
        """Start `batch`; return its version, None if the trainer is finished."""
        if self.finished:
            return None
        self._exploring.add(batch)
        return self.loaded

    def explored(self, batch: int) -> None:
        """Note that `batch` is complete."""
        self._exploring.discard(batch)

    @property
    def exploring(self) -> bool:
        """Return whether a batch (or a group, if each needs a permission) is in progress."""
        return self.num_groups > 0 if self.schedule.by_group else bool(self._exploring)

    @property
    def on_policy_idle(self) -> bool:
        """Return whether no batch is in progress in style fixed without offset: the next batch, and
        so the next train step, waits for the version that is being loaded.
        """
        return not self.exploring and self.schedule.style == "fixed" and not self.schedule.offset

    def may_acquire(self, batch: int, group: int | None) -> bool:
        """Return whether group `group` (None: a replacement) may start now; True once training is
        over.
        """
        if self.finished:
            return True
        return not self.blocked and (
            group is None or not self.schedule.by_group or self.may_start(batch, group)
        )

    def allow_early(self, batch: int) -> None:
        """Let `batch` start early, because the next train step lacks rows."""
        first = self.schedule.first_after(self.trained_step + 1)
        self._ahead = max(self._ahead, 0 if first is None else batch + 1 - first)

    def is_requested(self, step: int) -> bool:
        """Return whether a waiting batch needs the weights of the trained `step` to start."""
        if not self.schedule.on_demand or self.loaded is None or step <= self.loaded.step:
            return False
        return any(
            self._allows(batch, None, step, step) and not self.may_start(batch)
            for batch in self._requests
        )

    def _allows(self, batch: int, group: int | None, step: int, newest: int) -> bool:
        prior = self._requests.get(batch, -1)
        return self.schedule.may_explore(
            batch, step, group=group, prior=prior, newest=newest, ahead=self._ahead
        )

    # ------------------------------------------------------------ versions

    def next_attempt(self, version: Version) -> Version:
        """Return `version` with the number of the next attempt to serve it."""
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

    def mark_verified(self, version: Version) -> None:
        """Note that the canary of `version` passed: its rows, also those generated before, may be
        trained.
        """
        self.loaded = self.verified = version
        self._verified.add(version)
        self.trained_step = max(self.trained_step, version.step)

    def mark_rejected(self, version: Version) -> None:
        """Note a failed attempt, whose rows are never trained."""
        self._rejected.add(version)

    def is_verified(self, version: Version) -> bool:
        return version in self._verified

    def is_rejected(self, version: Version) -> bool:
        return version in self._rejected

    def is_decided(self, version: Version) -> bool:
        """Return whether nobody needs to wait for the canary of `version` any longer: it passed, a
        later version or attempt is verified, or the version is of another lineage.
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
            and self.verified.published == Version(self._lineage, self.trained_step)
        )

    def failure(
        self, version: Version, reason: str, attempts: int, rollback_error: str | None
    ) -> str:
        """Return the error message for a `version` that is not served, with the engines' state.

        `rollback_error`: why the roll-back is not verified; None = it is.
        """
        if self.verified is None:
            back = "It is the first version, so the run does not start."
        elif rollback_error is None:
            back = (
                f"The engines serve {self.verified} again, verified by its canary; resume from "
                f"the last checkpoint."
            )
        else:
            back = (
                f"The roll-back to {self.verified} is not verified ({rollback_error}): restart the "
                f"engines, then resume."
            )
        return (
            f"weights {version} could not be served (attempts: {attempts}); last error: {reason}. "
            f"{back}"
        )

    @property
    def served_text(self) -> str:
        return "nothing yet" if self.verified is None else str(self.verified)

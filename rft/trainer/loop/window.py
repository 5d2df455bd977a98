"""Count stale and partial trajectories and idle time between two published versions, in the terms
of asynchronous training.

Depends on experiences and versions alone.  Invariant: a trajectory belongs to the versions that
wrote it, whatever the style of the schedule. veRL's fully asynchronous recipe is the source of the
names; its names and ours carry the same values.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

from rft.types.experience import Experience

NAMES = {
    "buffer/stale_samples_processed": "fully_async/count/stale_samples_processed",
    "buffer/stale_trajectories_processed": "fully_async/count/stale_trajectory_processed",
    "buffer/partial_num": "fully_async/partial/total_partial_num",
    "buffer/partial_ratio": "fully_async/partial/partial_ratio",
    "buffer/max_partial_span": "fully_async/partial/max_partial_span",
}
"""Our name -> veRL's, in the order of the counts."""


class Window:
    """Counts until the next version; counts of stale samples run on for the whole process."""

    def __init__(self) -> None:
        self._published: list[int] = []  # train steps of the versions so far
        self._stale_samples = self._stale_trajectories = 0
        self._clear()

    def _clear(self) -> None:
        self._partial = self._trajectories = self._span = 0
        self._wait_s = self._step_s = 0.0
        self._over = False

    def publish(self, step: int) -> None:
        """Note that the weights of `step` are served: later steps train at the next version."""
        self._over = bool(self._published)
        self._published.append(step)

    def rows(self, experiences: Iterable[Experience]) -> None:
        """Count the rows of one train step.

        A sample is a group, a trajectory one of its runs; rows of experts have no version.
        """
        now = len(self._published) - 1
        runs: dict[tuple[str, int], tuple[int, int]] = {}  # (group, run) -> first and last version
        for x in experiences:
            old = x.oldest_version
            new = x.newest_version
            if old is None or new is None:
                continue
            first = self._number(old.step)
            last = self._number(new.step)
            before = runs.get(key := (str(x.group), x.id.run), (first, last))
            runs[key] = (min(first, before[0]), max(last, before[1]))
        samples: dict[str, int] = {}
        for (group, _), (_, last) in runs.items():
            samples[group] = max(last, samples.get(group, last))
        self._stale_samples += sum(last < now for last in samples.values())
        self._stale_trajectories += sum(last < now for _, last in runs.values())
        spans = [last - first for first, last in runs.values()]
        self._partial += sum(span > 0 for span in spans)
        self._trajectories += len(spans)
        self._span = max([self._span, *spans])

    def step(self, wait_s: float, step_s: float) -> None:
        """Add a train step that took `step_s` seconds, including `wait_s` of waiting for rows."""
        self._wait_s += wait_s
        self._step_s += step_s

    def closed(self) -> dict[str, float]:
        """Return the metrics of the window if a version has ended it, and begin the next window."""
        if not self._over:
            return {}
        counts = (
            self._stale_samples,
            self._stale_trajectories,
            self._partial,
            self._partial / max(self._trajectories, 1),
            self._span,
        )
        values: dict[str, float] = {}
        for names, count in zip(NAMES.items(), counts, strict=True):
            values |= dict.fromkeys(names, float(count))
        values["trainer/idle_ratio"] = self._wait_s / self._step_s if self._step_s > 0 else 0.0
        self._clear()
        return values

    def _number(self, step: int) -> int:
        """Return how many versions of this process came before that of `step`; -1 = older than all."""
        return bisect_right(self._published, step) - 1

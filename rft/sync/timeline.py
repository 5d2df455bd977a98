"""Simulate and draw a schedule: when each side works and waits, for given durations of an explore
batch and a train step.

For documentation only; runs follow the schedule itself.  Invariant: it uses only the schedule's two
questions.
"""

from __future__ import annotations

from dataclasses import dataclass

from rft.sync.schedule import Schedule

_OVER = 1e-9  # rounding error in the remaining time of finished work


@dataclass(frozen=True)
class Span:
    """Explore batch or train step `number` from `begin` to `end` (in the unit of the given times).

    `version` = step of its weights.
    """

    number: int
    begin: float
    end: float
    version: int


@dataclass(frozen=True)
class Timeline:
    """The events until the last step was trained.  `published`: (time, step) of each version."""

    explored: tuple[Span, ...]
    trained: tuple[Span, ...]
    published: tuple[tuple[float, int], ...]


def simulate(
    schedule: Schedule,
    *,
    steps: int,
    explore_s: float = 1.0,
    more_s: float = 0.0,
    at_once: int = 1,
    train_s: float = 1.0,
    sync_s: float = 0.0,
    overlap: float = 1.0,
) -> Timeline:
    """Simulate one explorer and one trainer, from the first step on.

    Up to `at_once` batches are explored at a time: a single batch takes `explore_s`, and n together
    `explore_s + (n - 1) * more_s`. `sync_s`: duration of a publication, during which neither side
    works.  `overlap`: speed of each side while both work, 1 on separate devices. Raises
    RuntimeError if neither side can continue.
    """
    run = _Simulated(schedule, explore_s, more_s, at_once, train_s, sync_s, overlap)
    while True:
        if run.syncing is None:
            run.begin_what_may()
        if len(run.trained) == steps and run.syncing is None:
            return Timeline(tuple(run.explored), tuple(run.trained), tuple(run.published))
        run.advance()


@dataclass
class _Work:
    number: int
    begin: float
    remaining_s: float  # remaining time without other work
    version: int


class _Simulated:
    """The state of both sides at the current time."""

    def __init__(
        self,
        schedule: Schedule,
        explore_s: float,
        more_s: float,
        at_once: int,
        train_s: float,
        sync_s: float,
        overlap: float,
    ) -> None:
        self._schedule = schedule
        self._overlap = overlap
        self._at_once = at_once
        self._explore_s = explore_s
        self._more_s = more_s
        self._train_s = train_s
        self._sync_s = sync_s
        self.explored: list[Span] = []
        self.trained: list[Span] = []
        self.published = [(0.0, 0)]
        self.exploring: list[_Work] = []
        self.training: _Work | None = None
        self.syncing: _Work | None = None
        self._now = 0.0
        self._version = 0
        self._loaded_step = 0

    def begin_what_may(self) -> None:
        s = self._schedule
        done = len(self.trained)
        if self.training is None and len(self.explored) * s.batch_units // s.step_units > done:
            oldest = min(
                x.version
                for x in self.explored[
                    done * s.step_units // s.batch_units : self._batches_of(done + 1)
                ]
            )
            self.training = _Work(done + 1, self._now, self._train_s, oldest)
        while len(self.exploring) < self._at_once:
            batch = len(self.explored) + len(self.exploring)
            if self.exploring and s.syncs_before(batch):
                return
            if (
                s.on_demand
                and self.training is None
                and not self._may_explore(batch, self._version)
            ):
                self._publish(requested=self._may_explore(batch, done))
            if self.syncing is not None or not self._may_explore(batch, self._version):
                return
            self.exploring.append(_Work(batch, self._now, self._explore_s, self._version))
            self._loaded_step = self._version

    def advance(self) -> None:
        """Advance to the next end of any work."""
        if not (working := self._speeds()):
            state = (
                f"{len(self.trained)} steps trained, {self._version} published, batch "
                f"{len(self.explored)} waits"
            )
            raise RuntimeError(f"neither side can continue: {state}")
        passed = min(work.remaining_s / speed for work, speed in working)
        self._now += passed
        for work, speed in working:
            work.remaining_s -= passed * speed
        if self.syncing is not None:
            self._version = self.syncing.number
            self.syncing = None
            self.published.append((self._now, self._version))
            return
        if self.training is not None and self.training.remaining_s <= _OVER:
            self.trained.append(self._ended(self.training))
            self.training, done, batch = None, len(self.trained), len(self.explored)
            self._publish(
                requested=not self.exploring
                and self._may_explore(batch, done)
                and not self._may_explore(batch, self._version)
            )
        while self.exploring and self.exploring[0].remaining_s <= _OVER:
            self.explored.append(self._ended(self.exploring.pop(0)))
            self._loaded_step = self._version

    def _speeds(self) -> list[tuple[_Work, float]]:
        """Return the active work with its speed relative to running alone."""
        if self.syncing is not None:
            return [(self.syncing, 1.0)]
        speed = self._overlap if self.exploring and self.training is not None else 1.0
        each = (
            self._explore_s / (self._explore_s + (len(self.exploring) - 1) * self._more_s)
            if len(self.exploring) > 1
            else 1.0
        )
        return [(x, speed * each) for x in self.exploring] + (
            [(self.training, speed)] if self.training is not None else []
        )

    def _publish(self, *, requested: bool) -> None:
        done = len(self.trained)
        if done > self._version and self._schedule.must_publish(done, requested=requested):
            self.syncing = _Work(done, self._now, self._sync_s, done)
            if not self._sync_s:
                self._version = done
                self.syncing = None
                self.published.append((self._now, done))

    def _may_explore(self, batch: int, version: int) -> bool:
        newest = len(self.trained) + (self.training is not None)
        return self._schedule.may_explore(batch, version, prior=self._loaded_step, newest=newest)

    def _batches_of(self, step: int) -> int:
        """Return the number of explore batches that the first `step` steps need."""
        return -(-step * self._schedule.step_units // self._schedule.batch_units)

    def _ended(self, work: _Work) -> Span:
        return Span(work.number, work.begin, self._now, work.version)


WIDTH = 4  # columns of one unit of time


def picture(schedule: Schedule, *, columns: int = 72) -> list[str]:
    """Return three lines: explore batches, train steps and published versions over time, if both
    sides take equally long.
    """
    size = schedule.batch_units / schedule.step_units  # train steps of a batch
    steps = 2 * schedule.interval + schedule.offset + 4
    timeline = simulate(schedule, steps=steps, explore_s=max(1.0, size), train_s=max(1.0, 1 / size))
    lines = ["explore ", "train   ", "weights "]
    for row, spans in ((0, timeline.explored), (1, timeline.trained)):
        for x in spans:
            width = round((x.end - x.begin) * WIDTH)
            lines[row] = (
                lines[row].ljust(8 + round(x.begin * WIDTH))
                + str(x.number).center(width - 1, "▓▒"[row])
                + " "
            )
    for at, step in timeline.published:
        place = 8 + round(at * WIDTH)
        if len(lines[2]) <= place:
            lines[2] = lines[2].ljust(place) + str(step)
    return [line[:columns].rstrip() for line in lines]

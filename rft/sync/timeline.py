"""A picture of a schedule: who works and who waits, if an explore batch and a train step take the times they are given.

A simulation for people; runs follow the schedule itself.  Invariant: it asks nothing but the schedule's three questions.
"""

from __future__ import annotations

from dataclasses import dataclass

from rft.sync.schedule import Schedule


@dataclass(frozen=True)
class Span:
    """From `begin` to `end` (in the unit of the given times) explore batch or train step `number`; `version` = step of its weights."""

    number: int
    begin: float
    end: float
    version: int


@dataclass(frozen=True)
class Timeline:
    """What happened until the last step was trained.  `published`: (time, step) of each version."""

    explored: tuple[Span, ...]
    trained: tuple[Span, ...]
    published: tuple[tuple[float, int], ...]


def simulate(schedule: Schedule, *, steps: int, explore_s: float = 1.0, train_s: float = 1.0) -> Timeline:
    """One explorer, one batch at a time, and one trainer, from the first step on.  Raises RuntimeError when neither can continue."""
    s, size = schedule, schedule.step_units
    explored: list[Span] = []
    trained: list[Span] = []
    published = [(0.0, 0)]
    now, version, held, done = 0.0, 0, 0, 0
    exploring: Span | None = None  # its end is in the future
    training: Span | None = None
    while True:
        batch = len(explored)
        if training is None and (batch * s.batch_units) // size > done:
            oldest = min(x.version for x in explored[done * size // s.batch_units : -(-(done + 1) * size // s.batch_units)])
            training = Span(done + 1, now, now + train_s, oldest)
        newest = done + (training is not None)
        if exploring is None:
            waits = s.on_demand and training is None and not s.may_explore(batch, version, held=held, newest=newest)
            if waits and done > version and s.must_publish(done, asked=s.may_explore(batch, done, held=held, newest=newest)):
                version = done
                published.append((now, version))
            if s.may_explore(batch, version, held=held, newest=newest):
                exploring, held = Span(batch, now, now + explore_s, version), version
        if done == steps:
            return Timeline(tuple(explored), tuple(trained), tuple(published))
        ends = [x.end for x in (exploring, training) if x is not None]
        if not ends:
            raise RuntimeError(f"neither side can continue: {done} steps trained, {version} published, batch {batch} waits")
        now = min(ends)
        if training is not None and training.end == now:
            trained.append(training)
            done, training = done + 1, None
            asks = exploring is None and s.may_explore(batch, done, held=held, newest=done)
            if s.must_publish(done, asked=asks and not s.may_explore(batch, version, held=held, newest=done)):
                version = done
                published.append((now, version))
        if exploring is not None and exploring.end == now:
            explored.append(exploring)
            exploring, held = None, version


WIDTH = 4  # columns of one unit of time


def picture(schedule: Schedule, *, columns: int = 72) -> list[str]:
    """Three lines: explore batches, train steps and published versions over time, where both sides take equally long."""
    size = schedule.batch_units / schedule.step_units  # train steps of a batch
    steps = 2 * schedule.interval + schedule.offset + 4
    found = simulate(schedule, steps=steps, explore_s=max(1.0, size), train_s=max(1.0, 1 / size))
    lines = ["explore ", "train   ", "weights "]
    for row, spans in ((0, found.explored), (1, found.trained)):
        for x in spans:
            width = round((x.end - x.begin) * WIDTH)
            lines[row] = lines[row].ljust(8 + round(x.begin * WIDTH)) + str(x.number).center(width - 1, "▓▒"[row]) + " "
    for at, step in found.published:
        place = 8 + round(at * WIDTH)
        if len(lines[2]) <= place:
            lines[2] = lines[2].ljust(place) + str(step)
    return [line[:columns].rstrip() for line in lines]

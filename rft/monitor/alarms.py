"""Alarms on the metrics of a run: pure functions over series, which are their only state.

Every rule compares the last few steps with the start of the run, in units of its own noise, so that
no rule depends on a model or a task.  Depends on records, not on their source.
Invariant: an alarm is raised once per subject and run, even if the run is resumed.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from statistics import fmean, median

from msgspec import Struct

from rft.types.metrics import MetricRecord

WINDOW = 5  # steps to average
_FIRST = 50  # kept points, first and last; _ORDER: steps that a record may come late
_LAST = 500
_ORDER = 10
_NOISE = 50  # last steps that measure a series' noise
SIGMAS = 4.0
REWARD = "rollout/reward/mean"
LOGGED = "alarm/"  # prefix of an alarm among the records, after the record that raised it
WATCHED = (
    "rollout/",
    "eval/",
    "judge/",
    "actor/kl",
    "actor/ppo_kl",
    "advantage/kl",
    "mismatch/",
    "frac_reward_zero_std",
    "perf/step_s",
    "time/wait_s",
    "explorer/idle_ratio",
)
# covers only accepted groups; rules read the explorer's metric of this name
_TRAINERS = ("trainer", "frac_reward_zero_std")
Points = list[tuple[int, float]]


class AlarmFinding(Struct, frozen=True):
    """One alarm raised by a record of `role`; "": not related to rows."""

    name: str
    subject: str
    role: str
    step: int
    since: int
    saw: str
    hint: str

    @property
    def rows(self) -> str:
        """An SQL condition on v_experiences: rows used by these train steps, or made by these
        explore steps; batches count from 0.
        """
        if self.role == "trainer":
            return f"used_step BETWEEN {self.since} AND {self.step}"
        return f"batch BETWEEN {max(self.since - 1, 0)} AND {self.step - 1}" if self.role else ""

    def text(self) -> str:
        """Return a text for logs, trackers and terminals."""
        rows = f"  Look: rft buffer sample RUN --where '{self.rows}'." if self.rows else ""
        return f"alarm {self.name}: {self.saw} (since step {self.since}).{rows}  {self.hint}"


class History:
    """The series of a run that rules read; if a step is written again, the later value counts.

    A series keeps its first 50 and its last 500 points, so that the cost of a step does not grow
    with the run.
    """

    def __init__(self) -> None:
        self.points: dict[str, Points] = defaultdict(list)
        self._range: dict[str, tuple[float, float]] = {}

    def add(self, record: MetricRecord) -> None:
        for name, value in record.values.items():
            if (
                name.startswith(WATCHED)
                and math.isfinite(value)
                and (record.role, name) != _TRAINERS
            ):
                low, high = self._range.get(name, (value, value))
                self._range[name] = (min(low, value), max(high, value))
                self._put(self.points[name], record.step, value)

    @staticmethod
    def _put(points: Points, step: int, value: float) -> None:
        """Insert a point in order, since several explorers may report out of order.

        A step far back means that the run continued from an earlier checkpoint: later points are
        dropped.
        """
        if points and step < points[-1][0] - _ORDER:
            del points[bisect_left(points, (step,)) :]
        at = bisect_left(points, (step,))
        points[at : at + (at < len(points) and points[at][0] == step)] = [(step, value)]
        if len(points) > _FIRST + _LAST:
            del points[_FIRST]

    def series(self, name: str) -> Points:
        return self.points.get(name, [])

    def recent(self, name: str, count: int = WINDOW) -> float | None:
        """Return the mean of the last `count` values; None if there are fewer."""
        points = self.series(name)
        return fmean(v for _, v in points[-count:]) if len(points) >= count else None

    def noise(self, name: str) -> float:
        """Return the standard deviation of one step's value around its trend, from differences of
        neighbours (robust to a few jumps).
        """
        points = self.series(name)[-_NOISE:]
        apart = [abs(b - a) for (_, a), (_, b) in pairwise(points)]
        return max(median(apart) / 0.954, fmean(apart) / 4) if apart else 0.0

    def moved(self, name: str) -> tuple[float, float, bool]:
        """Return (mean at the start, current mean, whether the difference exceeds the noise); 0, 0,
        False for too few points.
        """
        points = self.series(name)
        if len(points) < 2 * WINDOW:
            return 0.0, 0.0, False
        first = fmean(v for _, v in points[:WINDOW])
        now = fmean(v for _, v in points[-WINDOW:])
        return first, now, abs(now - first) > SIGMAS * self.noise(name) * (2 / WINDOW) ** 0.5

    def since(self, name: str, beyond: Callable[[float], bool]) -> int:
        """Return the first step of the final stretch in which `beyond` holds for the mean of WINDOW
        values.
        """
        points = self.series(name)
        at = 0
        for i in range(len(points) - 1, -1, -1):
            at = points[i][0]
            if not beyond(fmean(v for _, v in points[max(0, i + 1 - WINDOW) : i + 1])):
                return points[min(i + 1, len(points) - 1)][0]
        return at

    def solved(self) -> float | None:
        """Return the training reward relative to the lowest and highest of the run, 0 to 1; None
        without any spread.
        """
        now = self.recent(REWARD)
        if now is None or "rollout/reward/min" not in self._range:
            return None
        least = self._range["rollout/reward/min"][0]
        most = self._range["rollout/reward/max"][1]
        return (now - least) / (most - least) if most > least else None


Rule = Callable[[History, MetricRecord], Iterator[AlarmFinding]]


class Alarms:
    """Applies every rule to one run.  `levels`: off, warn or stop by name of the rule."""

    def __init__(self, levels: Mapping[str, str], rules: dict[str, Rule]) -> None:
        self._rules = {
            name: rule for name, rule in rules.items() if levels.get(name, "off") != "off"
        }
        self._levels = levels
        self._history = History()
        self._raised: set[tuple[str, str]] = set()

    def resume(self, records: Iterable[MetricRecord]) -> None:
        """Read the records of an earlier process of the run; its alarms are not raised again.

        Only rules that raised an alarm are evaluated, since evaluating all rules on every record
        takes minutes for a long run.
        """
        before: dict[str, MetricRecord] = {}  # last record by role
        for record in records:
            raised = [n.removeprefix(LOGGED) for n in record.values if n.startswith(LOGGED)]
            for rule in [
                self._rules[n] for n in raised if n in self._rules and record.role in before
            ]:
                self._raised |= {
                    (f.name, f.subject) for f in rule(self._history, before[record.role])
                }
            if not raised:
                self._history.add(record)
                before[record.role] = record

    def see(self, record: MetricRecord) -> list[AlarmFinding]:
        """Return the alarms that `record` raises for the first time."""
        self._history.add(record)
        findings = [
            f
            for rule in self._rules.values()
            for f in rule(self._history, record)
            if (f.name, f.subject) not in self._raised
        ]
        self._raised |= {(f.name, f.subject) for f in findings}
        return findings

    def stops(self, finding: AlarmFinding) -> bool:
        return self._levels[finding.name] == "stop"

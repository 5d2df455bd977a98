"""Alarms: what a run's numbers say before a person looks.  Pure functions over series, with the
series as their only state.

Every rule compares the last few steps with how the run began, in units of its own noise, so that no
rule knows a model or a task.  It knows records; not who logs them.  Invariant: one alarm is raised
once per subject and run, also where the run is resumed.
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

WINDOW = 5  # steps that are averaged
_FIRST = 50  # points that are kept; how many steps late a record may come
_LAST = 500
_ORDER = 10
_NOISE = 50  # steps from which a series' noise is taken
SIGMAS = 4.0
REWARD = "rollout/reward/mean"
LOGGED = "alarm/"  # and its name: an alarm among the records, behind the one that raised it
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
# of accepted groups alone; rules read the explorer's of this name
_TRAINERS = ("trainer", "frac_reward_zero_std")
Points = list[tuple[int, float]]


class AlarmFinding(Struct, frozen=True):
    """One alarm, of a record of `role`; "": no rows are concerned."""

    name: str
    subject: str
    role: str
    step: int
    since: int
    saw: str
    hint: str

    @property
    def rows(self) -> str:
        """An SQL condition on v_experiences: what these train steps used, or these explore steps
        made; batches count from 0.
        """
        if self.role == "trainer":
            return f"used_step BETWEEN {self.since} AND {self.step}"
        return f"batch BETWEEN {max(self.since - 1, 0)} AND {self.step - 1}" if self.role else ""

    def text(self) -> str:
        """In words, for a log, a tracker, a terminal."""
        rows = f"  Look: rft buffer sample RUN --where '{self.rows}'." if self.rows else ""
        return f"alarm {self.name}: {self.saw} (since step {self.since}).{rows}  {self.hint}"


class History:
    """The series of a run, as far as rules read them; of a step that is written again the later
    value holds.

    A series keeps its first 50 and its last 500 points, so that a step costs the same however long
    the run is.
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
    def _put(mine: Points, step: int, value: float) -> None:
        """In its place: several explorers may report out of order.  A step far behind: the run went
        on from a checkpoint before.
        """
        if mine and step < mine[-1][0] - _ORDER:
            del mine[bisect_left(mine, (step,)) :]
        at = bisect_left(mine, (step,))
        mine[at : at + (at < len(mine) and mine[at][0] == step)] = [(step, value)]
        if len(mine) > _FIRST + _LAST:
            del mine[_FIRST]

    def of(self, name: str) -> Points:
        return self.points.get(name, [])

    def recent(self, name: str, count: int = WINDOW) -> float | None:
        """Mean of the last `count` values; None if there are fewer."""
        mine = self.of(name)
        return fmean(v for _, v in mine[-count:]) if len(mine) >= count else None

    def noise(self, name: str) -> float:
        """Standard deviation of one step's value around its trend, from the differences of
        neighbours (robust to a few jumps).
        """
        mine = self.of(name)[-_NOISE:]
        apart = [abs(b - a) for (_, a), (_, b) in pairwise(mine)]
        return max(median(apart) / 0.954, fmean(apart) / 4) if apart else 0.0

    def moved(self, name: str) -> tuple[float, float, bool]:
        """(mean at the beginning, mean now, whether the difference stands out from the noise);
        equal where there is too little.
        """
        mine = self.of(name)
        if len(mine) < 2 * WINDOW:
            return 0.0, 0.0, False
        first = fmean(v for _, v in mine[:WINDOW])
        now = fmean(v for _, v in mine[-WINDOW:])
        return first, now, abs(now - first) > SIGMAS * self.noise(name) * (2 / WINDOW) ** 0.5

    def since(self, name: str, beyond: Callable[[float], bool]) -> int:
        """The first step of the unbroken end of a series in which `beyond` holds for the mean of
        WINDOW values.
        """
        mine = self.of(name)
        at = 0
        for i in range(len(mine) - 1, -1, -1):
            at = mine[i][0]
            if not beyond(fmean(v for _, v in mine[max(0, i + 1 - WINDOW) : i + 1])):
                return mine[min(i + 1, len(mine) - 1)][0]
        return at

    def solved(self) -> float | None:
        """Where the training reward is between the least and the greatest that the run has seen: 0
        to 1; None without any spread.
        """
        now = self.recent(REWARD)
        if now is None or "rollout/reward/min" not in self._range:
            return None
        least = self._range["rollout/reward/min"][0]
        most = self._range["rollout/reward/max"][1]
        return (now - least) / (most - least) if most > least else None


Rule = Callable[[History, MetricRecord], Iterator[AlarmFinding]]


class Alarms:
    """Every rule over one run.  `levels`: by name of the rule, off, warn or stop."""

    def __init__(self, levels: Mapping[str, str], rules: dict[str, Rule]) -> None:
        self._rules = {
            name: rule for name, rule in rules.items() if levels.get(name, "off") != "off"
        }
        self._levels = levels
        self._history = History()
        self._raised: set[tuple[str, str]] = set()

    def resume(self, records: Iterable[MetricRecord]) -> None:
        """Take what an earlier process of the run has written; what it raised is not raised again.

        A rule is asked only where it raised an alarm: to ask all of them about every record takes
        minutes for a long run.
        """
        before: dict[str, MetricRecord] = {}  # by role
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
        """What `record` adds: alarms that were not raised before."""
        self._history.add(record)
        found = [
            f
            for rule in self._rules.values()
            for f in rule(self._history, record)
            if (f.name, f.subject) not in self._raised
        ]
        self._raised |= {(f.name, f.subject) for f in found}
        return found

    def stops(self, finding: AlarmFinding) -> bool:
        return self._levels[finding.name] == "stop"

"""Metrics of a run as curves, kept up to date while the run writes them.

Depends on metrics.jsonl, on no pages.  Invariant: a point is a value that a record holds; where a
step was written again, the later one.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rft.monitor.curves import is_evaluation
from rft.monitor.pictures import Bar, bars, shares
from rft.monitor.read import AllSeries, MetricTail, Spent, begins
from rft.types.metrics import MetricRecord

Axis = Literal["step", "time", "tokens"]
AXES: dict[Axis, str] = {
    "step": "step",
    "time": "hours since the first record",
    "tokens": "trained response tokens",
}
TOKENS = "experience/response_tokens"
_ALARM = "alarm/"
_NOTES = 200
_RECENT = 400  # records that the timeline is drawn from
MOST_POINTS = 2000  # of one curve that are drawn


@dataclass(frozen=True)
class AlarmLine:
    """The records of one alarm: how many, the first and the last."""

    name: str
    count: int
    first_step: int
    last_step: int


class Curves:
    """All metrics of one run.  A name that two roles use is followed by the second one's role:
    `frac_reward_zero_std@trainer`.
    """

    def __init__(self, run_dir: Path, follows: Callable[[str], bool] | None = None) -> None:
        """`follows`: which names are followed, without what the timeline is drawn from; None: all,
        and with it.
        """
        self._tail = MetricTail(run_dir / "metrics.jsonl")
        self._follows = follows or (lambda name: True)
        self._recent = 0 if follows else _RECENT
        self._begin()

    def _begin(self) -> None:
        self._all = AllSeries(self._follows)
        self.series = self._all.by_name
        self.notes: deque[tuple[str, int, str]] = deque(maxlen=_NOTES)  # role, step, text
        self.alarms: dict[str, AlarmLine] = {}
        self._spent = Spent()
        self.num_records = 0
        self.began = math.inf  # time of the first record
        self.last: MetricRecord | None = None  # train step
        self.recent: deque[MetricRecord] = deque(maxlen=self._recent)
        self._first_sync: MetricRecord | None = None  # of the newest process
        self._restarts = self._tail.restarts

    @property
    def problems(self) -> list[str]:
        return self._tail.problems

    def refresh(self) -> None:
        """Take in what was written since."""
        for record in self._tail.new():
            if self._tail.restarts != self._restarts:
                self._begin()
            self._take(record)

    def _take(self, record: MetricRecord) -> None:
        self.num_records += 1
        self._spent.take(record)
        self.began = min(self.began, record.time)
        self._all.take(record)
        for name in (n for n in record.values if n.startswith(_ALARM)):
            old = self.alarms.get(name, AlarmLine(name, 0, record.step, record.step))
            self.alarms[name] = AlarmLine(name, old.count + 1, old.first_step, record.step)
        self.notes.extend((record.role, record.step, note) for note in record.notes)
        self.recent.append(record)
        if record.role == "trainer":
            self.last = record
        elif begins(record):
            self._first_sync = record

    def timeline(self, last: int) -> tuple[list[Bar], dict[str, float]]:
        """What `rft timeline` draws of the last train steps.  Raises RunFailed where there is
        nothing to draw.
        """
        records = list(self.recent)
        if self._first_sync is not None and not any(r is self._first_sync for r in records):
            records.insert(0, self._first_sync)
        timeline_bars = bars(records, last=last)
        return timeline_bars, shares(timeline_bars)

    # ------------------------------------------------------------ asking

    def newest(self, name: str) -> tuple[int, float] | None:
        """Step and value of the newest point."""
        curve = self.series.get(name)
        return (curve.steps[-1], curve.values[-1]) if curve else None

    def points(self, name: str, axis: Axis) -> tuple[np.ndarray, np.ndarray]:
        """x and y of one metric, thinned to what can be drawn: of equal parts the lowest and the
        highest value stay.
        """
        curve = self.series[name]
        values = np.array(curve.values)
        if axis == "step":
            x = np.array(curve.steps, np.float64)
        elif axis == "time":
            x = (np.array(curve.times) - self.began) / 3600
        else:
            x = self._tokens(np.array(curve.times))
        # records of several roles may be written in another order than their times
        if axis != "step":
            order = np.argsort(x, kind="stable")
            x = x[order]
            values = values[order]
        thinned = _thinned(values)
        return x[thinned], values[thinned]

    def _tokens(self, times: np.ndarray) -> np.ndarray:
        trained = self.series.get(TOKENS)
        if trained is None:
            return np.zeros(len(times))
        total = np.concatenate([[0.0], np.cumsum(np.array(trained.values))])
        tokens: np.ndarray = total[np.searchsorted(np.array(trained.times), times, side="right")]
        return tokens

    def cost_usd(self) -> float | None:
        """What judges have cost; None where none says."""
        return self._spent.usd if self._spent.has_costs else None

    def evals(self) -> Iterator[dict[str, Any]]:
        """The first and the newest value of each evaluation."""
        for name, curve in sorted(self.series.items()):
            if is_evaluation(name) and curve:
                ends = (
                    ("first", curve.values[0], curve.steps[0]),
                    ("newest", curve.values[-1], curve.steps[-1]),
                )
                yield {
                    "name": name.removeprefix("eval/"),
                    **{k: {"value": v, "step": s} for k, v, s in ends},
                }


def _thinned(values: np.ndarray) -> np.ndarray:
    """Indexes, ascending, of at most about `MOST_POINTS` points."""
    if len(values) <= MOST_POINTS:
        return np.arange(len(values))
    size = -(-len(values) // (MOST_POINTS // 2))
    padded = np.full(-(-len(values) // size) * size, np.nan)
    padded[: len(values)] = values
    parts = padded.reshape(-1, size)
    starts = np.arange(0, len(padded), size)
    missing = np.isnan(parts)
    lowest = starts + np.where(missing, np.inf, parts).argmin(1)
    highest = starts + np.where(missing, -np.inf, parts).argmax(1)
    return np.unique(np.concatenate([lowest, highest, [len(values) - 1]]))


def spark(values: list[float], points: int = 60) -> str:
    """The path of a small curve in a box of 120 × 24; "" for fewer than two numbers."""
    finite = [v for v in values if math.isfinite(v)]
    if len(finite) < 2:
        return ""
    if len(finite) > points:
        edges = [round(i * len(finite) / points) for i in range(points + 1)]
        finite = [sum(finite[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low = min(finite)
    high = max(finite)
    scale = 20 / (high - low) if high > low else 0.0
    step = 116 / (len(finite) - 1)
    return "M" + " L".join(
        f"{2 + i * step:.1f},{22 - (v - low) * scale:.1f}" for i, v in enumerate(finite)
    )

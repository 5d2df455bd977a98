"""Read metrics.jsonl, also while the run is writing it.

Invariant: returned records were written completely.  An incomplete last line is skipped and
reported; a damaged line before it is an error.
"""

from __future__ import annotations

import logging
import math
import os
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec

from rft.errors import RunFailed
from rft.files.disk import open_regular
from rft.types.metrics import MetricRecord, Role

log = logging.getLogger(__name__)


class _Line(msgspec.Struct):
    role: Role
    step: Annotated[int, msgspec.Meta(ge=-(1 << 53), le=1 << 53)]
    time: float
    values: dict[str, float | None]
    notes: tuple[str, ...] = ()


_PORTION_BYTES = 4 << 20  # bytes read at once
_MOST_PROBLEMS = 20  # maximum reported problems
MOST_LINE = 16 << 20  # bytes of a line
_decoder = msgspec.json.Decoder(_Line)


class Records:
    """All complete records of `path`, read again at each iteration, one at a time; NaN and
    infinity, stored as null, become NaN.

    `note` describes what the last iteration skipped.  Raises RunFailed for a damaged line, OSError
    unless it is a regular file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.note = ""

    def __iter__(self) -> Iterator[MetricRecord]:
        open_regular(self._path).close()
        tail = MetricTail(self._path)
        yield from tail.new()
        if tail.problems:
            raise RunFailed(tail.problems[0])
        cut = (
            f"the last line is cut after {tail.cut} bytes and left out (a crash, or it is being "
            f"written)"
        )
        self.note = f"{self._path}: {cut}" if tail.cut else ""


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield lines with their ends; a line of more than `MOST_LINE` bytes is cut and is the last."""
    while line := file.readline(MOST_LINE + 1):
        yield line
        if not line.endswith(b"\n"):
            return


def read(path: Path) -> list[MetricRecord]:
    """Read all `Records` at once; skipped lines are logged as a warning."""
    records = Records(path)
    all_records = list(records)
    if records.note:
        log.warning("%s", records.note)
    return all_records


class Series:
    """One metric of a run by step; if two roles use the name, of the role that used it first.

    If a resumed run writes a step again, the later value counts.  Steps of an attempt beyond the
    start of the next process are dropped, except explore batches ahead of a checkpoint, which may
    not be played again.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._role = ""
        self.steps = array("q")
        self.times = array("d")
        self.values = array("d")

    def __len__(self) -> int:
        return len(self.steps)

    def take(self, r: MetricRecord) -> None:
        if begins(r):
            self.begin(r.step)
        if self.name in r.values and self._role in ("", r.role):
            self.add(r)

    def begin(self, step: int) -> None:
        """Handle a process that begins with `step`."""
        if self._role != "explorer" or not step:
            length = bisect_right(self.steps, step)
            del self.steps[length:], self.times[length:], self.values[length:]

    def add(self, r: MetricRecord) -> None:
        """Add a record of the series' role that has this metric."""
        self._role = r.role
        steps = self.steps
        value = r.values[self.name]
        at = len(steps) if not steps or steps[-1] < r.step else bisect_left(steps, r.step)
        if at < len(steps) and steps[at] == r.step:  # a resumed run writes steps again
            self.times[at], self.values[at] = r.time, value
        else:  # several explorers finish batches in any order
            steps.insert(at, r.step)
            self.times.insert(at, r.time)
            self.values.insert(at, value)

    def points(self) -> list[tuple[int, float]]:
        """Return (step, value) pairs by step."""
        return list(zip(self.steps, self.values, strict=True))


class AllSeries:
    """The series whose names pass `wants`, of all records taken so far; records are not kept.

    If two roles use a name, the second role is appended: `frac_reward_zero_std@trainer`.
    """

    def __init__(self, wants: Callable[[str], bool], records: Iterable[MetricRecord] = ()) -> None:
        self.by_name: dict[str, Series] = {}
        self._wants = wants
        self._by_role: dict[tuple[str, str], Series | None] = {}  # by (name, role)
        for record in records:
            self.take(record)

    def take(self, r: MetricRecord) -> None:
        if begins(r):
            for curve in self.by_name.values():
                curve.begin(r.step)
        for name in r.values:
            if (name, r.role) not in self._by_role:
                self._by_role[name, r.role] = Series(name) if self._wants(name) else None
                if (new := self._by_role[name, r.role]) is not None:
                    self.by_name[name if name not in self.by_name else f"{name}@{r.role}"] = new
            if (series := self._by_role[name, r.role]) is not None:
                series.add(r)

    @property
    def names(self) -> list[str]:
        """Names of all metrics in the order of their first appearance."""
        return list(dict.fromkeys(name for name, _ in self._by_role))

    def points(self, name: str) -> list[tuple[int, float]]:
        """Return the points of a series; empty if the name is unknown."""
        return self.by_name[name].points() if name in self.by_name else []


def series(records: Iterable[MetricRecord], name: str) -> list[tuple[int, float]]:
    """Return the points of one `Series`."""
    return AllSeries(name.__eq__, records).points(name)


def begins(record: MetricRecord) -> bool:
    """Return whether it is the first record of a process of the run: a starting trainer publishes
    first.
    """
    return record.role == "synchronizer" and "explorer/idle_ratio" not in record.values


class Spent:
    """Costs of judges and of a measured server in the records taken so far, USD.

    Judges count from the start of their process, so the totals of processes are added; of several
    explorers the maximum counts.
    """

    def __init__(self) -> None:
        self._before = 0.0
        self._now = dict[tuple[str, str], float]()
        self.has_costs = False  # whether any record has a cost

    def take(self, record: MetricRecord) -> None:
        if begins(record):
            self._before += sum(self._now.values())
            self._now.clear()
        for name in (n for n in record.values if n.endswith("/cost_usd")):
            self._now[record.role, name] = max(
                record.values[name], self._now.get((record.role, name), 0.0)
            )
            self.has_costs = True

    @property
    def usd(self) -> float:
        return self._before + sum(self._now.values())


class MetricTail:
    """Records as they are appended to `path`, for a continuous reader.

    `problems` lists damaged lines, which are skipped; if the file restarts, reading restarts, and
    `restarts` counts that.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problems: list[str] = []
        self.restarts = 0
        self._file = (0, 0)  # device and inode
        self._read = self._line = 0  # bytes and lines read so far
        self.cut = 0  # bytes of an incomplete last line

    def new(self) -> Iterator[MetricRecord]:
        """Yield all complete records since the last call."""
        at = -1
        while at != self._read:
            at = self._read
            yield from self._portion()

    def _portion(self) -> list[MetricRecord]:
        portion: list[MetricRecord] = []
        try:
            with open_regular(self.path) as file:
                stat = os.fstat(file.fileno())
                if (stat.st_dev, stat.st_ino) != self._file or stat.st_size < self._read:
                    self.restarts += self._read > 0
                    self._file = (stat.st_dev, stat.st_ino)
                    self._read = 0
                    self._line = 0
                    self.problems = []
                file.seek(self._read)
                begin = self._read
                self.cut = 0
                for line in _lines(file):
                    if not line.endswith(b"\n"):
                        self.cut = len(line)
                        break
                    self._read += len(line)
                    self._line += 1
                    try:
                        portion.append(_record(self.path, self._line, line))
                    except RunFailed as e:
                        if len(self.problems) < _MOST_PROBLEMS:
                            self.problems.append(str(e))
                    if self._read - begin >= _PORTION_BYTES:
                        break
        except FileNotFoundError:
            pass
        except OSError as e:
            self.problems = [f"{self.path} {e.strerror}"]
        if self.cut > MOST_LINE:
            self.problems = [
                f"{self.path}:{self._line + 1} is longer than {MOST_LINE:,} bytes; what follows is "
                f"not read"
            ]
        return portion


def _record(path: Path, number: int, line: bytes) -> MetricRecord:
    try:
        parsed = _decoder.decode(line)
    except msgspec.MsgspecError as e:
        raise RunFailed(
            f"{path}:{number} is not a metric record: {e}; remove the line to read the rest"
        ) from e
    values: dict[str, Any] = {k: math.nan if v is None else v for k, v in parsed.values.items()}
    return MetricRecord(
        role=parsed.role, step=parsed.step, time=parsed.time, values=values, notes=parsed.notes
    )

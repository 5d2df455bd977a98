"""Reading metrics.jsonl back, also while the run is writing it.

Invariant: what is returned was written whole.  A last line without its end is left out and said so;
a damaged line before it is an error.
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


_PORTION_BYTES = 4 << 20  # that are read at once
_MOST_PROBLEMS = 20  # that are reported
MOST_LINE = 16 << 20  # bytes of a line
_decoder = msgspec.json.Decoder(_Line)


class Records:
    """All whole records of `path`, read anew and one at a time whenever they are asked for; NaN and
    infinity, stored as null, are NaN.

    `note` says what the last reading left out.  Raises RunFailed for a damaged line, OSError for
    what is no plain file.
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
    """With their ends; one of more than `MOST_LINE` bytes is cut there and is the last."""
    while line := file.readline(MOST_LINE + 1):
        yield line
        if not line.endswith(b"\n"):
            return


def read(path: Path) -> list[MetricRecord]:
    """All `Records` at once; what was left out goes to the log as a warning."""
    records = Records(path)
    found = list(records)
    if records.note:
        log.warning("%s", records.note)
    return found


class Series:
    """One metric of a run, by step; of a name that two roles use, the role that used it first.

    Where a resumed run wrote a step again, the later value holds; what an attempt wrote beyond the
    step that the next process began with is left out, but for explore batches ahead of a
    checkpoint, which are not always played again.
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
        """A process begins with `step`."""
        if self._role != "explorer" or not step:
            kept = bisect_right(self.steps, step)
            del self.steps[kept:], self.times[kept:], self.values[kept:]

    def add(self, r: MetricRecord) -> None:
        """A record of its role that has this metric."""
        self._role = r.role
        steps = self.steps
        value = r.values[self.name]
        at = len(steps) if not steps or steps[-1] < r.step else bisect_left(steps, r.step)
        if at < len(steps) and steps[at] == r.step:  # a resumed run writes steps again
            self.times[at], self.values[at] = r.time, value
        else:  # several explorers end batches in any order
            steps.insert(at, r.step)
            self.times.insert(at, r.time)
            self.values.insert(at, value)

    def points(self) -> list[tuple[int, float]]:
        """(step, value) by step."""
        return list(zip(self.steps, self.values, strict=True))


class AllSeries:
    """The series whose names are `wanted`, of all records taken so far, which are not kept.

    A name that two roles use is followed by the second one's role: `frac_reward_zero_std@trainer`.
    """

    def __init__(self, wanted: Callable[[str], bool], records: Iterable[MetricRecord] = ()) -> None:
        self.found: dict[str, Series] = {}
        self._wanted = wanted
        self._known: dict[tuple[str, str], Series | None] = {}  # by name and role
        for record in records:
            self.take(record)

    def take(self, r: MetricRecord) -> None:
        if begins(r):
            for known in self.found.values():
                known.begin(r.step)
        for name in r.values:
            if (name, r.role) not in self._known:
                self._known[name, r.role] = Series(name) if self._wanted(name) else None
                if (new := self._known[name, r.role]) is not None:
                    self.found[name if name not in self.found else f"{name}@{r.role}"] = new
            if (mine := self._known[name, r.role]) is not None:
                mine.add(r)

    @property
    def names(self) -> list[str]:
        """Of all metrics, in the order in which they appear first."""
        return list(dict.fromkeys(name for name, _ in self._known))

    def points(self, name: str) -> list[tuple[int, float]]:
        """No points where it is not known."""
        return self.found[name].points() if name in self.found else []


def series(records: Iterable[MetricRecord], name: str) -> list[tuple[int, float]]:
    """The points of a `Series`."""
    return AllSeries(name.__eq__, records).points(name)


def begins(record: MetricRecord) -> bool:
    """Whether it is the first of a process of the run: a trainer that begins publishes first."""
    return record.role == "synchronizer" and "explorer/idle_ratio" not in record.values


class Spent:
    """What judges and a measured server have cost by the records taken so far, USD.

    Judges count from the start of their process, so what each process came to is added; of several
    explorers the dearest counts.
    """

    def __init__(self) -> None:
        self._before = 0.0
        self._now = dict[tuple[str, str], float]()
        self.told = False  # whether any record names a cost

    def take(self, record: MetricRecord) -> None:
        if begins(record):
            self._before += sum(self._now.values())
            self._now.clear()
        for name in (n for n in record.values if n.endswith("/cost_usd")):
            self._now[record.role, name] = max(
                record.values[name], self._now.get((record.role, name), 0.0)
            )
            self.told = True

    @property
    def usd(self) -> float:
        return self._before + sum(self._now.values())


class MetricTail:
    """Records as they are added to `path`, for a reader that stays.

    `problems` names damaged lines, which are passed over; a file that was begun anew is read from
    its begin, `restarts` counts that.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problems: list[str] = []
        self.restarts = 0
        self._file = (0, 0)  # device and inode
        self._read = self._line = 0  # bytes, and lines, taken so far
        self.cut = 0  # bytes of a last line without its end

    def new(self) -> Iterator[MetricRecord]:
        """All whole records since the last call."""
        at = -1
        while at != self._read:
            at = self._read
            yield from self._portion()

    def _portion(self) -> list[MetricRecord]:
        found: list[MetricRecord] = []
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
                        found.append(_record(self.path, self._line, line))
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
        return found


def _record(path: Path, number: int, line: bytes) -> MetricRecord:
    try:
        found = _decoder.decode(line)
    except msgspec.MsgspecError as e:
        raise RunFailed(
            f"{path}:{number} is not a metric record: {e}; remove the line to read the rest"
        ) from e
    values: dict[str, Any] = {k: math.nan if v is None else v for k, v in found.values.items()}
    return MetricRecord(
        role=found.role, step=found.step, time=found.time, values=values, notes=found.notes
    )

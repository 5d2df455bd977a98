"""Reading metrics.jsonl back, also while the run is writing it.

Invariant: what is returned was written whole.  A last line without its end is left out and said so; a damaged line before it is
an error.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec

from rft.disk import open_regular
from rft.errors import RunFailed
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


@dataclass(frozen=True)
class Metrics:
    """Records in the order they were written; `note` says what was left out, "" if nothing."""

    records: list[MetricRecord]
    note: str = ""


def scan(path: Path) -> Metrics:
    """All whole records of `path`; NaN and infinity, stored as null, come back as NaN.

    Raises RunFailed for a damaged line, OSError for what is no plain file.
    """
    records, rest = [], b""
    with open_regular(path) as file:
        for number, line in enumerate(_lines(file), 1):
            if line.endswith(b"\n"):
                records.append(_record(path, number, line))
            else:
                rest = line
    if len(rest) > MOST_LINE:
        raise RunFailed(f"{path}:{len(records) + 1} is longer than {MOST_LINE:,} bytes: no metric record")
    note = f"{path}: the last line is cut after {len(rest)} bytes and left out (a crash, or it is being written)" if rest else ""
    return Metrics(records, note)


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """With their ends; one of more than `MOST_LINE` bytes is cut there and is the last."""
    while line := file.readline(MOST_LINE + 1):
        yield line
        if not line.endswith(b"\n"):
            return


def read(path: Path) -> list[MetricRecord]:
    """Like `scan`; what was left out goes to the log as a warning."""
    found = scan(path)
    if found.note:
        log.warning("%s", found.note)
    return found.records


class Series:
    """One metric of a run; of a name that two roles use, the role that used it first.

    Where a resumed run wrote a step again, the later value holds; what an attempt wrote beyond the step that the next process began with
    is left out, but for explore batches ahead of a checkpoint, which are not always played again.
    """

    def __init__(self, name: str) -> None:
        self._name, self._role = name, ""
        self._found: dict[int, float] = {}

    def take(self, r: MetricRecord) -> None:
        if begins(r) and (self._role != "explorer" or not r.step):
            self._found = {step: value for step, value in self._found.items() if step <= r.step}
        if self._name in r.values and r.role == (role := self._role or r.role):
            self._role = role
            self._found[r.step] = r.values[self._name]

    def points(self) -> list[tuple[int, float]]:
        """(step, value) by step."""
        return sorted(self._found.items())


def series(records: Iterable[MetricRecord], name: str) -> list[tuple[int, float]]:
    """The points of a `Series`."""
    made = Series(name)
    for record in records:
        made.take(record)
    return made.points()


def begins(record: MetricRecord) -> bool:
    """Whether it is the first of a process of the run: a trainer that begins publishes first."""
    return record.role == "synchronizer" and "explorer/idle_ratio" not in record.values


class Spent:
    """What judges and a measured server have cost by the records taken so far, USD.

    Judges count from the start of their process, so what each process came to is added; of several explorers the dearest counts.
    """

    def __init__(self) -> None:
        self._before, self._now = 0.0, dict[tuple[str, str], float]()
        self.told = False  # whether any record names a cost

    def take(self, record: MetricRecord) -> None:
        if begins(record):
            self._before += sum(self._now.values())
            self._now.clear()
        for name in (n for n in record.values if n.endswith("/cost_usd")):
            self._now[record.role, name] = max(record.values[name], self._now.get((record.role, name), 0.0))
            self.told = True

    @property
    def usd(self) -> float:
        return self._before + sum(self._now.values())


class MetricTail:
    """Records as they are added to `path`, for a reader that stays.

    `problems` names damaged lines, which are passed over; a file that was begun anew is read from its begin, `restarts` counts that.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problems: list[str] = []
        self.restarts = 0
        self._file = (0, 0)  # device and inode
        self._read = self._line = 0  # bytes, and lines, taken so far

    def new(self) -> Iterator[MetricRecord]:
        """All whole records since the last call."""
        at = -1
        while at != self._read:
            at = self._read
            yield from self._portion()

    def _portion(self) -> list[MetricRecord]:
        try:
            with open_regular(self.path) as file:
                stat = os.fstat(file.fileno())
                if (stat.st_dev, stat.st_ino) != self._file or stat.st_size < self._read:
                    self.restarts += self._read > 0
                    self._file, self._read, self._line = (stat.st_dev, stat.st_ino), 0, 0
                    self.problems = []
                file.seek(self._read)
                lines, size = [], 0
                for line in _lines(file):
                    lines.append(line)
                    if (size := size + len(line)) >= _PORTION_BYTES:
                        break
        except FileNotFoundError:
            return []
        except OSError as e:
            self.problems = [f"{self.path} {e.strerror}"]
            return []
        found = []
        for line in lines:
            if not line.endswith(b"\n"):
                if len(line) > MOST_LINE:
                    self.problems = [f"{self.path}:{self._line + 1} is longer than {MOST_LINE:,} bytes; what follows is not read"]
                break  # being written
            self._read += len(line)
            self._line += 1
            try:
                found.append(_record(self.path, self._line, line))
            except RunFailed as e:
                if len(self.problems) < _MOST_PROBLEMS:
                    self.problems.append(str(e))
        return found


def _record(path: Path, number: int, line: bytes) -> MetricRecord:
    try:
        found = _decoder.decode(line)
    except msgspec.MsgspecError as e:
        raise RunFailed(f"{path}:{number} is not a metric record: {e}; remove the line to read the rest") from e
    values: dict[str, Any] = {k: math.nan if v is None else v for k, v in found.values.items()}
    return MetricRecord(role=found.role, step=found.step, time=found.time, values=values, notes=found.notes)

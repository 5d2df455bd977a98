"""Reading metrics.jsonl back, also while the run is writing it.

Invariant: what is returned was written whole.  A last line without its end is left out and said so; a damaged line before it is
an error.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rft.errors import RunFailed
from rft.types.metrics import MetricRecord, Role

log = logging.getLogger(__name__)


class _Line(msgspec.Struct):
    role: Role
    step: int
    time: float
    values: dict[str, float | None]
    notes: tuple[str, ...] = ()


_decoder = msgspec.json.Decoder(_Line)


@dataclass(frozen=True)
class Metrics:
    """Records in the order they were written; `note` says what was left out, "" if nothing."""

    records: list[MetricRecord]
    note: str = ""


def scan(path: Path) -> Metrics:
    """All whole records of `path`; NaN and infinity, stored as null, come back as NaN.  Raises RunFailed for a damaged line."""
    *lines, rest = path.read_bytes().split(b"\n")
    records = [_record(path, n, line) for n, line in enumerate(lines, 1)]
    note = f"{path}: the last line is cut after {len(rest)} bytes and left out (a crash, or it is being written)" if rest else ""
    return Metrics(records, note)


def read(path: Path) -> list[MetricRecord]:
    """Like `scan`; what was left out goes to the log as a warning."""
    found = scan(path)
    if found.note:
        log.warning("%s", found.note)
    return found.records


def series(records: Iterable[MetricRecord], name: str) -> list[tuple[int, float]]:
    """(step, value) of one metric by step.  Where a resumed run wrote a step again, the later value holds."""
    return sorted({r.step: r.values[name] for r in records if name in r.values}.items())


def _record(path: Path, number: int, line: bytes) -> MetricRecord:
    try:
        found = _decoder.decode(line)
    except msgspec.MsgspecError as e:
        raise RunFailed(f"{path}:{number} is not a metric record: {e}; remove the line to read the rest") from e
    values: dict[str, Any] = {k: math.nan if v is None else v for k, v in found.values.items()}
    return MetricRecord(role=found.role, step=found.step, time=found.time, values=values, notes=found.notes)

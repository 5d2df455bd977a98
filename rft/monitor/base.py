"""The interface of a tracker: a destination for metrics and tables in addition to metrics.jsonl.

One file per tracker, marked with `@monitor("name")`, found in this folder or in a plugin folder.  A
tracker knows nothing of threads or failures: `Monitor` calls each from its own thread, in order,
and drops it when it raises.
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec
from pydantic import BaseModel, ConfigDict

from rft.files.disk import write_whole
from rft.monitor.read import MetricTail
from rft.monitor.settings import TrackedRun
from rft.plugins import kind
from rft.types.metrics import MetricRecord

monitor = kind("monitor")
Row = dict[str, Any]


class TrackerArgs(BaseModel):
    """Base of all tracker arguments, without arguments of its own."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Tracker(ABC):
    """`__init__` opens the tracker and may be slow.  Any exception disables the tracker for the
    rest of the run.
    """

    Args: ClassVar[type[TrackerArgs]] = TrackerArgs
    # modules that must be importable, checked before the run starts
    requires: ClassVar[tuple[str, ...]] = ()

    def __init__(self, run: TrackedRun, args: Any) -> None:
        self.run = run
        self.args = args

    @abstractmethod
    def log(self, record: MetricRecord) -> None:
        """Log the metrics of one step of one role."""

    @abstractmethod
    def table(self, name: str, step: int, rows: Sequence[Row]) -> None:
        """Show a table of examples; rows hold JSON values and may have different columns."""

    @abstractmethod
    def close(self) -> None:
        """Deliver everything logged before returning."""


class OneRun(Tracker):
    """A tracker that keeps all roles in one run.

    A metric's name belongs to the role that used it first, also after a resume; another role's
    metric of the same name becomes `role/name`, since its steps count something else.
    """

    def __init__(self, run: TrackedRun, args: Any) -> None:
        super().__init__(run, args)
        self._owner: dict[str, str] = {}
        for record in MetricTail(run.folder / "metrics.jsonl").new():
            for name in record.values:
                self.name(record.role, name)

    def name(self, role: str, name: str) -> str:
        return name if self._owner.setdefault(name, role) == role else f"{role}/{name}"

    def log(self, record: MetricRecord) -> None:
        values = {self.name(record.role, name): value for name, value in record.values.items()}
        self.send(record.role, record.step, record.time, values)

    @abstractmethod
    def send(self, role: str, step: int, when: float, values: dict[str, Any]) -> None:
        """Send the values of one step under their final names; `when` in seconds since the epoch."""


def columns(rows: Sequence[Row]) -> list[str]:
    """Return all keys in the order of their first appearance."""
    return list(dict.fromkeys(key for row in rows for key in row))


def cell(value: Any) -> str | int | float | bool | None:
    """Convert a value to one that every tracker can show; lists and mappings become JSON."""
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return msgspec.json.encode(value).decode()


def markdown(rows: Sequence[Row], limit: int = 100) -> str:
    """Return a Markdown table; beyond `limit` rows only their number."""
    names = columns(rows)
    lines = [
        names,
        ["---"] * len(names),
        *([_escape(cell(row.get(n))) for n in names] for row in rows[:limit]),
    ]
    more = (
        f"\n\n{len(rows) - limit} more rows are in the run's samples folder."
        if len(rows) > limit
        else ""
    )
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + more


def remembered_id(path: Path) -> str:
    """Return the tracker's id of this run, stored in `path`, so that a resumed run continues it."""
    if not path.exists() or copied(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        remember(path, uuid.uuid4().hex[:16])
    return path.read_text().strip()


def remember(path: Path, text: str) -> None:
    """Write `text` to `path`, and the location of `path` to a file next to it."""
    write_whole(path, text)
    write_whole(path.with_name(f"{path.name}.at"), str(path.absolute()))


def copied(path: Path) -> bool:
    """Return whether `path` belongs to another run: the folder is a copy, and the original still
    exists.
    """
    at = path.with_name(f"{path.name}.at")
    first = Path(at.read_text()) if at.is_file() else path
    return first.is_file() and not first.samefile(path) and first.read_text() == path.read_text()


def _escape(value: object) -> str:
    text = "" if value is None else str(value)
    return text.replace("|", "\\|").replace("\r", "").replace("\n", "<br>")

"""What the table of rollouts is filtered and sorted by, in memory: the ledger has no index on
rewards, and a viewer must not add one.

Depends on the ledger's tables on SQLite, where rows are numbered as they come; of PostgreSQL the
server is asked instead. Invariant: the columns are those of the ledger at the last `refresh`; what
is shown of a row is read from v_experiences.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rft.buffer.query import Questions
from rft.buffer.schema import ask
from rft.extras.view.filters import Filters
from rft.types.ids import ExperienceId

_PORTION = 5000  # rows that are read at once
_MOST_OPEN = 20_000  # rows that may still change, and are looked at again
_MOST_TEXTS = 60_000  # different reasons that are told apart
_ID = ("lineage", "explorer", "batch", "task", "run", "attempt", "step")
_TYPES: dict[str, Any] = {
    "lineage": np.uint16,
    "explorer": np.uint16,
    "batch": np.uint32,
    "task": np.uint32,
    "run": np.uint32,
    "attempt": np.uint16,
    "step": np.uint32,
    "taskset": np.uint16,
    "task_index": np.int64,
    "status": np.uint8,
    "reason": np.uint16,
    "explained": np.uint8,
    "state": np.uint8,
    "reward": np.float64,
    "num_response_tokens": np.uint32,
    "newest_step": np.int32,
}
_TEXTS = ("taskset", "status", "reason", "explained", "state")
_READ = (
    f"SELECT rowid, {', '.join(_TYPES)} FROM experiences WHERE rowid > ? ORDER BY rowid LIMIT "
    f"{_PORTION}"
)
_AGAIN = "SELECT id, reward, state, explained FROM v_experiences WHERE id IN (??)"


@dataclass(frozen=True)
class Chosen:
    """Positions of rows in order; `more`: there are others after them; `total` of all that fulfil
    the filters.
    """

    positions: np.ndarray
    more: bool
    total: int


class TextCodes:
    """Texts by small numbers; those after the first `most` have the number `most` in common."""

    def __init__(self, most: int) -> None:
        self.numbers: dict[str, int] = {}
        self._most = most

    def number(self, text: str | None) -> int:
        number = self.numbers.get(text or "")
        if number is None and len(self.numbers) < self._most:
            number = self.numbers[text or ""] = len(self.numbers)
        return self._most if number is None else number


class RolloutIndex:
    """Columns of all rows, in the order in which they were stored."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self.size = 0
        self.total = 0  # rows of the ledger when it was asked last
        self.ready = False
        self._lineage = -1
        self._last = 0  # rowid
        self._columns = {name: np.zeros(1024, kind) for name, kind in _TYPES.items()}
        self.texts = {n: TextCodes(min(np.iinfo(_TYPES[n]).max, _MOST_TEXTS)) for n in _TEXTS}

    def column(self, name: str) -> np.ndarray:
        column: np.ndarray = self._columns[name][: self.size]
        return column

    def refresh(self, questions: Questions) -> bool:
        """Read a portion of what is new; whether all is read.  Each portion is a short transaction."""
        with questions.errors("RUN"), questions.reading() as tx:
            lineage = tx.exec_driver_sql("SELECT coalesce(max(lineage), 0) FROM lineages").scalar()
            if lineage != self._lineage:  # a resumed run derives all states anew
                self._begin()
                self._lineage = int(lineage or 0)
            if not self.ready:
                self.total = int(
                    tx.exec_driver_sql("SELECT coalesce(max(rowid), 0) FROM experiences").scalar()
                    or 0
                )
            rows: Sequence[Sequence[Any]] = ask(tx, _READ, (self._last,)).all()  # type: ignore[assignment]
            if rows:
                self._add(rows)
            if len(rows) < _PORTION:
                self._look_again(tx)
                self.ready = True
                self.total = self.size
                return True
        return False

    def _add(self, rows: Sequence[Sequence[Any]]) -> None:
        end = self.size + len(rows)
        for name, old in self._columns.items():
            if end > len(old):
                self._columns[name] = np.concatenate(
                    [old, np.zeros(max(end, len(old) * 3 // 2) - len(old), old.dtype)]
                )
        numbers, *values = zip(*rows, strict=True)
        for (name, column), column_values in zip(self._columns.items(), values, strict=True):
            column[self.size : end] = self._coded(name, column_values)
        self.size = end
        self._last = int(numbers[-1])

    def _coded(self, name: str, texts: Iterable[Any]) -> Any:
        if (words := self.texts.get(name)) is not None:
            return [words.number(text) for text in texts]
        if name == "reward":
            return np.array(texts, np.float64)  # NaN where there is none
        return [-1 if x is None else x for x in texts]

    def _look_again(self, tx: Any) -> None:
        """States and rewards of rows that may still change: in the order in which they are trained,
        a limited number.
        """
        codes = [self.texts["state"].number(s) for s in ("available", "leased")]
        for at in np.array_split(
            p := np.flatnonzero(np.isin(self.column("state"), codes))[:_MOST_OPEN],
            len(p) // 500 + 1,
        ):
            if not len(at):
                continue
            position_by_id = dict(zip(self.ids(at), at.tolist(), strict=True))
            for id, reward, state, explained in ask(tx, _AGAIN, many=list(position_by_id)).all():
                for name, value in (("reward", reward), ("state", state), ("explained", explained)):
                    self._columns[name][position_by_id[id]] = self._coded(name, [value])[0]

    # ------------------------------------------------------------ asking

    def ids(self, positions: np.ndarray) -> list[str]:
        """Ids of the rows at these positions."""
        columns = [self._columns[name][positions].tolist() for name in _ID]
        return [str(ExperienceId(*numbers)) for numbers in zip(*columns, strict=True)]

    def mask(self, f: Filters) -> np.ndarray:
        """bool [rows]: which fulfil the filters, the text apart."""
        selected = np.ones(self.size, np.bool_)
        for name in ("taskset", "status", "state"):
            if name_value := getattr(f, name):
                selected &= self.column(name) == self.texts[name].numbers.get(name_value, -1)
        if f.reason:
            selected &= np.isin(self.column("reason"), self._like("reason", f.reason)) | np.isin(
                self.column("explained"), self._like("explained", f.reason)
            )
        for value, name in ((f.task, "task_index"), (f.batch, "batch"), (f.version, "newest_step")):
            if value is not None:
                selected &= self.column(name) == value
        if f.low is not None:
            selected &= self.column("reward") >= f.low
        if f.high is not None:
            selected &= self.column("reward") <= f.high
        return selected

    def _like(self, name: str, text: str) -> list[int]:
        return [
            number
            for entry, number in self.texts[name].numbers.items()
            if text.casefold() in entry.casefold()
        ]

    def choose(self, f: Filters, num: int, after: int | None = None) -> Chosen:
        """The first `num` positions in the filters' order behind position `after`."""
        selected = self.mask(f)
        if f.order in ("best", "worst"):
            selected &= ~np.isnan(self.column("reward"))
        total = int(np.count_nonzero(selected))
        keys = self._keys(f)
        if keys is None:
            if after is not None:
                selected[after:] = False
            every = np.flatnonzero(selected)
            return Chosen(every[::-1][:num], len(every) > num, total)
        if after is not None:
            selected &= (keys > keys[after]) | (
                (keys == keys[after]) & (np.arange(self.size) > after)
            )
        every = np.flatnonzero(selected)
        return Chosen(_first(keys[every], every, num), len(every) > num, total)

    def _keys(self, f: Filters) -> np.ndarray | None:
        """What is sorted by, ascending; equal ones stand in the order in which they were stored.
        None: the newest come first.
        """
        if f.order in ("best", "worst"):
            reward = self.column("reward")
            return -reward if f.order == "best" else reward
        if f.order in ("longest", "shortest"):
            length = self.column("num_response_tokens").astype(np.int64)
            return -length if f.order == "longest" else length
        return None


def _first(keys: np.ndarray, positions: np.ndarray, num: int) -> np.ndarray:
    """`positions` of the `num` smallest keys, in their order, without sorting all of them.

    A bound from a sample leaves few keys; where many are equal, as rewards of 0 and 1 are, those of
    the smallest one often do.
    """
    if len(keys) > 64 * num:
        sample = keys[::64]
        near = np.flatnonzero(keys <= np.partition(sample, num // 8)[num // 8])
        if len(near) >= num:
            keys = keys[near]
            positions = positions[near]
    if len(keys) > num:
        equal = np.flatnonzero(keys == keys.min())
        if len(equal) >= num:
            first: np.ndarray = positions[equal[:num]]
            return first
        edge = np.partition(keys, num - 1)[num - 1]
        below = np.flatnonzero(keys < edge)
        chosen = np.concatenate([below, np.flatnonzero(keys == edge)[: num - len(below)]])
        keys = keys[chosen]
        positions = positions[chosen]
    ordered: np.ndarray = positions[np.argsort(keys, kind="stable")]
    return ordered

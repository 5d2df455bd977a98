"""Which rollouts a page shows, and the same as SQL for people.  Depends on the columns of
v_experiences, on no pages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any
from urllib.parse import urlencode

from rft.errors import ConfigError

ORDERS = {
    "newest": "created DESC, id DESC",
    "best": "reward DESC, id",
    "worst": "reward, id",
    "longest": "num_response_tokens DESC, id",
    "shortest": "num_response_tokens, id",
}
STATUS = ("complete", "truncated", "failed")
STATES = ("available", "leased", "used", "explained")
_NUMBERS = {"step": int, "batch": int, "task": int, "version": int, "low": float, "high": float}
_MOST_TEXT = 200


@dataclass(frozen=True)
class Filters:
    """What is empty or None does not matter.  `step`: the train step; `version`: step of the newest
    weights that wrote a row.
    """

    step: int | None = None
    batch: int | None = None
    version: int | None = None
    taskset: str = ""
    task: int | None = None
    status: str = ""
    state: str = ""
    reason: str = ""  # part of why a run failed, or of why a row is not trained
    low: float | None = None
    high: float | None = None
    text: str = ""
    order: str = "newest"

    @classmethod
    def read(cls, query: Mapping[str, str]) -> Filters:
        """From the names and values of an address.  Raises ConfigError saying which is wrong."""
        values: dict[str, Any] = {}
        names = [f.name for f in fields(cls)]
        for name in query:
            if name not in (*names, "after"):  # a place in the table
                raise ConfigError(f"is no filter; there are {', '.join(names)}", key=name)
        for name in names:
            text = query.get(name, "").strip()
            if not text:
                continue
            allowed = {"order": tuple(ORDERS), "status": STATUS, "state": STATES}.get(name)
            if allowed is not None and text not in allowed:
                raise ConfigError(f"{text!r} is none of {', '.join(allowed)}", key=name, given=text)
            if len(text) > _MOST_TEXT:
                raise ConfigError(
                    f"has {len(text)} characters; {_MOST_TEXT} are the most", key=name
                )
            values[name] = _number(name, text) if name in _NUMBERS else text
        return cls(**values)

    @property
    def rare(self) -> bool:
        """Whether one of those is set that the page folds away."""
        often = {
            n: getattr(self, n) for n in ("step", "taskset", "task", "status", "text", "order")
        }
        return self != Filters(**often)

    @property
    def few(self) -> bool:
        """Whether an index of the ledger leads to all that can fulfil them."""
        return self.step is not None or self.batch is not None

    def query(self, **changed: Any) -> str:
        """As the query part of an address."""
        every = {f.name: getattr(self, f.name) for f in fields(self)} | changed
        return urlencode(
            {
                k: v
                for k, v in every.items()
                if v not in (None, "") and (k, v) != ("order", "newest")
            }
        )

    def conditions(self, *, like: str = "LIKE") -> tuple[list[str], list[Any]]:
        """Conditions on the columns of v_experiences, with a ? for each of the values."""
        clauses: list[str] = []
        values: list[Any] = []

        def add(condition: str, *parameters: Any) -> None:
            clauses.append(condition)
            values.extend(parameters)

        if self.step is not None:
            add("used_step = ?", self.step)
        for name, column in (
            ("batch", "batch"),
            ("version", "newest_step"),
            ("task", "task_index"),
        ):
            if (value := getattr(self, name)) is not None:
                add(f"{column} = ?", value)
        for name in ("taskset", "status", "state"):
            if value := getattr(self, name):
                add(f"{name} = ?", value)
        if self.reason:
            add(
                rf"(reason {like} ? ESCAPE '\' OR explained {like} ? ESCAPE '\')",
                *[pattern(self.reason)] * 2,
            )
        if self.low is not None:
            add("reward >= ?", self.low)
        if self.high is not None:
            add("reward <= ?", self.high)
        if self.order in ("best", "worst"):
            add("reward IS NOT NULL")
        if self.text:
            add(
                rf"(prompt_text {like} ? ESCAPE '\' OR response_text {like} ? ESCAPE '\')",
                *[pattern(self.text)] * 2,
            )
        return clauses, values

    def sql(self) -> str:
        """For `rft buffer query`."""
        clauses, values = self.conditions()
        text = " AND ".join(clauses)
        for value in values:
            text = text.replace("?", _literal(value).replace("?", "\0"), 1)
        where = f"WHERE {text.replace(chr(0), '?')} " if text else ""
        return (
            f"SELECT id, reward, status, state, response_text FROM v_experiences {where}ORDER "
            f"BY {ORDERS[self.order]} LIMIT 50"
        )


def pattern(text: str) -> str:
    """For LIKE: somewhere inside."""
    return "%" + "".join(f"\\{c}" if c in "\\%_" else c for c in text) + "%"


def _literal(value: Any) -> str:
    return "'" + value.replace("'", "''") + "'" if isinstance(value, str) else repr(value)


def _number(name: str, text: str) -> float | int:
    kind = _NUMBERS[name]
    try:
        value: float | int = kind(text)
        if not math.isfinite(value) or abs(value) > 2**53:
            raise ValueError
    except (ValueError, OverflowError):
        kind_name = "a whole number" if kind is int else "a number"
        raise ConfigError(f"{text!r} is not {kind_name}", key=name, given=text) from None
    return value

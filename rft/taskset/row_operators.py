"""Operators on the rows of a taskset: the plugin kind "task_operator" and the built-in operators.

    @task_operator("short_questions")
    class ShortQuestions(RowOperator):
        def apply(self, row):
            return row if len(row["prompt"]) < 200 else None

A row operator sees one row and may run in several processes; a set operator sees all rows, selects
rows and orders them.
Invariant: an operator sees only the columns in `target_fields`; other columns are kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from rft.errors import ConfigError
from rft.plugins import WithArgs, kind
from rft.taskset.base import Row
from rft.taskset.messages import ABSENT, lookup

task_operator = kind("task_operator")


class _Operator:
    """`__init__` takes the checked `args` as keyword arguments; `needs` maps required libraries to
    the extra that installs them.
    """

    needs: ClassVar[Mapping[str, str]] = {}


class RowOperator(_Operator):
    def apply(self, row: Row) -> Row | None:
        """Return the row with changed or added columns; None removes the row."""
        raise NotImplementedError


class SetOperator(_Operator):
    def arrange(self, rows: Sequence[Row]) -> Sequence[int]:
        """Return the numbers of the rows to keep, each once, in their new order."""
        raise NotImplementedError


class RowOperatorArgs(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Bounds(RowOperatorArgs):
    """Requires at least one bound, with min <= max."""

    field: str = Field(description="Column.")
    min: float | None = Field(None, description="Smallest value to keep.")
    max: float | None = Field(None, description="Largest value to keep.")

    @model_validator(mode="after")
    def _sound(self) -> _Bounds:
        if self.min is None and self.max is None:
            raise ValueError("write min, max or both")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min {self.min:g} is above max {self.max:g}")
        return self

    def has(self, value: float) -> bool:
        return (self.min is None or value >= self.min) and (self.max is None or value <= self.max)


class TextLengthArgs(_Bounds):
    field: str = Field("prompt", description="Column with a text.")
    unit: Literal["chars", "words"] = Field("chars", description="What is counted.")


@task_operator("length_filter", args=TextLengthArgs)
class LengthFilter(WithArgs, RowOperator):
    """Keeps rows whose text has a length within the bounds."""

    def apply(self, row: Row) -> Row | None:
        text = column(row, self.args.field)
        if not isinstance(text, str):
            raise wrong(self.args.field, text, "a text")
        return (
            row
            if self.args.has(len(text.split()) if self.args.unit == "words" else len(text))
            else None
        )


@task_operator("range_filter", args=_Bounds)
class RangeFilter(WithArgs, RowOperator):
    """Keeps rows whose number is within the bounds."""

    def apply(self, row: Row) -> Row | None:
        return row if self.args.has(number(row, self.args.field)) else None


class ValueArgs(RowOperatorArgs):
    field: str = Field(description="Column.")
    keep: tuple[Any, ...] = Field((), description="Keep only rows with one of these values.")
    drop: tuple[Any, ...] = Field((), description="Drop rows with one of these values.")

    @model_validator(mode="after")
    def _keep_or_drop(self) -> ValueArgs:
        if bool(self.keep) == bool(self.drop):
            raise ValueError("write either keep or drop, a list of values")
        return self


@task_operator("value_filter", args=ValueArgs)
class ValueFilter(WithArgs, RowOperator):
    """Keeps or drops rows by the value of a column."""

    def apply(self, row: Row) -> Row | None:
        value = column(row, self.args.field)
        listed = self.args.keep or self.args.drop
        values = [v for v in listed if v is not None]
        if (
            values
            and value is not None
            and all(isinstance(v, str) != isinstance(value, str) for v in values)
        ):
            advice = "in quotes they are texts: YAML reads yes, no and 1 as something else"
            raise wrong(
                self.args.field, value, f"of the kind of {', '.join(map(repr, values))} ({advice})"
            )
        return row if (value in listed) == bool(self.args.keep) else None


class PassRateArgs(RowOperatorArgs):
    field: str = Field("pass_rate", description="Column with pass rates, 0 to 1.")
    score: str = Field("difficulty", description="Column to write 1 - pass rate to.")


@task_operator("pass_rate_score", args=PassRateArgs)
class PassRateScore(WithArgs, RowOperator):
    """Computes a difficulty score from a pass rate measured before."""

    def apply(self, row: Row) -> Row | None:
        rate = number(row, self.args.field)
        if not 0 <= rate <= 1:
            raise wrong(self.args.field, rate, "a pass rate from 0 to 1")
        return {**row, self.args.score: 1 - rate}


class DeduplicateRowsArgs(RowOperatorArgs):
    field: str = Field("prompt", description="Column to compare.")
    normalize: bool = Field(
        True, description="Treat texts that differ only in case and white space as equal."
    )


@task_operator("deduplicate", args=DeduplicateRowsArgs)
class DeduplicateRows(WithArgs, SetOperator):
    """Keeps the first of all rows with the same value."""

    def arrange(self, rows: Sequence[Row]) -> Sequence[int]:
        first: dict[str, int] = {}
        for i, row in enumerate(rows):
            value = column(row, self.args.field)
            text = value if isinstance(value, str) else repr(value)
            first.setdefault(" ".join(text.casefold().split()) if self.args.normalize else text, i)
        return list(first.values())


class SortArgs(RowOperatorArgs):
    field: str = Field(description="Column of numbers.")
    descending: bool = Field(False, description="The largest first.")


@task_operator("sort_rows", args=SortArgs)
class SortRows(WithArgs, SetOperator):
    """Sorts by a number; equal rows keep their order."""

    def arrange(self, rows: Sequence[Row]) -> Sequence[int]:
        values = np.array([number(row, self.args.field) for row in rows])
        return [
            int(i) for i in np.argsort(-values if self.args.descending else values, kind="stable")
        ]


def column(row: Row, name: str) -> Any:
    """Return the column, or a nested value by dots.  Raises ConfigError naming the column and the
    existing ones.
    """
    if (value := lookup(row, name)) is ABSENT:
        raise ConfigError(
            f"there is no column {name!r}; there are {', '.join(map(str, row)) or 'none'}"
        )
    return value


def number(row: Row, name: str) -> float:
    """Return the column as a finite number."""
    value = column(row, name)
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise wrong(name, value, "a finite number")
    return value


def wrong(name: str, value: Any, expected: str) -> ConfigError:
    return ConfigError(f"column {name!r} is {value!r:.80}; it must be {expected}")

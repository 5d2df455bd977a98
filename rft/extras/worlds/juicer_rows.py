"""Filters of Data-Juicer as a task operator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from rft.extras.worlds.juicer import NEEDS, JuicerFilters
from rft.plugins import WithArgs
from rft.taskset.base import Row
from rft.taskset.row_operators import RowOperator, RowOperatorArgs, column, task_operator


class JuicerArgs(RowOperatorArgs):
    """The filters by name with their arguments, or a recipe of Data-Juicer with a list of them."""

    operators: tuple[dict[str, Any], ...] = Field(
        (), description="Filters: {name: ..., args: {...}}."
    )
    config_path: str | None = Field(None, description="A recipe of Data-Juicer.")
    field: str = Field(
        "prompt",
        description="Column with the text that filters call text; the others keep their names.",
    )


@task_operator("data_juicer_filter", args=JuicerArgs)
class JuicerFilter(WithArgs, RowOperator):
    """Keeps rows that all filters of Data-Juicer keep.

    Writes the measurements as columns (text_len, for example).
    """

    needs: ClassVar[Mapping[str, str]] = NEEDS

    def __init__(self, **args: Any) -> None:
        super().__init__(**args)
        self._filters = JuicerFilters(self.args.operators, self.args.config_path)

    def apply(self, row: Row) -> Row | None:
        sample = {**row, "text": column(row, self.args.field)}
        ((passed, measured),) = self._filters.measure(
            {name: [value] for name, value in sample.items()}
        )
        return {**row, **measured} if passed else None

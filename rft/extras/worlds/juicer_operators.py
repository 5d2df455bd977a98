"""Data-Juicer's filters over the rows of a group, in this process.

    operators:
      - {name: data_juicer, args: {operators: [{name: text_length_filter, args: {min_len: 20}}]}}      # or config_path: recipe.yaml
      - {name: reward_shaping_mapper, args: {reward_shaping_configs: [{stats_key: text_len, op_type: ADD, weight: 0.01}]}}

A row is the sample {text, query, response, prompt_text, response_text, reward}.  Invariant: a row's
sequence never changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec
from pydantic import Field

from rft.buffer.operators.base import GroupView, Operator, OperatorArgs, Result, Stage, operator
from rft.extras.worlds.juicer import NEEDS, JuicerFilters
from rft.types.experience import Experience
from rft.types.metrics import Metric

KEPT = "data_juicer_kept"


class DataJuicerArgs(OperatorArgs):
    """The filters by name with their arguments, or a recipe of Data-Juicer with a list of them."""

    operators: list[dict[str, Any]] = Field(default_factory=list)
    config_path: str | None = None


@operator("data_juicer", args=DataJuicerArgs)
class DataJuicer(Operator):
    """Reports the filters' measurements as metrics of the row; drops nothing.

    The metric `data_juicer_kept` says whether all filters would keep the row.
    """

    stage: ClassVar[Stage] = "reward"  # before operators that use the measurements
    needs: ClassVar[Mapping[str, str]] = NEEDS

    def __init__(
        self, operators: Sequence[dict[str, Any]] = (), config_path: str | None = None
    ) -> None:
        self._filters = JuicerFilters(operators, config_path)

    def process(self, rows: Sequence[Experience], group: GroupView) -> Result:
        measured = self._measured(rows)
        passes = [kept for kept, _ in measured]
        rows_out = [
            msgspec.structs.replace(row, metrics={**row.metrics, **stats, KEPT: float(passed)})
            for row, (passed, stats) in zip(rows, measured, strict=True)
        ]
        return Result(rows_out, [Metric(KEPT, k, "mean") for k in passes])

    def _measured(self, rows: Sequence[Experience]) -> list[tuple[bool, dict[str, float]]]:
        columns: dict[str, list[Any]] = {
            "text": [r.response_text for r in rows],
            "query": [r.prompt_text for r in rows],
            "response": [r.response_text for r in rows],
            "prompt_text": [r.prompt_text for r in rows],
            "response_text": [r.response_text for r in rows],
            "reward": [r.reward for r in rows],
        }
        return self._filters.measure(columns)


@operator("data_juicer_filter", args=DataJuicerArgs)
class DataJuicerFilter(DataJuicer):
    """Drops the rows that some filter rejects."""

    stage = "drop"

    def process(self, rows: Sequence[Experience], group: GroupView) -> Result:
        passing = [row for row, (keep, _) in zip(rows, self._measured(rows), strict=True) if keep]
        return Result(
            passing, [Metric("data_juicer_filtered_count", len(rows) - len(passing), "sum")]
        )

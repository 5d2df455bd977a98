"""Data-Juicer's filters over the rows of a group, in this process: `pip install rft-platform[data-juicer]`, no service.

    operators:
      - {name: data_juicer, args: {operators: [{name: text_length_filter, args: {min_len: 20}}]}}      # or config_path: recipe.yaml
      - {name: reward_shaping_mapper, args: {reward_shaping_configs: [{stats_key: text_len, op_type: ADD, weight: 0.01}]}}

A row is the sample {text, query, response, prompt_text, response_text, reward}.  Knows nothing of recipes but their list `process`.
Invariant: a row's sequence never changes; operators of Data-Juicer that write texts are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import yaml
from pydantic import Field

from rft.buffer.operators.base import GroupView, Operator, OperatorArgs, Result, Stage, operator
from rft.disk import read_regular
from rft.errors import ConfigError
from rft.types.experience import Experience
from rft.types.metrics import Metric

KEPT = "data_juicer_kept"
_MAX_RECIPE = 1 << 20


class DataJuicerArgs(OperatorArgs):
    """The filters by name with their arguments, or a recipe of Data-Juicer that lists them under `process`."""

    operators: list[dict[str, Any]] = Field(default_factory=list)
    config_path: str | None = None


@operator("data_juicer", args=DataJuicerArgs)
class DataJuicer(Operator):
    """Reports what filters measure as metrics of the row, and in `data_juicer_kept` whether all of them would keep it; drops nothing."""

    stage: ClassVar[Stage] = "reward"  # before operators that shape rewards by what is measured
    needs: ClassVar[Mapping[str, str]] = {"data_juicer": "data-juicer"}

    def __init__(self, operators: Sequence[dict[str, Any]] = (), config_path: str | None = None) -> None:
        listed = [*(_recipe(config_path) if config_path is not None else ()), *operators]
        if not listed:
            raise ConfigError("data_juicer needs operators, or config_path: a recipe with a list `process`")
        self.named = [_named(entry) for entry in listed]
        self._filters: list[Any] = []

    def process(self, rows: Sequence[Experience], group: GroupView) -> Result:
        measured = self._measured(rows)
        kept = [kept for kept, _ in measured]
        made = [
            msgspec.structs.replace(row, metrics={**row.metrics, **stats, KEPT: float(kept)})
            for row, (kept, stats) in zip(rows, measured, strict=True)
        ]
        return Result(made, [Metric(KEPT, k, "mean") for k in kept])

    def _measured(self, rows: Sequence[Experience]) -> list[tuple[bool, dict[str, float]]]:
        """Of each row whether all filters keep it, and the numbers that they measured."""
        columns: dict[str, list[Any]] = {
            "text": [r.response_text for r in rows],
            "query": [r.prompt_text for r in rows],
            "response": [r.response_text for r in rows],
            "prompt_text": [r.prompt_text for r in rows],
            "response_text": [r.response_text for r in rows],
            "reward": [r.reward for r in rows],
            "__dj__stats__": [{} for _ in rows],
            "__dj__meta__": [{} for _ in rows],
        }
        kept = [True] * len(rows)
        for one in self._loaded():
            columns = one.compute_stats_batched(columns)
            kept = [k and bool(says) for k, says in zip(kept, one.process_batched(columns), strict=True)]
        stats = columns["__dj__stats__"]
        return [
            (k, {str(n): float(v) for n, v in s.items() if isinstance(v, int | float)}) for k, s in zip(kept, stats, strict=True)
        ]

    def _loaded(self) -> list[Any]:
        if not self._filters:
            from data_juicer.ops import Filter, load_ops

            made = load_ops([{name: args} for name, args in self.named])
            if wrong := next((one for one in made if not isinstance(one, Filter)), None):
                raise ConfigError(
                    f"{wrong._name} of Data-Juicer is no filter; rows are what the policy wrote, their texts stay as they are"
                )
            self._filters = made
        return self._filters


@operator("data_juicer_filter", args=DataJuicerArgs)
class DataJuicerFilter(DataJuicer):
    """Drops the rows that one of the filters does not keep."""

    stage = "drop"

    def process(self, rows: Sequence[Experience], group: GroupView) -> Result:
        kept = [row for row, (keep, _) in zip(rows, self._measured(rows), strict=True) if keep]
        return Result(kept, [Metric("data_juicer_filtered_count", len(rows) - len(kept), "sum")])


def _recipe(path: str) -> list[dict[str, Any]]:
    try:
        read = yaml.safe_load(read_regular(Path(path).expanduser(), _MAX_RECIPE))
    except (OSError, yaml.YAMLError) as e:
        raise ConfigError(f"the recipe {path} cannot be read: {e}") from None
    listed = read.get("process") if isinstance(read, dict) else None
    if not isinstance(listed, list):
        raise ConfigError(f"the recipe {path} has no list `process` of operators")
    return listed


def _named(entry: Any) -> tuple[str, dict[str, Any]]:
    """{name: ..., args: {...}} or Data-Juicer's {NAME: {...}}.  Raises ConfigError."""
    if isinstance(entry, dict) and isinstance(entry.get("name"), str) and entry.keys() <= {"name", "args"}:
        return entry["name"], dict(entry.get("args") or {})
    if isinstance(entry, dict) and len(entry) == 1 and isinstance(args := next(iter(entry.values())), dict | None.__class__):
        return str(next(iter(entry))), dict(args or {})
    raise ConfigError(f"{entry!r:.120} is no operator of Data-Juicer; write {{name: text_length_filter, args: {{min_len: 20}}}}")

"""Run Data-Juicer's filters in this process: `pip install rft-platform[data-juicer]`, no service.

Depends on no rows, and of recipes only the list `process`.  Invariant: a sample's texts never
change; operators that change texts are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rft.errors import ConfigError
from rft.files.disk import read_regular

NEEDS: Mapping[str, str] = {"data_juicer": "data-juicer"}
_MAX_RECIPE = 1 << 20


class JuicerFilters:
    """The filters by name with their arguments, {name: ..., args: {...}} or {NAME: {...}}, after
    those of a recipe.
    """

    def __init__(
        self, operators: Sequence[dict[str, Any]] = (), config_path: str | None = None
    ) -> None:
        listed = [*(_recipe(config_path) if config_path is not None else ()), *operators]
        if not listed:
            raise ConfigError(
                "Data-Juicer needs operators, or config_path: a recipe with a list `process`"
            )
        self._named = [_named(entry) for entry in listed]
        self._ops: list[Any] = []

    def measure(self, columns: Mapping[str, Sequence[Any]]) -> list[tuple[bool, dict[str, float]]]:
        """Return for each sample whether all filters keep it, and their measurements.

        `columns` have one value per sample.
        """
        count = len(next(iter(columns.values())))
        samples: dict[str, list[Any]] = {name: list(values) for name, values in columns.items()}
        samples |= {
            "__dj__stats__": [{} for _ in range(count)],
            "__dj__meta__": [{} for _ in range(count)],
        }
        passes = [True] * count
        for filter_op in self._loaded():
            samples = filter_op.compute_stats_batched(samples)
            passes = [
                k and bool(passed)
                for k, passed in zip(passes, filter_op.process_batched(samples), strict=True)
            ]
        numbers = [
            {str(n): float(v) for n, v in s.items() if isinstance(v, int | float)}
            for s in samples["__dj__stats__"]
        ]
        return list(zip(passes, numbers, strict=True))

    def _loaded(self) -> list[Any]:
        if not self._ops:
            from data_juicer.ops import Filter, load_ops

            ops = load_ops([{name: args} for name, args in self._named])
            if wrong := next((op for op in ops if not isinstance(op, Filter)), None):
                raise ConfigError(
                    f"{wrong._name} of Data-Juicer is no filter; texts stay as they are here"
                )
            self._ops = ops
        return self._ops


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
    """Parse {name: ..., args: {...}} or Data-Juicer's {NAME: {...}}.  Raises ConfigError."""
    if (
        isinstance(entry, dict)
        and isinstance(entry.get("name"), str)
        and entry.keys() <= {"name", "args"}
    ):
        return entry["name"], dict(entry.get("args") or {})
    if (
        isinstance(entry, dict)
        and len(entry) == 1
        and isinstance(args := next(iter(entry.values())), dict | None.__class__)
    ):
        return str(next(iter(entry))), dict(args or {})
    raise ConfigError(
        f"{entry!r:.120} is no operator of Data-Juicer; write {{name: text_length_filter, args: "
        f"{{min_len: 20}}}}"
    )

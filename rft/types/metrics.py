"""Metrics, each with the reduction of several values to one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Literal

from msgspec import Struct, field

Reduction = Literal["mean", "max", "min", "sum", "last"]
Role = Literal["explorer", "trainer", "synchronizer", "eval"]


class Metric(Struct, frozen=True):
    """One number: name by slashes, e.g. Metric("rollout/reward/mean", 0.4)."""

    name: str
    value: float
    reduction: Reduction = "mean"


class MetricRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Metrics of one step of one role; one line of metrics.jsonl."""

    role: Role
    step: int
    time: float = field(default_factory=time.time)  # seconds since the epoch
    values: dict[str, float]
    notes: tuple[str, ...] = ()  # messages for people


def reduce(metrics: Iterable[Metric]) -> dict[str, float]:
    """Reduce metrics to one value per name."""
    by_name: dict[str, list[Metric]] = {}
    for m in metrics:
        by_name.setdefault(m.name, []).append(m)
    ways: dict[Reduction, Callable[[list[float]], float]] = {
        "mean": lambda v: sum(v) / len(v),
        "max": max,
        "min": min,
        "sum": sum,
        "last": lambda v: v[-1],
    }
    return {
        name: float(ways[ms[0].reduction]([m.value for m in ms])) for name, ms in by_name.items()
    }

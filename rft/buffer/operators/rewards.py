"""Operators that give other rewards, or report them: shaping by numbers that rows carry, pass rates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
from pydantic import Field, field_validator

from rft.buffer.operators.base import GroupView, Operator, OperatorArgs, Result, names_of, number_of, operator
from rft.buffer.operators.filters import NoArgs
from rft.types.experience import Experience
from rft.types.metrics import Metric


class Shaping(OperatorArgs):
    """reward `op_type` (`weight` x the row's `stats_key`)."""

    stats_key: str = Field(min_length=1)
    op_type: Literal["ADD", "SUB", "MUL", "DIV"] = "ADD"
    weight: float = 1.0

    @field_validator("op_type", mode="before")
    @classmethod
    def _upper(cls, value: Any) -> Any:
        return value.upper() if isinstance(value, str) else value


class ShapingArgs(OperatorArgs):
    reward_shaping_configs: list[Shaping] = Field(min_length=1)


@operator("reward_shaping_mapper", args=ShapingArgs)
class RewardShapingMapper(Operator):
    """Changes each scored row's reward by numbers that the row carries, one configuration after the other.

    A `stats_key` is looked for in the row's info, metrics and parts of the reward.  One that is missing or no number, a division by
    zero, and a result that is not finite are errors: the group fails with the reason.  Unscored rows stay unscored.
    """

    stage = "reward"

    def __init__(self, reward_shaping_configs: Sequence[Shaping | Mapping[str, Any]]) -> None:
        self.steps = [s if isinstance(s, Shaping) else Shaping(**s) for s in reward_shaping_configs]

    async def process(self, rows: Sequence[Experience], group: GroupView) -> Result:
        shaped = [r if r.reward is None else msgspec.structs.replace(r, reward=self._shaped(r, r.reward)) for r in rows]
        moved = [
            new.reward - old.reward
            for old, new in zip(rows, shaped, strict=True)
            if old.reward is not None and new.reward is not None
        ]
        metrics = [m for d in moved for m in _spread("reward_diff", d)]
        return Result(shaped, metrics)

    def _shaped(self, row: Experience, reward: float) -> float:
        for step in self.steps:
            stat = number_of(row, step.stats_key)
            if stat is None:
                raise ValueError(f"{row.id} has no {step.stats_key!r} to shape its reward by; it has {names_of(row)}")
            by = step.weight * stat
            if step.op_type == "DIV" and by == 0:
                raise ValueError(
                    f"{row.id}: its reward {reward} cannot be divided by weight {step.weight} x {step.stats_key} {stat}"
                )
            reward = {"ADD": reward + by, "SUB": reward - by, "MUL": reward * by, "DIV": reward / (by or 1.0)}[step.op_type]
            if not math.isfinite(reward):
                raise ValueError(f"{row.id}: {step.op_type} {step.weight} x {step.stats_key} {stat} makes its reward {reward}")
        return reward


def _spread(name: str, value: float) -> list[Metric]:
    return [Metric(f"{name}/mean", value), Metric(f"{name}/min", value, "min"), Metric(f"{name}/max", value, "max")]


@operator("pass_rate_calculator", args=NoArgs)
class PassRateCalculator(Operator):
    """Reports which share of the groups has a pass rate (mean reward of its scored runs) that is worth training on.

    The pass rates themselves are in the ledger; selectors of tasks learn from there, also without this operator.
    """

    stage = "statistics"

    async def process(self, rows: Sequence[Experience], group: GroupView) -> Result:
        if not group.rewards:
            return Result(rows)
        rate, low, high = group.mean, 1 / 16 + 1e-3, 15 / 16 - 1e-3
        shares = {
            "valid_ratio": 0 < rate < 1,
            "strict_valid_ratio": low < rate < high,
            "<1_ratio": rate < 1,
            ">0_ratio": rate > 0,
            "<15_16_ratio": rate < high,
            ">1_16_ratio": rate > low,
        }
        return Result(rows, [Metric(f"selection/{name}", float(yes)) for name, yes in shares.items()])

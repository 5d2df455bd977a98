"""Several rewards as one: each a named part with a weight.

reward_fn_args:
  rewards:
    accuracy: {reward: math_boxed_reward, weight: 1.0}
    format: {reward: format_reward, weight: 0.5, args: {right: 1, wrong: 0}}
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from rft.reward.base import Reward, reward, score, score_group
from rft.types.completion import Score, Transcript
from rft.types.task import Task


class PartArgs(BaseModel):
    """`optional`: an answer that this reward leaves unscored is scored by the others; else it is unscored altogether."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    reward: str
    weight: float = 1.0
    args: dict[str, Any] = {}
    optional: bool = False


class WeightedArgs(BaseModel):
    model_config = ConfigDict(extra="forbid")
    rewards: dict[str, PartArgs] = Field(min_length=1)


@reward("weighted_reward", args=WeightedArgs)
class WeightedReward:
    """The sum of weight x value.  Every value is kept as a part under its name, its own parts as NAME/PART."""

    def __init__(self, rewards: dict[str, PartArgs]) -> None:
        from rft.reward.build import build  # which finds this file among the plugins

        self._parts = {name: PartArgs.model_validate(part) for name, part in rewards.items()}
        self._made: dict[str, Reward] = {
            name: build(part.reward, part.args, key=f"rewards.{name}.args") for name, part in self._parts.items()
        }
        golds = (gold for made in self._made.values() if callable(gold := getattr(made, "gold_answer", None)))
        if (gold := next(golds, None)) is not None:  # what `rft check` may score
            self.gold_answer = gold
        self.whole_group = any(_of_groups(made) for made in self._made.values())

    async def __call__(self, task: Task, given: Any) -> Any:
        transcripts: Sequence[Transcript] = given if self.whole_group else [given]
        columns = await asyncio.gather(*(_scores(made, task, transcripts) for made in self._made.values()))
        sums = [self._sum(dict(zip(self._made, scores, strict=True))) for scores in zip(*columns, strict=True)]
        return sums if self.whole_group else sums[0]

    def _sum(self, scores: dict[str, Score]) -> Score:
        parts: dict[str, float] = {}
        terms, reasons = [], []
        for name, given in scores.items():
            parts |= {f"{name}/{n}": v for n, v in given.parts.items()}
            if given.reason:
                reasons.append(f"{name}: {given.reason}")
            if given.value is not None:
                parts[name] = given.value
                terms.append(self._parts[name].weight * given.value)
            elif not self._parts[name].optional:
                return Score(value=None, parts=parts, reason=f"{name} is unscored: {given.reason or 'no reason given'}")
        return Score(value=math.fsum(terms) if terms else None, parts=parts, reason="; ".join(reasons))

    def asks(self, models: Any) -> None:
        """Raises ConfigError where a part asks a model that is not there."""
        for made in self._made.values():
            if callable(asks := getattr(made, "asks", None)):
                asks(models)

    async def prepare(self, models: Any) -> None:
        for made in self._made.values():
            if callable(prepare := getattr(made, "prepare", None)):
                await prepare(models)

    async def close(self) -> None:
        for made in self._made.values():
            if callable(close := getattr(made, "close", None)):
                await close()


def _of_groups(made: Reward) -> bool:
    return bool(getattr(made, "whole_group", False))


async def _scores(made: Reward, task: Task, transcripts: Sequence[Transcript]) -> list[Score]:
    if _of_groups(made):
        return await score_group(made, task, transcripts)
    return list(await asyncio.gather(*(score(made, task, t) for t in transcripts)))

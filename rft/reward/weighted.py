"""Several rewards as one: each a named part with a weight.

reward_fn_args:
  rewards:
    accuracy: {reward: math_boxed_reward, weight: 1.0}
    format: {reward: format_reward, weight: 0.5, args: {right: 1, wrong: 0}}
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from rft.errors import ConfigError
from rft.reward.base import THE_TRUTH, Reward, hook, reward, score_each
from rft.types.completion import Score, Transcript
from rft.types.ports import ChatModel
from rft.types.task import Task


class PartArgs(BaseModel):
    """`optional`: an answer that this reward leaves unscored is scored by the others; else it is
    unscored altogether.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    reward: str
    weight: float = 1.0
    args: dict[str, Any] = {}
    optional: bool = False


class WeightedArgs(BaseModel):
    model_config = ConfigDict(extra="forbid")
    rewards: dict[str, PartArgs] = Field(min_length=1)


@reward("weighted_reward", args=WeightedArgs)
class WeightedReward(Reward):
    """The sum of weight x value.  Every value is kept as a part under its name, its own parts as
    NAME/PART.
    """

    def __init__(self, rewards: dict[str, PartArgs]) -> None:
        from rft.reward.build_reward import build  # which finds this file among the plugins

        self._parts = {name: PartArgs.model_validate(part) for name, part in rewards.items()}
        self._made: dict[str, Reward] = {
            name: build(part.reward, part.args, key=f"rewards.{name}.args")
            for name, part in self._parts.items()
        }
        self.whole_group = any(made.whole_group for made in self._made.values())

    async def __call__(self, task: Task, transcript: Any) -> Any:
        transcripts: Sequence[Transcript] = transcript if self.whole_group else [transcript]
        columns = await asyncio.gather(
            *(score_each(made, task, transcripts) for made in self._made.values())
        )
        sums = [
            self._sum(dict(zip(self._made, scores, strict=True)))
            for scores in zip(*columns, strict=True)
        ]
        return sums if self.whole_group else sums[0]

    def _sum(self, scores: dict[str, Score]) -> Score:
        parts: dict[str, float] = {}
        terms = []
        reasons = []
        for name, given in scores.items():
            parts |= {f"{name}/{n}": v for n, v in given.parts.items()}
            if given.reason:
                reasons.append(f"{name}: {given.reason}")
            if given.value is not None:
                parts[name] = given.value
                terms.append(self._parts[name].weight * given.value)
            elif not self._parts[name].optional:
                return Score(
                    value=None,
                    parts=parts,
                    reason=f"{name} is unscored: {given.reason or 'no reason given'}",
                )
        return Score(
            value=math.fsum(terms) if terms else None, parts=parts, reason="; ".join(reasons)
        )

    def check_models(self, models: Mapping[str, object], tasks: Mapping[str, str]) -> None:
        for made in self._made.values():
            made.check_models(models, tasks)

    def check_task(self, task: Task, transcript: Transcript) -> None:
        for name, made in self._made.items():
            try:
                made.check_task(task, transcript)
            except ConfigError as e:
                raise ConfigError(
                    e.message, key=f"rewards.{name}.args.{e.key}".rstrip("."), given=e.given
                ) from None

    def remarks(self) -> list[str]:
        return [line for made in self._made.values() for line in made.remarks()]

    def gold_answer(self, task: Task) -> str | None:
        """That of the first part that has its own."""
        found = [made.gold_answer(task) for made in self._made.values()]
        return next((gold for gold in found if gold is not THE_TRUTH), THE_TRUTH)

    async def prepare(self, models: Mapping[str, ChatModel]) -> None:
        for made in self._made.values():
            await hook(made.prepare, models)

    async def close(self) -> None:
        for made in self._made.values():
            await hook(made.close)

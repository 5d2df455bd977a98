"""Several rewards as one: each a named part with a weight.

reward_fn_args:
  rewards:
    accuracy: {reward: math_boxed_reward, weight: 1.0}
    format: {reward: format_reward, weight: 0.5, args: {right: 1, wrong: 0}}
"""

from __future__ import annotations

import asyncio
import itertools
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
    """`optional`: if this reward leaves an answer unscored, the other rewards score it; else the
    answer is unscored.
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
    """The sum of weight x value.  Each value is a part under its name, its own parts are NAME/PART."""

    def __init__(self, rewards: dict[str, PartArgs]) -> None:
        from rft.reward.build_reward import (
            build,
        )  # it imports this file

        self._parts = {name: PartArgs.model_validate(part) for name, part in rewards.items()}
        self._rewards: dict[str, Reward] = {
            name: build(part.reward, part.args, key=f"rewards.{name}.args")
            for name, part in self._parts.items()
        }
        self.whole_group = any(inner.whole_group for inner in self._rewards.values())

    async def __call__(self, task: Task, transcript: Any) -> Any:
        transcripts: Sequence[Transcript] = transcript if self.whole_group else [transcript]
        columns = await asyncio.gather(
            *(score_each(inner, task, transcripts) for inner in self._rewards.values())
        )
        sums = [
            self._sum(dict(zip(self._rewards, scores, strict=True)))
            for scores in zip(*columns, strict=True)
        ]
        return sums if self.whole_group else sums[0]

    def _sum(self, scores: dict[str, Score]) -> Score:
        parts: dict[str, float] = {}
        weights: dict[str, float] = {}
        reasons = []
        for name, score in scores.items():
            parts |= {f"{name}/{n}": v for n, v in score.parts.items()}
            if score.reason:
                reasons.append(f"{name}: {score.reason}")
            if score.value is not None:
                parts[name] = score.value
                weights[name] = self._parts[name].weight
            elif not self._parts[name].optional:
                return Score(
                    value=None,
                    parts=parts,
                    reason=f"{name} is unscored: {score.reason or 'no reason score'}",
                )
        value = math.fsum(weights[name] * parts[name] for name in weights) if weights else None
        return Score(value=value, parts=parts, reason="; ".join(reasons), weights=weights)

    def check_models(self, models: Mapping[str, object], tasks: Mapping[str, str]) -> None:
        for inner in self._rewards.values():
            inner.check_models(models, tasks)

    def check_task(self, task: Task, transcript: Transcript) -> None:
        for name, inner in self._rewards.items():
            try:
                inner.check_task(task, transcript)
            except ConfigError as e:
                raise ConfigError(
                    e.message, key=f"rewards.{name}.args.{e.key}".rstrip("."), given=e.given
                ) from None

    def questions(
        self, task: Task, transcript: Transcript, models: Mapping[str, object]
    ) -> list[tuple[str, list[dict[str, Any]]]]:
        asked = (inner.questions(task, transcript, models) for inner in self._rewards.values())
        return list(itertools.chain.from_iterable(asked))

    def remarks(self) -> list[str]:
        return [line for inner in self._rewards.values() for line in inner.remarks()]

    def gold_answer(self, task: Task) -> str | None:
        """Return the gold answer of the first part with its own."""
        answers = [inner.gold_answer(task) for inner in self._rewards.values()]
        return next((gold for gold in answers if gold is not THE_TRUTH), THE_TRUTH)

    async def prepare(self, models: Mapping[str, ChatModel]) -> None:
        for inner in self._rewards.values():
            await hook(inner.prepare, models)

    async def close(self) -> None:
        for inner in self._rewards.values():
            await hook(inner.close)

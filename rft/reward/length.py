"""Reward for the length of an answer, for use as a part of a weighted reward."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rft.reward.base import reward_function
from rft.types.completion import Transcript
from rft.types.task import Task


@reward_function("length_reward")
def length_reward(
    task: Task,
    transcript: Transcript,
    *,
    least: Annotated[int, Field(ge=0)] = 0,
    most: Annotated[int | None, Field(ge=1)] = None,
    slope: Annotated[float, Field(ge=0)] = 1.0,
) -> dict[str, float]:
    """0 from `least` to `most` tokens of all answers, else a cost of at most `slope`.

    The cost is proportional to the distance.  `most` null: no upper limit.  `slope`: the cost of
    twice `most` tokens, or of 0 tokens with `least`.
    """
    tokens = sum(len(t.completion.tokens) for t in transcript.turns)
    short = (least - tokens) / least if tokens < least else 0.0
    long = (tokens - most) / most if most is not None and tokens > most else 0.0
    return {"length": -slope * min(1.0, short + long)}

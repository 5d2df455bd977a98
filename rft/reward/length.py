"""Reward for the length of an answer, to be one part of a weighted reward."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from rft.reward.base import reward
from rft.types.completion import Transcript
from rft.types.task import Task


class LengthArgs(BaseModel):
    """Lengths in tokens.  `most` null: no upper end.  `slope`: what twice `most`, or nothing where `least` is asked, costs."""

    model_config = ConfigDict(extra="forbid")
    least: int = Field(0, ge=0)
    most: int | None = Field(None, ge=1)
    slope: float = Field(1.0, ge=0)


@reward("length_reward", args=LengthArgs)
def length_reward(
    task: Task, transcript: Transcript, *, least: int = 0, most: int | None = None, slope: float = 1.0
) -> dict[str, float]:
    """0 from `least` to `most` tokens of all answers, less outside in proportion to the distance, at most `slope`."""
    tokens = sum(len(t.completion.tokens) for t in transcript.turns)
    short = (least - tokens) / least if tokens < least else 0.0
    long = (tokens - most) / most if most is not None and tokens > most else 0.0
    return {"length": -slope * min(1.0, short + long)}

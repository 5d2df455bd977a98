"""A penalty for answers near the maximum length, added to any reward.  arXiv:2503.14476, section
3.4

    penalty = min(0, (max_response_length - cache_length - n) / cache_length) * penalty_factor        n = tokens of the answer

An answer that ends before the last `cache_length` tokens costs nothing; an answer of full length,
or turns of a run that are longer in total, cost `penalty_factor`.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from rft.errors import ConfigError
from rft.reward.base import Reward
from rft.reward.wrap import ChangedReward
from rft.types.completion import Score, Transcript
from rft.types.task import Task


class OverlongArgs(BaseModel):
    """`max_response_length` null: the taskset's maximum response.  Lengths in tokens."""

    model_config = ConfigDict(extra="forbid", strict=True)
    enable_overlong_penalty: bool = False
    cache_length: int = Field(4096, ge=1)
    penalty_factor: float = Field(1.0, ge=0)
    max_response_length: int | None = Field(None, ge=1)


class Shaped(ChangedReward):
    """Adds the penalty to the inner reward; the penalty is also the part `overlong`."""

    def __init__(self, inner: Reward, shape: OverlongArgs) -> None:
        super().__init__(inner, self._shorten)
        self.shape = shape

    def check_task(self, task: Task, transcript: Transcript) -> None:
        penalty(self.shape, 0, task.sampling.max_tokens)
        super().check_task(task, transcript)

    def _shorten(self, task: Task, transcript: Transcript, score: Score) -> Score:
        if score.value is None:
            return score
        cost = penalty(
            self.shape,
            sum(len(t.completion.tokens) for t in transcript.turns),
            task.sampling.max_tokens,
        )
        return Score(
            value=score.value + cost, parts={**score.parts, "overlong": cost}, reason=score.reason
        )


def penalty(shape: OverlongArgs, length: int, max_tokens: int) -> float:
    """Return the penalty, from -penalty_factor to 0.  Raises ConfigError if the cache exceeds the
    longest answer, since then an empty answer would be penalized.
    """
    longest = shape.max_response_length or max_tokens
    if shape.cache_length > longest:
        text = (
            f"the overlong penalty's cache_length is longer than the longest answer ({longest} "
            f"tokens); write at most that"
        )
        raise ConfigError(text, key="cache_length", given=shape.cache_length)
    return (
        min(0.0, max(-1.0, (longest - shape.cache_length - length) / shape.cache_length))
        * shape.penalty_factor
    )

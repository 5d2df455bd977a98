"""A reward laid over another one, which may score single runs or whole groups and may have to be prepared and closed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rft.reward.base import Reward, score, score_group
from rft.types.completion import Score, Transcript
from rft.types.task import Task

Change = Callable[[Task, Transcript, Score], Score]


def over(inner: Reward, change: Change) -> Reward:
    """`inner`, each of its scores passed through `change`."""
    return Over(inner, change)


class Over:
    def __init__(self, inner: Reward, change: Change) -> None:
        self._inner, self._change = inner, change
        self.whole_group = bool(getattr(inner, "whole_group", False))
        if callable(gold := getattr(inner, "gold_answer", None)):
            self.gold_answer = gold
        if callable(asks := getattr(inner, "asks", None)):
            self.asks = asks

    async def __call__(self, task: Task, given: Any) -> Any:
        if not self.whole_group:
            return self._change(task, given, await score(self._inner, task, given))
        transcripts: Sequence[Transcript] = given
        scores = await score_group(self._inner, task, transcripts)
        return [self._change(task, t, s) for t, s in zip(transcripts, scores, strict=True)]

    async def prepare(self, models: Any) -> None:
        if callable(prepare := getattr(self._inner, "prepare", None)):
            await prepare(models)

    async def close(self) -> None:
        if callable(close := getattr(self._inner, "close", None)):
            await close()

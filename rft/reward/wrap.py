"""A reward that changes every score of another reward and passes on everything else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rft.reward.base import Reward, hook, score_each
from rft.types.completion import Score, Transcript
from rft.types.ports import ChatModel
from rft.types.task import Task

Change = Callable[[Task, Transcript, Score], Score]


class ChangedReward(Reward):
    """Passes each score of `inner` through `change`."""

    def __init__(self, inner: Reward, change: Change) -> None:
        self._inner = inner
        self._change = change
        self.whole_group = inner.whole_group  # type: ignore[method-assign]
        self.remarks = inner.remarks  # type: ignore[method-assign]
        self.check_models = inner.check_models  # type: ignore[method-assign]
        self.gold_answer = inner.gold_answer  # type: ignore[method-assign]

    async def __call__(self, task: Task, transcript: Any) -> Any:
        transcripts = transcript if self.whole_group else [transcript]
        scores = await score_each(self._inner, task, transcripts)
        changed = [self._change(task, t, s) for t, s in zip(transcripts, scores, strict=True)]
        return changed if self.whole_group else changed[0]

    def check_task(self, task: Task, transcript: Transcript) -> None:
        self._inner.check_task(task, transcript)

    async def prepare(self, models: Mapping[str, ChatModel]) -> None:
        await hook(self._inner.prepare, models)

    async def close(self) -> None:
        await hook(self._inner.close)

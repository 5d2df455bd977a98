"""The largest of some numbers, as a taskset of verifiers (v1)."""

from __future__ import annotations

import random
from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["Largest"]


class LargestData(vf.TaskData):
    answer: int


class LargestTask(vf.Task[LargestData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float((trace.last_reply or "").strip(" .").endswith(str(self.data.answer)))


class Largest(vf.Taskset[LargestTask]):
    def load(self) -> Iterator[LargestTask]:
        rng = random.Random(1)
        for _ in range(64):
            numbers = rng.sample(range(10, 100), 4)
            prompt = f"Which is the largest of {numbers}? End with it."
            yield LargestTask(LargestData(prompt=prompt, answer=max(numbers)))

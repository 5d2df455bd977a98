"""Trinity-RFT's bases for runs of several steps: a reward for each, or one for all.

Invariant: every call of a step is an experience of its own, numbered by its step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rft.compat.experience import Experience
from rft.compat.model import ModelWrapper
from rft.compat.task import Task
from rft.compat.workflow import Workflow


class _Steps(Workflow):
    def __init__(
        self,
        *,
        task: Task,
        model: ModelWrapper,
        auxiliary_models: list[ModelWrapper] | None = None,
        use_openai_client: bool = True,
    ) -> None:
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        self.client: Any = model.get_openai_client() if use_openai_client else None

    @property
    def max_step_num(self) -> int:
        raise NotImplementedError(f"{type(self).__name__} must have the property max_step_num")

    def step(self, step_num: int) -> bool:
        """Plays one step; whether to go on."""
        raise NotImplementedError(f"{type(self).__name__} must have step(step_num)")

    async def step_async(self, step_num: int) -> bool:
        raise NotImplementedError(f"{type(self).__name__} must have step_async(step_num)")

    def _of_step(self, number: int) -> list[Experience]:
        found = self.model.extract_experience_from_history()
        for x in found:
            x.eid.step = number
        return found


class StepWiseRewardWorkflow(_Steps):
    """`reward(exps, step_num)` after each step."""

    def reward(self, exps: list[Experience], step_num: int) -> float:
        raise NotImplementedError(f"{type(self).__name__} must have reward(exps, step_num)")

    def run(self) -> list[Experience]:
        played: list[Experience] = []
        for number in range(self.max_step_num):
            go_on = self.step(step_num=number)
            of_step = self._of_step(number)
            played += _given(of_step, self.reward(of_step, step_num=number))
            if not go_on:
                break
        return played


class AsyncStepWiseRewardWorkflow(StepWiseRewardWorkflow):
    is_async = True

    async def reward_async(self, exps: list[Experience], step_num: int) -> float:
        raise NotImplementedError(f"{type(self).__name__} must have reward_async(exps, step_num)")

    async def run_async(self) -> list[Experience]:
        played: list[Experience] = []
        for number in range(self.max_step_num):
            go_on = await self.step_async(step_num=number)
            of_step = self._of_step(number)
            played += _given(of_step, await self.reward_async(of_step, step_num=number))
            if not go_on:
                break
        return played


class RewardPropagationWorkflow(_Steps):
    """`reward(exps)` at the end, for every step."""

    def reward(self, exps: list[Experience]) -> float:
        raise NotImplementedError(f"{type(self).__name__} must have reward(exps)")

    def run(self) -> list[Experience]:
        played: list[Experience] = []
        steps = 0
        for number in range(self.max_step_num):
            go_on = self.step(step_num=number)
            steps = number + 1
            played += self._of_step(number)
            if not go_on:
                break
        return _given(played, self.reward(played), steps)


class AsyncRewardPropagationWorkflow(RewardPropagationWorkflow):
    is_async = True

    async def reward_async(self, exps: list[Experience]) -> float:
        raise NotImplementedError(f"{type(self).__name__} must have reward_async(exps)")

    async def run_async(self) -> list[Experience]:
        played: list[Experience] = []
        steps = 0
        for number in range(self.max_step_num):
            go_on = await self.step_async(step_num=number)
            steps = number + 1
            played += self._of_step(number)
            if not go_on:
                break
        return _given(played, await self.reward_async(played), steps)


def _given(experiences: Iterable[Experience], reward: float, steps: int | None = None) -> list[Experience]:
    found = list(experiences)
    for x in found:
        x.reward = reward
        if steps is not None:
            x.metrics["actual_env_steps"] = steps
    return found

"""Trinity-RFT's bases for runs of several steps: a reward for each, or one for all.

Invariant: every call of a step is an experience of its own, numbered by its step.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, ClassVar, NoReturn, TypeVar

from rft.extras.migrate.compat.trinity_experience import TrinityExperience
from rft.extras.migrate.compat.trinity_model import ModelWrapper
from rft.extras.migrate.compat.trinity_task import TrinityTask
from rft.extras.migrate.compat.trinity_workflow import TrinityWorkflow

T = TypeVar("T")


class _Steps(TrinityWorkflow):
    """Steps are played by `_play`, which awaits; where a class is not asynchronous, nothing in it
    waits.
    """

    rewarded: ClassVar[str]  # the arguments of `reward`

    def __init__(
        self,
        *,
        task: TrinityTask,
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
        self._must_have("step(step_num)")

    async def step_async(self, step_num: int) -> bool:
        self._must_have("step_async(step_num)")

    def reward(self, *args: Any, **kwargs: Any) -> float:
        """Of the experiences of one step and its number, or of all."""
        self._must_have(f"reward({self.rewarded})")

    async def reward_async(self, *args: Any, **kwargs: Any) -> float:
        self._must_have(f"reward_async({self.rewarded})")

    def _must_have(self, what: str) -> NoReturn:
        raise NotImplementedError(f"{type(self).__name__} must have {what}")

    def run(self) -> list[TrinityExperience]:
        return _at_once(self._play())

    async def run_async(self) -> list[TrinityExperience]:
        return await self._play()

    async def _play(self) -> list[TrinityExperience]:
        played: list[TrinityExperience] = []
        for number in range(self.max_step_num):
            go_on = (
                await self.step_async(step_num=number)
                if self.is_async
                else self.step(step_num=number)
            )
            of_step = self.model.extract_experience_from_history()
            for x in of_step:
                x.eid.step = number
            if self.scores_steps:
                await self._reward(of_step, step_num=number)
            played += of_step
            if not go_on:
                break
        if not self.scores_steps:
            await self._reward(played)
            for x in played:
                x.metrics["actual_env_steps"] = number + 1
        return played

    async def _reward(self, exps: list[TrinityExperience], **step: int) -> None:
        reward = (
            await self.reward_async(exps, **step) if self.is_async else self.reward(exps, **step)
        )
        for x in exps:
            x.reward = reward


class StepWiseRewardWorkflow(_Steps):
    """`reward(exps, step_num)` after each step."""

    scores_steps = True
    rewarded = "exps, step_num"


class AsyncStepWiseRewardWorkflow(StepWiseRewardWorkflow):
    is_async = True


class TrinityRewardPropagationWorkflow(_Steps):
    """`reward(exps)` at the end, for every step."""

    rewarded = "exps"


class AsyncRewardPropagationWorkflow(TrinityRewardPropagationWorkflow):
    is_async = True


def _at_once(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that waits for nothing."""
    try:
        work.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    raise RuntimeError("a step that waits belongs to a workflow with is_async = True")

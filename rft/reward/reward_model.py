"""Reward of a trained model: an auxiliary model with `task: score` gets the whole chat, and its raw
number is the reward.

buffer.explorer_input.default_reward_fn_type: reward_model
explorer.auxiliary_models: [{name: rm, model_path: ..., task: score}]
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, Field

from rft.errors import ConfigError
from rft.reward.base import Reward, reward
from rft.reward.named import NO_TASKS, named
from rft.types.completion import Score, Transcript, without_reasoning
from rft.types.ports import ChatModel
from rft.types.task import Task


class RewardModelArgs(BaseModel):
    """`model`: name of the auxiliary model; null: the only one.  `label`: index among several
    numbers.

    value = scale x number.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    model: str | None = None
    label: int | None = Field(None, ge=0)
    scale: float = 1.0


@reward("reward_model", args=RewardModelArgs)
class RewardModel(Reward):
    """Score of a trained reward model for the messages of the last call and its answer.

    The chat is rendered with the model's own template and tokenizer.
    """

    def __init__(
        self, model: str | None = None, label: int | None = None, scale: float = 1.0
    ) -> None:
        self._name = model
        self._label = label
        self._scale = scale
        self._model: ChatModel | None = None

    def check_models(
        self, models: Mapping[str, object], tasks: Mapping[str, str] = NO_TASKS
    ) -> None:
        self._named(models, tasks)

    def _named(self, models: Mapping[str, object], tasks: Mapping[str, str] = NO_TASKS) -> str:
        who = "reward_model (of task: score)"
        key = "reward_fn_args.model"
        return named(models, self._name, who=who, key=key, task="score", tasks=tasks)

    async def prepare(self, models: Mapping[str, ChatModel]) -> None:
        self._model = models[self._named(models)]

    def gold_answer(self, task: Task) -> None:
        """Return None: `rft check` starts no models."""

    def check_task(self, task: Task, transcript: Transcript) -> None:
        if task.images:
            raise ConfigError(
                f"row {task.index} shows images, which a reward model does not read; use a judge",
                key="model",
            )

    async def __call__(self, task: Task, transcript: Transcript) -> Score:
        assert self._model is not None, "prepare comes first"
        last = transcript.turns[-1]
        if last.images:
            raise ValueError("a reward model does not read images; use a judge")
        answer = {"role": "assistant", "content": last.completion.answer}
        numbers = await self._model.classify(without_reasoning([*last.messages, answer]))
        if self._label is None and len(numbers) != 1:
            raise ValueError(
                f"the reward model gives {len(numbers)} numbers; say in reward_fn_args.label which "
                f"one is the reward"
            )
        label = self._label or 0
        if label >= len(numbers):
            raise ValueError(
                f"reward_fn_args.label is {label}, but the reward model gives {len(numbers)} "
                f"numbers, counted from 0"
            )
        return Score(value=self._scale * numbers[label], parts={"reward_model": numbers[label]})

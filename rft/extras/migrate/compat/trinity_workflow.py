"""Trinity-RFT's workflow bases.  A class made from them is a workflow of ours: named in a
configuration, registered, tested the same way.

    @WORKFLOWS.register_module("my_workflow")
    class MyWorkflow(SimpleWorkflow): ...

Invariant: what `run` returns are sequences that the policy wrote in this run.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, ClassVar

from rft.extras.migrate.compat import trinity_play as play
from rft.extras.migrate.compat.trinity_experience import TrinityExperience
from rft.extras.migrate.compat.trinity_model import ModelWrapper
from rft.extras.migrate.compat.trinity_registry import get_logger
from rft.extras.migrate.compat.trinity_rewards import MathBoxedRewardFn, MathRewardFn, RewardFn
from rft.extras.migrate.compat.trinity_task import TrinityTask

INSTRUCTION = (
    "Solve the problem step by step. Write your reasoning between <think> and </think>, "
    "then the final result alone between <answer> and </answer>."
)
BOXED = "Solve the problem step by step. Put the final result inside \\boxed{}."
THINK = "Write your reasoning between <think> and </think> first. "


class TrinityWorkflow:
    """Write `run`, or `run_async` with `is_async = True`.

    `can_repeat`: one object plays all runs of a task (`set_repeat_times(n, run_id_base)`), and sets
    `eid.run`.  `can_reset` has no effect: every run, or group of runs, has a fresh object, which is
    what a correct `reset` amounts to.
    """

    can_reset: ClassVar[bool] = False
    can_repeat: ClassVar[bool] = False
    is_async: ClassVar[bool] = False
    # experiences of a run have rewards of their own; else equal ones are the run's
    scores_steps: ClassVar[bool] = False
    # anything else is refused: it belongs to workflows with run(self, task, ctx)
    isolated: ClassVar[Any] = False

    def __init__(
        self,
        *,
        task: TrinityTask,
        model: ModelWrapper,
        auxiliary_models: list[ModelWrapper] | None = None,
    ) -> None:
        self.task = task
        self.model = model
        self.auxiliary_model_wrappers = auxiliary_models
        self.auxiliary_models: list[Any] | None = None
        if auxiliary_models:
            is_async = type(self).is_async
            self.auxiliary_models = [
                m.get_openai_async_client() if is_async else m.get_openai_client()
                for m in auxiliary_models
            ]
        self.run_id_base = 0
        self.logger = get_logger(type(self).__module__)

    @classmethod
    def __rft_adapt__(cls) -> type:
        adapt: Any = play.adapter
        adapted: type = adapt(cls)
        return adapted

    @property
    def resettable(self) -> bool:
        return type(self).can_reset

    @property
    def repeatable(self) -> bool:
        return type(self).can_repeat

    @property
    def asynchronous(self) -> bool:
        return type(self).is_async

    def reset(self, task: TrinityTask) -> None:
        raise NotImplementedError

    def set_repeat_times(self, repeat_times: int, run_id_base: int) -> None:
        self.repeat_times = repeat_times
        self.run_id_base = run_id_base

    def run(self) -> list[TrinityExperience]:
        raise NotImplementedError(
            f"{type(self).__name__} must have run(), or run_async() and is_async = True"
        )

    async def run_async(self) -> list[TrinityExperience]:
        raise NotImplementedError(f"{type(self).__name__} must have run_async()")


class TrinityMultiTurnWorkflow(TrinityWorkflow):
    """Talk with the model in `run`, then hand the whole conversation to
    `process_messages_to_experience`.
    """

    def process_messages_to_experience(
        self,
        messages: list[dict[str, Any]],
        reward: float,
        info: dict[str, Any] | None = None,
        truncate_status: str | None = None,
    ) -> TrinityExperience:
        """One sequence with the tokens of the calls themselves.  Truncated: its reward is 0.
        Numbers of `info` are metrics too.
        """
        experiences = self.model.convert_messages_to_experience(messages)
        experiences.reward = 0.0 if experiences.truncate_status == "response_truncated" else reward
        experiences.truncate_status = experiences.truncate_status or truncate_status
        experiences.info |= info or {}
        experiences.metrics |= {
            k: float(v) for k, v in (info or {}).items() if isinstance(v, int | float)
        }
        return experiences

    async def process_messages_to_experience_async(
        self, *args: Any, **kwargs: Any
    ) -> TrinityExperience:
        return self.process_messages_to_experience(*args, **kwargs)


class BaseSimpleWorkflow(TrinityWorkflow):
    """One question, one answer, scored by the task's RewardFn."""

    def __init__(
        self,
        *,
        task: TrinityTask,
        model: ModelWrapper,
        auxiliary_models: list[ModelWrapper] | None = None,
    ) -> None:
        self.reset(task)
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)

    def reset(self, task: TrinityTask) -> None:
        self.task = task
        self.format_args = task.format_args
        self.system_prompt = task.format_args.system_prompt
        self.reply_prefix = task.format_args.reply_prefix
        self.raw_task = task.raw_task
        self.task_desc = task.task_desc
        self.truth = task.truth
        self.reward_fn_args = task.reward_fn_args
        if not (isinstance(task.reward_fn, type) and issubclass(task.reward_fn, RewardFn)):
            raise ValueError(
                f"{type(self).__name__} needs a reward; name one as default_reward_fn_type of the "
                f"taskset"
            )
        self.reward_fn: Any = task.reward_fn(**self.reward_fn_args)

    def set_repeat_times(self, repeat_times: int, run_id_base: int) -> None:
        super().set_repeat_times(repeat_times, run_id_base)
        self.task.rollout_args.n = repeat_times

    @property
    def rollout_args(self) -> dict[str, Any]:
        """The taskset's sampling, as keyword arguments of `model.chat`."""
        return asdict(self.task.rollout_args)

    def format_messages(self) -> list[dict[str, Any]]:
        messages = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        messages.append({"role": "user", "content": self.task_desc})
        if self.reply_prefix:
            messages.append({"role": "assistant", "content": self.reply_prefix})
        return messages

    def _scored(self, responses: list[TrinityExperience]) -> list[TrinityExperience]:
        for i, response in enumerate(responses):
            parts = self._reward(response)
            response.metrics |= parts
            response.reward = sum(parts.values())
            response.eid.run = i + self.run_id_base
        return responses

    def _reward(self, response: TrinityExperience) -> dict[str, float]:
        """The parts of an answer's reward."""
        parts: dict[str, float] = self.reward_fn(response=response.response_text, truth=self.truth)
        return parts


class SimpleWorkflow(BaseSimpleWorkflow):
    can_reset = True
    can_repeat = True

    def run(self) -> list[TrinityExperience]:
        return self._scored(self.model.chat(self.format_messages(), **self.rollout_args))


class AsyncSimpleWorkflow(BaseSimpleWorkflow):
    is_async = True

    async def run_async(self) -> list[TrinityExperience]:
        return self._scored(
            await self.model.chat_async(self.format_messages(), **self.rollout_args)
        )


class MathWorkflow(SimpleWorkflow):
    """Asks for reasoning and answer in tags, and scores with `math_reward` unless the taskset names
    another reward.
    """

    def reset(self, task: TrinityTask) -> None:
        if task.reward_fn is None:
            task.reward_fn = MathRewardFn
        if task.reward_fn is MathRewardFn and task.format_args.system_prompt is None:
            task.format_args.system_prompt = INSTRUCTION
        super().reset(task)


class AsyncMathWorkflow(AsyncSimpleWorkflow, MathWorkflow):
    pass


class MathBoxedWorkflow(SimpleWorkflow):
    r"""Asks for a result in \boxed{} and scores with `math_boxed_reward` unless the taskset names
    another reward.
    """

    def reset(self, task: TrinityTask) -> None:
        args = self.workflow_args = task.workflow_args
        self.use_base = args.get("use_base", False)
        self.with_think = args.get("with_think", False)
        self.format_score_coef = args.get("format_score_coef", 0.1)
        if task.reward_fn is None:
            task.reward_fn = MathBoxedRewardFn
        super().reset(task)
        if self.system_prompt is None:
            self.system_prompt = (THINK if self.with_think else "") + BOXED

    def format_prompt(self) -> str:
        return (
            "".join(f"{m['role'].capitalize()}: {m['content']}\n" for m in self.format_messages())
            + "Assistant: "
        )

    def _reward(self, response: TrinityExperience) -> dict[str, float]:
        parts: dict[str, float] = self.reward_fn(
            response=response.response_text,
            truth=self.truth,
            with_think=self.with_think,
            format_score_coef=self.format_score_coef,
            response_token=response.tokens[response.prompt_length :],
            info=response.info,
        )
        return parts

    def run(self) -> list[TrinityExperience]:
        if self.use_base:
            return self._scored(self.model.generate([self.format_prompt()], **self.rollout_args))
        return super().run()


class AsyncMathBoxedWorkflow(MathBoxedWorkflow):
    is_async = True

    async def run_async(self) -> list[TrinityExperience]:
        if self.use_base:
            return self._scored(
                await self.model.generate_async([self.format_prompt()], **self.rollout_args)
            )
        return self._scored(
            await self.model.chat_async(self.format_messages(), **self.rollout_args)
        )

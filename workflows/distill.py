"""On-policy distillation: the model answers, a teacher says how likely it finds every token of the
answer.

algorithm: {algorithm_type: on_policy_distill}
explorer: {auxiliary_models: [{name: teacher, model_path: ...}]}     # with the policy's tokenizer
explorer_input: {taskset: {default_workflow_type: on_policy_distill_workflow, workflow_args:
{teacher: teacher}}}
"""

from hashlib import blake2b
from typing import Any, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field, field_validator

from rft import RunContext, Score, Task, Transcript, Workflow, register
from rft.types.completion import Completion, Turn
from rft.types.ports import GenerateRequest

METRICS = {"teacher": "written_by_teacher", "data": "taken_from_data"}
MATH = "Solve the problem step by step. Put the final result inside \\boxed{}."


class DistillArgs(BaseModel):
    """Who teaches, and what the student is told."""

    model_config = ConfigDict(extra="forbid")
    teacher: str | None = Field(
        None, description="name of the auxiliary model; null: the only one, or the first"
    )
    system_prompt: str | None = Field(None, description="put first, unless the task brings its own")

    @field_validator("teacher")
    @classmethod
    def _told_more(cls, teacher: str | None) -> str | None:
        if teacher == "self":
            raise ValueError(
                "self: its prompt is the student's, so it has nothing to teach; use opsd_workflow, "
                "or name an auxiliary model"
            )
        return teacher


@register.workflow("on_policy_distill_workflow", args=DistillArgs)
class OnPolicyDistill(Workflow):
    """One answer with its teacher's log-probs.  The taskset's reward, if it names one, is kept;
    distillation does not read it.
    """

    gives = ("teacher_logprobs",)

    def __init__(self, teacher: str | None = None, system_prompt: str | None = None) -> None:
        self.teacher = teacher
        self.system_prompt = system_prompt

    async def run(self, task: Task, ctx: RunContext) -> Transcript:
        await ctx.chat(self._messages(task))
        if not task.is_eval:
            await ctx.teach(self._name(ctx))
        return ctx.transcript(score=self._unread(task))

    def _messages(self, task: Task) -> list[dict[str, Any]]:
        messages = task.chat()
        if self.system_prompt and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.system_prompt}, *messages]
        return messages

    def _unread(self, task: Task) -> Score | None:
        """Return a score where the taskset names no reward, which distillation does not read."""
        return Score(value=0.0) if (task.reward or self.usual_reward) is None else None

    def _name(self, ctx: RunContext) -> str:
        if self.teacher is not None:
            return self.teacher
        if not ctx.models:
            raise KeyError(
                "on_policy_distill_workflow needs a teacher: name a model in "
                "explorer.auxiliary_models"
            )
        return next(iter(ctx.models))


class MixedArgs(DistillArgs):
    """Who teaches, how many answers the policy writes itself, and where the others come from."""

    on_policy: float = Field(
        0.5, ge=0, le=1, description="share of the answers that the policy writes (lambda)"
    )
    off_policy: Literal["teacher", "data"] = Field(
        "teacher",
        description="teacher: it writes the other answers; data: they are the tasks' gold answers",
    )


@register.workflow("gkd_workflow", args=MixedArgs)
class Mixed(OnPolicyDistill):
    """As on_policy_distill_workflow, but the teacher writes a share of the answers, or the data has
    them, which are then rows of an expert (arXiv:2306.13649, with a draw for each run instead of each
    batch).

    The policy renders the prompt of all answers.
    """

    def __init__(
        self,
        teacher: str | None = None,
        system_prompt: str | None = None,
        on_policy: float = 0.5,
        off_policy: str = "teacher",
    ) -> None:
        super().__init__(teacher, system_prompt)
        self.on_policy = on_policy
        self.off_policy = off_policy

    async def run(self, task: Task, ctx: RunContext) -> Transcript:
        if task.is_eval:
            return await super().run(task, ctx)
        if self._drawn(ctx.request_id) < self.on_policy:
            own = await super().run(task, ctx)
            return msgspec.structs.replace(own, metrics={METRICS[self.off_policy]: 0.0})
        name = self._name(ctx)
        request = ctx.request(self._messages(task))
        if self.off_policy == "data":
            answer = await self._of_data(task, ctx, request)
        else:
            (shown,) = await ctx.policy.generate(_short(request))
            prompt = tuple(map(int, shown.prompt_tokens))
            (answer,) = await ctx.model(name).generate(
                msgspec.structs.replace(request, messages=(), prompt_tokens=prompt)
            )
        ctx.record(Turn(messages=request.messages, tools=request.tools, completion=answer))
        await ctx.teach(name)
        return ctx.transcript(
            score=self._unread(task), metrics={METRICS[self.off_policy]: 1.0}, expert=True
        )

    @staticmethod
    async def _of_data(task: Task, ctx: RunContext, request: GenerateRequest) -> Completion:
        if not isinstance(task.truth, str):
            raise ValueError(
                f"task {task.index} has no text as gold answer, which off_policy: data takes"
            )
        (answer,) = await ctx.policy.generate(msgspec.structs.replace(request, written=task.truth))
        return answer

    @staticmethod
    def _drawn(request_id: str) -> float:
        """Return a number in [0, 1) that the run's place decides, so that a resumed run draws it
        again.
        """
        place = request_id.partition(".")[2]  # without the lineage
        return int.from_bytes(blake2b(place.encode(), digest_size=8).digest(), "big") / 2**64


def _short(request: GenerateRequest) -> GenerateRequest:
    """Return the request of one token, of which only the prompt's tokens are read."""
    sampling = msgspec.structs.replace(request.sampling, max_tokens=1, min_tokens=0)
    return msgspec.structs.replace(request, sampling=sampling, request_id=f"{request.request_id}-p")


@register.workflow("on_policy_distill_math_workflow", args=DistillArgs)
class OnPolicyDistillMath(OnPolicyDistill):
    """The same with the instruction to reason and to mark the result; goes with
    `math_boxed_reward`.
    """

    usual_reward = "math_boxed_reward"

    def __init__(self, teacher: str | None = None, system_prompt: str | None = None) -> None:
        super().__init__(teacher, MATH if system_prompt is None else system_prompt)

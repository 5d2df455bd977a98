"""On-policy distillation: the model answers, a teacher says how likely it finds every token of the
answer.

algorithm: {algorithm_type: on_policy_distill}
explorer: {auxiliary_models: [{name: teacher, model_path: ...}]}     # with the policy's tokenizer
explorer_input: {taskset: {default_workflow_type: on_policy_distill_workflow, workflow_args:
{teacher: teacher}}}
"""

from pydantic import BaseModel, ConfigDict, Field, field_validator

from rft import RunContext, Score, Task, Transcript, Workflow, register

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
        messages = task.chat()
        if self.system_prompt and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.system_prompt}, *messages]
        await ctx.chat(messages)
        if not task.is_eval:
            await ctx.teach(self._name(ctx))
        return ctx.transcript(
            score=Score(value=0.0) if (task.reward or self.usual_reward) is None else None
        )

    def _name(self, ctx: RunContext) -> str:
        if self.teacher is not None:
            return self.teacher
        if not ctx.models:
            raise KeyError(
                "on_policy_distill_workflow needs a teacher: name a model in "
                "explorer.auxiliary_models"
            )
        return next(iter(ctx.models))


@register.workflow("on_policy_distill_math_workflow", args=DistillArgs)
class OnPolicyDistillMath(OnPolicyDistill):
    """The same with the instruction to reason and to mark the result; goes with
    `math_boxed_reward`.
    """

    usual_reward = "math_boxed_reward"

    def __init__(self, teacher: str | None = None, system_prompt: str | None = None) -> None:
        super().__init__(teacher, MATH if system_prompt is None else system_prompt)

"""Mathematical questions: the model is asked to reason first and to mark its final answer.

Goes with `math_reward` (math_workflow) or `math_boxed_reward` (math_boxed_workflow,
math_eval_workflow).
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict

from rft import RunContext, Task, Transcript, Workflow, register

PROMPTS = {
    "tags": (
        "Solve the problem step by step. Write your reasoning between <think> and </think>, "
        "then the final result alone between <answer> and </answer>."
    ),
    "boxed": "Solve the problem step by step. Put the final result inside \\boxed{}.",
}


class MathArgs(BaseModel):
    """`style`: how the answer is to be marked; `system_prompt` replaces the instruction of the
    style.
    """

    model_config = ConfigDict(extra="forbid")
    style: Literal["tags", "boxed"] = "tags"
    system_prompt: str | None = None


@register.workflow("math_workflow", args=MathArgs)
class MathWorkflow(Workflow):
    """Asks once; adds an instruction if the task has no system prompt."""

    usual_reward = "math_reward"

    def __init__(
        self, style: Literal["tags", "boxed"] = "tags", system_prompt: str | None = None
    ) -> None:
        self.instruction = system_prompt if system_prompt is not None else PROMPTS[style]

    async def run(self, task: Task, ctx: RunContext) -> Transcript:
        messages = task.chat()
        if messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.instruction}, *messages]
        await ctx.chat(messages)
        return ctx.transcript(metrics={"answer_chars": len(ctx.completions[-1].text)})


class BoxedArgs(BaseModel):
    """`use_base` asks the question alone, for models not tuned to chat; `with_think` asks
    for <think>...</think> first.
    """

    model_config = ConfigDict(extra="forbid")
    use_base: bool = False
    with_think: bool = False
    system_prompt: str | None = None


@register.workflow("math_boxed_workflow", args=BoxedArgs)
class MathBoxedWorkflow(Workflow):
    """Asks once for a result inside \\boxed{}.  An argument of `math_boxed_reward` sets the penalty
    for an answer without <think>.
    """

    usual_reward = "math_boxed_reward"

    def __init__(
        self, use_base: bool = False, with_think: bool = False, system_prompt: str | None = None
    ) -> None:
        think = "Write your reasoning between <think> and </think> first. " if with_think else ""
        self.instruction = system_prompt if system_prompt is not None else think + PROMPTS["boxed"]
        self.use_base = use_base

    async def run(self, task: Task, ctx: RunContext) -> Transcript:
        messages = task.chat()
        if not self.use_base and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.instruction}, *messages]
        await ctx.chat(messages)
        return ctx.transcript(metrics={"answer_chars": len(ctx.completions[-1].text)})


class EvalArgs(BaseModel):
    model_config = ConfigDict(extra="forbid")


@register.workflow("math_eval_workflow", args=EvalArgs)
class MathEvalWorkflow(MathBoxedWorkflow):
    """Asks with the instruction of Qwen2.5-Math's evaluation; its sampling has to be set by
    `rollout_args: {temperature: 0.6, top_p: 0.8}`.
    """

    def __init__(self) -> None:
        super().__init__(
            system_prompt="Please reason step by step, and put your final answer within \\boxed{}."
        )


class ThinkArgs(BoxedArgs):
    with_think: bool = True


class ThinkBoxedWorkflow(MathBoxedWorkflow):
    """`math_boxed_workflow` that asks for <think>...</think> first, as Trinity-RFT does of questions
    with images.
    """

    def __init__(
        self, use_base: bool = False, with_think: bool = True, system_prompt: str | None = None
    ) -> None:
        super().__init__(use_base, with_think, system_prompt)


class MathRuler(MathWorkflow):
    """`math_workflow`, scored by comparing all answers to a task."""

    usual_reward = "ruler_judge"


# Trinity-RFT's names.  Its math_rm_workflow lets rewards read the whole conversation; here all
# rewards can.
for _name in ("async_math_workflow", "math_rm_workflow", "async_math_rm_workflow"):
    register.workflow(_name, args=MathArgs)(MathWorkflow)
for _name in ("math_ruler_workflow", "async_math_ruler_workflow"):
    register.workflow(_name, args=MathArgs)(MathRuler)
register.workflow("async_math_boxed_workflow", args=BoxedArgs)(MathBoxedWorkflow)
for _name in ("simple_mm_workflow", "async_simple_mm_workflow"):
    register.workflow(_name, args=ThinkArgs)(ThinkBoxedWorkflow)
register.workflow("async_math_eval_workflow", args=EvalArgs)(MathEvalWorkflow)

"""Mathematical questions: the model is asked to reason first and to mark its final answer.

Goes with `math_reward` (tags) or `math_boxed_reward` (boxed).
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict

from rft.types.completion import Transcript
from rft.types.task import Task
from rft.workflow.base import RunContext, Workflow, workflow

PROMPTS = {
    "tags": (
        "Solve the problem step by step. Write your reasoning between <think> and </think>, "
        "then the final result alone between <answer> and </answer>."
    ),
    "boxed": "Solve the problem step by step. Put the final result inside \\boxed{}.",
}


class MathArgs(BaseModel):
    """`style` says how the answer is to be marked; `system_prompt` replaces that instruction by your own words."""

    model_config = ConfigDict(extra="forbid")
    style: Literal["tags", "boxed"] = "tags"
    system_prompt: str | None = None


@workflow("math_workflow", args=MathArgs)
class MathWorkflow(Workflow):
    """Asks once, with an instruction in front; a system prompt of the task itself wins."""

    def __init__(self, style: Literal["tags", "boxed"] = "tags", system_prompt: str | None = None) -> None:
        self.instruction = system_prompt if system_prompt is not None else PROMPTS[style]

    async def run(self, task: Task, ctx: RunContext) -> Transcript:
        messages = task.chat()
        if messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.instruction}, *messages]
        await ctx.chat(messages)
        return ctx.transcript(metrics={"answer_chars": len(ctx.completions[-1].text)})

"""One question, one answer: the simplest workflow, and the one to copy when you write your own.

explorer_input:
  taskset: {path: questions.jsonl, default_workflow_type: simple_workflow, default_reward_fn_type:
  exact_answer}
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from rft import RunContext, Task, Transcript, Workflow, register


class ChatArgs(BaseModel):
    """`system_prompt` is put first, unless the task brings its own."""

    model_config = ConfigDict(extra="forbid")
    system_prompt: str | None = None


@register.workflow("simple_workflow", args=ChatArgs)
class SimpleWorkflow(Workflow):
    """Asks the model once.  The taskset's reward scores the answer."""

    needs_reward = True

    def __init__(self, system_prompt: str | None = None) -> None:
        self.system_prompt = system_prompt

    async def run(self, task: Task, ctx: RunContext) -> Transcript:
        messages = task.chat()
        if self.system_prompt and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.system_prompt}, *messages]
        await ctx.chat(messages)
        return ctx.transcript()


# Trinity-RFT's name; every workflow may be async here
register.workflow("async_simple_workflow", args=ChatArgs)(SimpleWorkflow)


@register.workflow("rubric_judge_workflow", args=ChatArgs)
class RubricJudged(SimpleWorkflow):
    """The same, scored by a judge with the criteria in a row's column `rubric`: a list of
    {description, weight}.
    """

    usual_reward = "rubric_judge"
    usual_reward_args: ClassVar[Mapping[str, Any]] = {"rubric_key": "rubric"}

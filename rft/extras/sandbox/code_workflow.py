"""Programming tasks: ask the model for a program in one code block.  For use with `code_reward` or
`prime_code_reward`.

explorer_input:
  taskset: {path: tasks.jsonl, default_workflow_type: code_workflow, default_reward_fn_type:
  code_reward}
"""

from pydantic import BaseModel, ConfigDict

from rft import RunContext, Task, Transcript, Workflow, register

INSTRUCTION = (
    "Solve the programming task in Python. Think first if you need to, then write the whole "
    "solution in one block that begins with "
    "```python and ends with ```. A task that shows a function wants that function; any other "
    "reads from standard input and prints."
)


class CodeWorkflowArgs(BaseModel):
    """`system_prompt` replaces the instruction; an empty text removes it."""

    model_config = ConfigDict(extra="forbid")
    system_prompt: str | None = None


@register.workflow("code_workflow", args=CodeWorkflowArgs)
class CodeWorkflow(Workflow):
    """Asks once, after an instruction; a system prompt of the task replaces the instruction."""

    usual_reward = "code_reward"

    def __init__(self, system_prompt: str | None = None) -> None:
        self.instruction = system_prompt if system_prompt is not None else INSTRUCTION

    async def run(self, task: Task, ctx: RunContext) -> Transcript:
        messages = task.chat()
        if self.instruction and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.instruction}, *messages]
        await ctx.chat(messages)
        return ctx.transcript()

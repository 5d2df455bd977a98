"""Countdown: reach a number from given numbers.  Use with `countdown_reward`.

explorer_input:
  taskset: {path: "rft.taskset.generated_tasks:countdown", split: train,
            default_workflow_type: countdown_workflow,
            default_reward_fn_type: countdown_reward}
"""

from rft import RunContext, Task, Transcript, Workflow, register
from rft.taskset.generated_tasks import COUNTDOWN_PROMPT


@register.workflow("countdown_workflow")
class CountdownWorkflow(Workflow):
    """Asks once; rows with only `nums` and `target` get the usual question."""

    usual_reward = "countdown_reward"

    async def run(self, task: Task, ctx: RunContext) -> Transcript:
        messages = task.chat()
        if task.prompt in (None, "") or "nums" in task.row:
            question = COUNTDOWN_PROMPT.format(
                numbers=", ".join(map(str, task.row["nums"])), target=task.row["target"]
            )
            messages = [
                *(m for m in messages if m["role"] == "system"),
                {"role": "user", "content": question},
            ]
        await ctx.chat(messages)
        return ctx.transcript()

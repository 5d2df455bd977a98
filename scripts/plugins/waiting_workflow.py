"""One chat per run, then a tool or judge that takes its time: lognormal waits between 0.2 and 2 s,
the same for the same task and run.
"""

import asyncio
import random

from pydantic import BaseModel

from rft import RunContext, Task, Transcript, Workflow, register

LEAST_S = 0.2
MOST_S = 2.0


def wait_s(task: int, run: int) -> float:
    """Seconds that the tool takes; median 0.6."""
    return min(MOST_S, max(LEAST_S, random.Random(task * 1009 + run).lognormvariate(-0.5, 0.7)))


class WaitingArgs(BaseModel):
    waits: bool = True


@register.workflow("waiting_workflow", args=WaitingArgs)
class WaitingWorkflow(Workflow):
    def __init__(self, waits: bool) -> None:
        self.waits = waits

    async def run(self, task: Task, ctx: RunContext) -> Transcript:
        await ctx.chat(task.chat())
        if self.waits:
            # this is the tool: it takes time and no processor
            await asyncio.sleep(wait_s(task.index, ctx.run))
        return ctx.transcript()

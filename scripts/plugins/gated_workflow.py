"""One chat per run, but only after the benchmark opens the gate: so a run of rft makes one step
whenever it is told to.

Each run connects to the benchmark's unix socket, waits there for one byte, and then asks the model.
"""

import asyncio

from pydantic import BaseModel

from rft import RunContext, Task, Transcript, Workflow, register


class GateArgs(BaseModel):
    socket: str


@register.workflow("gated_workflow", args=GateArgs)
class GatedWorkflow(Workflow):
    def __init__(self, socket: str) -> None:
        self.socket = socket

    async def run(self, task: Task, ctx: RunContext) -> Transcript:
        reader, writer = await asyncio.open_unix_connection(self.socket)
        try:
            await reader.readexactly(1)
        finally:
            writer.close()
            await writer.wait_closed()
        await ctx.chat(task.chat())
        return ctx.transcript()

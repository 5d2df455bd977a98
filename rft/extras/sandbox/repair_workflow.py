"""Repair a small project: the model sees its files and rewrites those it changes; hidden tests
decide.

explorer_input:
  taskset: {path: "rft.taskset.task_folders:task_folders", args: {folder: examples/repair/tasks},
  default_workflow_type: repair_workflow}
"""

import asyncio
import re
from typing import Literal

from pydantic import BaseModel, ConfigDict

from rft import RunContext, Score, Task, Transcript, Workflow, register
from rft.extras.sandbox.code_sandbox import Sandbox, Tests
from rft.extras.sandbox.container import ContainerSandbox
from rft.extras.sandbox.image import built
from rft.extras.sandbox.processes import ProgramLimits
from rft.extras.sandbox.project import judging, passes_inside, served

INSTRUCTION = (
    "Repair the project so that it does what is asked. Write each file that you change, whole, in "
    "a block whose first line is "
    "```PATH and whose last line is ```."
)
BLOCK = re.compile(r"^```(\S+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_LOCAL = Sandbox()
_CONTAINERS: dict[str, ContainerSandbox] = {}  # by image


class RepairArgs(BaseModel):
    """`sandbox: local` runs hidden tests in a separate process, which sees only results of the
    project's functions.

    `sandbox: container` runs them in the project's process, where an answer that changes unittest
    is not detected.  Image: the task's, else `image`, else built from the task's Dockerfile.
    """

    model_config = ConfigDict(extra="forbid")
    sandbox: Literal["local", "container"] = "local"
    image: str = ""
    timeout_s: float = 30.0
    memory_mb: int = 512


@register.workflow("repair_workflow", args=RepairArgs)
class RepairWorkflow(Workflow):
    """Asks once; reward 1 if the hidden tests pass (`python -m unittest`), else 0."""

    def __init__(
        self,
        sandbox: Literal["local", "container"] = "local",
        image: str = "",
        timeout_s: float = 30.0,
        memory_mb: int = 512,
    ) -> None:
        self.sandbox = sandbox
        self.image = image
        self.limits = ProgramLimits(timeout_s=timeout_s, memory_mb=memory_mb)

    async def run(self, task: Task, ctx: RunContext) -> Transcript:
        files = task.row["files"]
        shown = "\n\n".join(f"```{path}\n{text.rstrip()}\n```" for path, text in files.items())
        reply = await ctx.chat(
            [
                {"role": "system", "content": INSTRUCTION},
                {"role": "user", "content": f"{task.prompt}\n\n{shown}"},
            ]
        )
        changed = {path: text for path, text in BLOCK.findall(reply.answer) if path in files}
        if not changed:
            return ctx.transcript(
                score=Score(value=0.0, reason="no file of the project was written")
            )
        project = {**files, **changed}
        tests = task.row["tests"]
        if self.sandbox == "container":
            ran = await passes_inside(await self._container(task), project, tests, self.limits)
            passed = not ran.reason
            reason = f"{ran.reason}: {ran.detail}"
        else:
            verdict = await _LOCAL.judge(
                served(project), Tests([judging(project, tests)]), self.limits
            )
            passed = verdict.right
            reason = f"{verdict.reason}: {verdict.detail}"
        return ctx.transcript(
            score=Score(value=float(passed), reason="the tests pass" if passed else reason)
        )

    async def _container(self, task: Task) -> ContainerSandbox:
        if not (image := task.row["image"] or self.image):
            image = await asyncio.to_thread(
                built, {**task.row["files"], "Dockerfile": task.row["dockerfile"]}
            )
        if image not in _CONTAINERS:
            _CONTAINERS[image] = ContainerSandbox(image)
        return _CONTAINERS[image]

"""Reasoning with a Python tool: the model writes programs, reads their output, and puts its result
inside \\boxed{}.

explorer_input:
  taskset: {path: questions.jsonl, default_workflow_type: python_math_workflow}

Programs run in the sandbox of `code_reward`, without network or access to files and memory of
others.
"""

from functools import cache
from typing import Any, Self

from pydantic import BaseModel, Field, model_validator

from rft import Task, ToolArgs, ToolWorkflow, register
from rft.extras.sandbox.code_sandbox import ProgramLimits, Sandbox

INSTRUCTION = (
    "Solve the problem. You can run Python programs with the tool execute_python_code to calculate "
    "or to check a result; only what they "
    "print is told to you. Put the final result inside \\boxed{}."
)


@cache
def _sandbox() -> Sandbox:
    return Sandbox()


class PythonMathArgs(ToolArgs):
    """Like ToolArgs, with the time limit of a program."""

    max_tool_response_length: int = Field(
        1024, ge=1, description="characters of a program's output that the model is told"
    )
    python_timeout: float = Field(10.0, gt=0, description="seconds that one program may take")
    system_prompt: str = Field(
        INSTRUCTION, description="what the model is told first, unless the task brings its own"
    )
    type: str = Field(
        "gsm8k", pattern="^gsm8k$", description="Trinity-RFT's name of this kind of task"
    )

    @model_validator(mode="after")
    def _in_time(self) -> Self:
        if self.python_timeout >= self.tool_timeout:
            raise ValueError(
                f"python_timeout {self.python_timeout:g} must be less than tool_timeout "
                f"{self.tool_timeout:g}, which ends the whole call"
            )
        return self


@register.workflow("python_math_workflow", args=PythonMathArgs)
class PythonMath(ToolWorkflow):
    """Calls execute_python_code any number of times, then answers; a run is one row."""

    Args: type[BaseModel] = PythonMathArgs
    usual_reward = "math_boxed_reward"

    async def begin(self, task: Task) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = await super().begin(task)
        if messages[0]["role"] == "system":
            return messages
        return [{"role": "system", "content": self.args.system_prompt}, *messages]

    def make_tools(self, task: Task) -> Any:
        limits = ProgramLimits(timeout_s=self.args.python_timeout)

        async def execute_python_code(code: str) -> str:
            """Runs a Python program in a fresh process.

            code: the whole program; print what you want to see
            """
            ran = await _sandbox().run(code, limits)
            return (
                ran.output.decode(errors="replace") or "(nothing was printed)"
                if not ran.reason
                else f"{ran.reason}: {ran.detail}"
            )

        return [execute_python_code]


for _name in (
    "agentscope_react_workflow",
    "as_react_workflow",
    "agentscope_react_math_workflow",
    "agentscopev0_react_math_workflow",
):
    register.workflow(_name, args=PythonMathArgs)(PythonMath)

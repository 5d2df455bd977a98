"""The protocol of a run: a task and a context in, a transcript out.

A workflow is a class with one async method; one object serves one run.  It knows neither buffer nor trainer.

    @workflow("my_workflow")
    class MyWorkflow(Workflow):
        async def run(self, task, ctx):
            await ctx.chat(task.chat())
            return ctx.transcript()
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import msgspec

from rft.plugins import kind
from rft.types.completion import Completion, Score, Transcript, Turn
from rft.types.ports import ChatModel, GenerateRequest
from rft.types.task import SamplingArgs, Task

workflow = kind("workflow")


@runtime_checkable
class Workflow(Protocol):
    """Plays one run of a task.  `__init__` takes the checked `workflow_args` as keyword arguments."""

    async def run(self, task: Task, ctx: RunContext) -> Transcript: ...


class RunContext:
    """What one run may use: the policy's engine with the task's own rollout arguments.

    It records every model call; `transcript()` gives them back in order.  `seed(turn)` gives each call's seed in a deterministic
    run; without it the engine draws freely.
    """

    def __init__(
        self, model: ChatModel, task: Task, *, run: int, request_id: str, seed: Callable[[int], int] | None = None
    ) -> None:
        self._model = model
        self._task = task
        self._turns: list[Turn] = []
        self.run = run
        self.request_id = request_id
        self.seed = seed

    async def chat(
        self, messages: list[dict[str, Any]], *, tools: list[dict[str, Any]] | None = None, **overrides: Any
    ) -> Completion:
        """One model call.  `overrides` replace fields of the task's sampling arguments, e.g. max_tokens=8."""
        sampling = msgspec.structs.replace(self._task.sampling, **overrides) if overrides else self._task.sampling
        if self.seed is not None and sampling.seed is None:
            sampling = msgspec.structs.replace(sampling, seed=self.seed(len(self._turns)))
        request = GenerateRequest(
            messages=tuple(messages),
            tools=tuple(tools if tools is not None else self._task.tools),
            chat_template=self._task.chat_template,
            chat_template_args=self._task.chat_template_args,
            prompt_truncation=self._task.prompt_truncation if not self._turns else "error",
            sampling=sampling,
            request_id=f"{self.request_id}-{len(self._turns)}",
        )
        (completion,) = await self._model.generate(request)
        self._turns.append(Turn(messages=request.messages, completion=completion))
        return completion

    @property
    def completions(self) -> list[Completion]:
        return [t.completion for t in self._turns]

    def transcript(
        self, *, score: Score | None = None, metrics: dict[str, float] | None = None, info: dict[str, Any] | None = None
    ) -> Transcript:
        """The calls so far.  Give `score` if the workflow scores itself; otherwise the taskset's reward is called."""
        return Transcript(turns=tuple(self._turns), score=score, metrics=metrics or {}, info=info or {})


def sampling_of(task: Task, **overrides: Any) -> SamplingArgs:
    """The task's sampling arguments with some fields replaced."""
    return msgspec.structs.replace(task.sampling, **overrides)

"""Self-distillation: the model answers, and the same model, told more, says how likely it finds
every token of the answer.

    algorithm: {algorithm_type: opsd}
    explorer_input: {taskset: {default_workflow_type: opsd_workflow, ...}}

What the teacher is told stays in its prompt: it is neither trained nor shown to the model.
"""

import asyncio
import math
import string
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from rft import RunContext, Score, Task, Transcript, Workflow, register

WHO = "self: the policy with the weights it now serves; else the name of an auxiliary model"
SOLUTION = (
    "{prompt}\n\nHere is the reference answer:\n{truth}\n\n"
    "Work it out in your own words and give the answer."
)
EXAMPLE = (
    "{prompt}\n\nThis is an example of a response to the question:\n{truth}\n\n"
    "Now answer with a response of your own."
)
FEEDBACK = "{prompt}{solution}{feedback}\n\nSolve the original problem."


class ToldArgs(BaseModel):
    """Who teaches, and what the teacher is told."""

    model_config = ConfigDict(extra="forbid")
    teacher: str = Field("self", description=WHO)
    told: str = Field(
        SOLUTION,
        description="the teacher's last message; {prompt} is the task's, {truth} its gold answer "
        "or `truth_key`",
    )
    truth_key: str | None = Field(
        None, description="column of the row that is told; null: the gold answer"
    )

    @field_validator("told")
    @classmethod
    def _fields(cls, told: str) -> str:
        return _checked(told, {"prompt", "truth"}, {"truth"})


class ExampleArgs(ToldArgs):
    """As ToldArgs, told a worked example."""

    told: str = Field(EXAMPLE, description="as for opsd_workflow, with the words of an example")


@register.workflow("opsd_workflow", args=ToldArgs)
class Told(Workflow):
    """One answer, and its log-probs behind a prompt that has the gold answer (arXiv:2601.18734).

    The taskset's reward, if it names one, is kept; distillation does not read it.
    """

    gives = ("teacher_logprobs",)

    def __init__(
        self, teacher: str = "self", told: str = SOLUTION, truth_key: str | None = None
    ) -> None:
        self.teacher = teacher
        self.told = told
        self.truth_key = truth_key

    async def run(self, task: Task, ctx: RunContext) -> Transcript:
        await ctx.chat(task.chat())
        if not task.is_eval:
            await ctx.teach(self.teacher, messages=self.teacher_messages(task))
        unscored = (task.reward or self.usual_reward) is None
        return ctx.transcript(score=Score(value=0.0) if unscored else None)

    def teacher_messages(self, task: Task) -> list[dict[str, Any]]:
        truth = task.truth if self.truth_key is None else task.row.get(self.truth_key)
        if truth is None:
            what = self.truth_key or "gold answer"
            raise ValueError(f"task {task.index} has no {what} to tell the teacher")
        return _told(task, self.told, truth=truth)


@register.workflow("sdft_workflow", args=ExampleArgs)
class Demonstrated(Told):
    """The same with a worked example (arXiv:2601.19897)."""

    def __init__(
        self, teacher: str = "self", told: str = EXAMPLE, truth_key: str | None = None
    ) -> None:
        super().__init__(teacher, told, truth_key)


class FeedbackArgs(BaseModel):
    """Who teaches, and what the teacher is told of the runs of a task."""

    model_config = ConfigDict(extra="forbid")
    teacher: str = Field("self", description=WHO)
    told: str = Field(
        FEEDBACK, description="the teacher's last message, from {prompt}, {solution}, {feedback}"
    )
    solution: str = Field(
        "\n\nCorrect solution:\n\n{answer}",
        description="text of a correct answer of another run; without one it is left out",
    )
    feedback: str = Field(
        "\n\nFeedback on an unsuccessful attempt:\n\n{reason}",
        description="text of the reason that the reward gave for this run; left out if it is right "
        "or has none",
    )
    success: float = Field(1.0, description="least reward of a correct answer")

    @field_validator("told")
    @classmethod
    def _told_fields(cls, told: str) -> str:
        return _checked(told, {"prompt", "solution", "feedback"}, {"solution", "feedback"})

    @field_validator("solution")
    @classmethod
    def _solution_fields(cls, solution: str) -> str:
        return _checked(solution, {"answer"}, {"answer"})

    @field_validator("feedback")
    @classmethod
    def _feedback_fields(cls, feedback: str) -> str:
        return _checked(feedback, {"reason"}, {"reason"})


@dataclass(eq=False)
class _Attempt:
    """One run: its answer, and the score once there is one."""

    ctx: RunContext
    score: Score | None = None

    @property
    def value(self) -> float:
        return -math.inf if self.score is None or self.score.value is None else self.score.value

    async def play(self, task: Task) -> None:
        await self.ctx.chat(task.chat())
        if not task.is_eval:
            self.score = await self.ctx.reward()


@register.workflow("sdpo_workflow", args=FeedbackArgs)
class Feedback(Workflow):
    """All runs of a task; each is taught by the policy that is told what the reward said of the
    run, and a correct answer of another run (arXiv:2601.20802).

    A run of which there is nothing to tell is taught by its own prompt: its advantages are 0.
    """

    gives = ("teacher_logprobs",)

    def __init__(self, **args: Any) -> None:
        self.args = FeedbackArgs(**args)

    async def run_group(self, task: Task, contexts: list[RunContext]) -> list[Any]:
        attempts = [_Attempt(ctx) for ctx in contexts]
        each = partial(asyncio.gather, return_exceptions=True)
        errors = await each(*(a.play(task) for a in attempts))
        if task.is_eval:
            return [e or a.ctx.transcript() for e, a in zip(errors, attempts, strict=True)]
        right = [a for a in attempts if a.value >= self.args.success]
        told = [self._told(task, a, [r for r in right if r is not a]) for a in attempts]
        taught = await each(
            *(
                a.ctx.teach(self.args.teacher, messages=m)
                for a, m in zip(attempts, told, strict=True)
            )
        )
        return [
            error
            or late
            or a.ctx.transcript(score=a.score, metrics={"untaught": float(not messages)})
            for a, error, late, messages in zip(attempts, errors, taught, told, strict=True)
        ]

    def _told(
        self, task: Task, attempt: "_Attempt", others: list["_Attempt"]
    ) -> list[dict[str, Any]]:
        """Return the teacher's messages; empty if there is nothing to tell.  `others`: correct
        attempts of other runs.
        """
        args = self.args
        solution = others[0].ctx.completions[0].answer if others else None
        score = attempt.score
        reason = "" if score is None or attempt.value >= args.success else score.reason
        if solution is None and not reason:
            return []
        return _told(
            task,
            args.told,
            solution="" if solution is None else args.solution.format(answer=solution),
            feedback=args.feedback.format(reason=reason) if reason else "",
        )


def _told(task: Task, text: str, **fields: Any) -> list[dict[str, Any]]:
    """Return the task's messages with `text` in place of the last one's."""
    *before, last = task.chat()
    return [*before, {**last, "content": text.format(prompt=last["content"], **fields)}]


def _checked(text: str, allowed: set[str], needed: set[str]) -> str:
    """Raise ValueError for a text with other fields in braces, or without one that it needs."""
    try:
        found = {name for _, name, _, _ in string.Formatter().parse(text) if name is not None}
    except ValueError as e:
        raise ValueError(f"{text!r}: {e}; write {{{{ and }}}} for braces") from None
    if found - allowed or needed - found:
        names = ", ".join(f"{{{name}}}" for name in sorted(allowed))
        raise ValueError(f"{text!r} must have {names} and no other; write {{{{ }}}} for braces")
    return text

"""Mathematical questions whose answers the policy also judges, and learns to judge (Trinity-RFT's
trainable RULER).

explorer_input:
  taskset: {path: questions.jsonl, default_workflow_type: math_trainable_ruler_workflow}

All runs of a task do the same, drawn for each group, so that like is compared with like:

    solve    answers, scored by the taskset's reward
    judge    verdicts on such answers, which are not trained; 1 minus the mean distance to the reward's own scores
    trust    answers, scored by one verdict of the policy; the gold answer is not looked at
"""

import asyncio
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rft import RunContext, Score, Task, Transcript, Workflow, register
from rft.reward.base import score
from rft.reward.build_reward import build
from rft.reward.delimiters import PromptDelimiters, Scale
from rft.reward.verdict import UnreadableVerdict, read
from rft.types.completion import Completion, Turn

Part = Literal["solve", "judge", "trust"]
SCALE = Scale(0, 1, integer=False)
INSTRUCTION = (
    "Reason inside <think>...</think>, step by step. Then write the result alone inside "
    "<answer>...</answer>."
)


class RulerArgs(BaseModel):
    """How often gold answers are used, and what the reward's own scores lie between."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    gold: float = Field(
        0.2,
        ge=0,
        le=1,
        description="share of tasks whose gold answer is used: by one group that solves, one that "
        "judges",
    )
    low: float = Field(
        -0.1, description="lowest score of the taskset's reward, which stands for the verdict 0"
    )
    high: float = Field(1.1, description="highest score of it, which stands for the verdict 1")
    system_prompt: str = Field(INSTRUCTION, description="put first, unless the task brings its own")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"low {self.low:g} must be less than high {self.high:g}")
        return self


@register.workflow("math_trainable_ruler_workflow", args=RulerArgs)
class TrainableRuler(Workflow):
    """The policy is its own judge in most groups, and is trained to judge in some.  A verdict that
    cannot be read leaves a run unscored.
    """

    usual_reward = "math_reward"

    def __init__(self, **args: Any) -> None:
        self.args = RulerArgs(**args)

    async def run_group(self, task: Task, contexts: Sequence[RunContext]) -> list[Transcript]:
        messages = task.chat()
        if messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.args.system_prompt}, *messages]
        part = "solve" if task.is_eval else self.part(contexts[0].request_id)
        if part == "judge":
            return await self._judge(task, contexts, messages)
        await asyncio.gather(*(ctx.chat(messages) for ctx in contexts))
        if part == "solve":
            return [ctx.transcript(info={"part": part}) for ctx in contexts]
        answers = [ctx.completions[-1] for ctx in contexts]
        delimit, question = _question(task, contexts[0], answers)
        (reply,) = await contexts[0].policy.generate(contexts[0].request(question))
        verdict, why = _verdict(reply, delimit)
        scores = (
            [Score(value=None, reason=why)] * len(answers)
            if verdict is None
            else [Score(value=v) for v in verdict]
        )
        judged = {"judge_success": float(verdict is not None)}
        return [
            c.transcript(score=s, metrics=judged, info={"part": part})
            for c, s in zip(contexts, scores, strict=True)
        ]

    def part(self, group: str) -> Part:
        """Drawn from the group's name alone.  Of every 1 + gold groups, gold solve, gold judge and
        1 - gold trust.
        """
        drawn = (
            int.from_bytes(blake2b(group.encode(), digest_size=8, person=b"part").digest())
            / 2**64
            * (1 + self.args.gold)
        )
        return (
            "solve"
            if drawn < self.args.gold
            else "judge"
            if drawn < 2 * self.args.gold
            else "trust"
        )

    async def _judge(
        self, task: Task, contexts: Sequence[RunContext], messages: list[dict[str, Any]]
    ) -> list[Transcript]:
        request = contexts[0].request(messages, n=len(contexts))
        answers = await contexts[0].policy.generate(request)
        reward = build(
            task.reward or self.usual_reward,
            task.reward_args,
            key=f"taskset {task.taskset}.reward_fn_args",
        )
        known = [
            await score(
                reward, task, Transcript(turns=(Turn(messages=request.messages, completion=a),))
            )
            for a in answers
        ]
        if (missing := next((s for s in known if s.value is None), None)) is not None:
            raise ValueError(f"an answer to be judged has no score: {missing.reason}")
        gold = [self._share(s.value) for s in known if s.value is not None]
        delimit, question = _question(task, contexts[0], answers)
        await asyncio.gather(*(ctx.chat(question) for ctx in contexts))
        return [self._scored(ctx, delimit, gold) for ctx in contexts]

    def _scored(self, ctx: RunContext, delimit: PromptDelimiters, gold: list[float]) -> Transcript:
        verdict, why = _verdict(ctx.completions[-1], delimit)
        value = (
            0.0
            if verdict is None
            else 1.0 - sum(abs(v - g) for v, g in zip(verdict, gold, strict=True)) / len(gold)
        )
        metrics = {"judge_success": float(verdict is not None), "reward_for_judge": value}
        return ctx.transcript(
            score=Score(value=value, reason=why), metrics=metrics, info={"part": "judge"}
        )

    def _share(self, value: float) -> float:
        return min(1.0, max(0.0, (value - self.args.low) / (self.args.high - self.args.low)))


def _question(
    task: Task, ctx: RunContext, answers: Sequence[Completion]
) -> tuple[PromptDelimiters, list[dict[str, Any]]]:
    """The same for all runs of a group, with marks that none of the answers can know."""
    delimit = PromptDelimiters(
        blake2b(
            repr((ctx.request_id, [a.answer for a in answers])).encode(), digest_size=8
        ).hexdigest()
    )
    names = [f"answer {i}" for i in range(1, len(answers) + 1)]
    shown = "\n\n".join(delimit(name, a.answer) for name, a in zip(names, answers, strict=True))
    asked = str(task.chat()[-1]["content"])
    text = (
        "Score every answer to the question from 0 (wrong) to 1 (right and well reasoned), beside "
        "the others.\n\n"
        f"{delimit('question', asked)}\n\n{shown}\n\n{delimit.ask(**dict.fromkeys(names, SCALE))}"
    )
    return delimit, [
        {"role": "system", "content": delimit.rules},
        {"role": "user", "content": text},
    ]


def _verdict(reply: Completion, delimit: PromptDelimiters) -> tuple[list[float] | None, str]:
    """The scores in order, or None and why."""
    try:
        return list(
            read(reply.answer, delimit).values()
        ) if reply.finish_reason == "stop" else None, "the verdict was cut"
    except UnreadableVerdict as e:
        return None, f"the policy's verdict cannot be read: {e}"

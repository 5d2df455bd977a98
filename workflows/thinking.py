"""Answers with a bound on the thought in front of them: a thought that is too long is ended, and
the model goes on from there.

explorer_input:
  taskset:
    path: questions.jsonl
    default_workflow_type: thinking_budget_workflow
    workflow_args: {thinking_token_budget: 1024}

Works with every engine: the thought is one call, the answer another that begins with its tokens.
What ends the thought is not trained.
"""

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rft import RunContext, Task, Transcript, Workflow, register
from rft.types.ports import GenerateRequest
from rft.types.task import SamplingArgs

_AS_IT_IS = "{{ messages[0]['content'] }}"


class ThinkingArgs(BaseModel):
    """How long a thought may be, and what ends it."""

    model_config = ConfigDict(extra="forbid")
    thinking_token_budget: int = Field(
        ge=1,
        description="tokens of the thought at most; max_response_tokens bounds thought and answer",
    )
    think_end: str = Field(
        "</think>", min_length=1, description="one token of the model, which ends its thoughts"
    )
    reasoning_end_str: str | None = Field(
        None, description="what ends a thought that is too long; null: think_end"
    )

    @model_validator(mode="after")
    def _ends(self) -> Self:
        if self.reasoning_end_str is not None and self.think_end not in self.reasoning_end_str:
            raise ValueError(f"reasoning_end_str must have {self.think_end!r} (think_end) in it")
        return self


@register.workflow("thinking_budget_workflow", args=ThinkingArgs)
class ThinkingBudget(Workflow):
    """Asks once.  A row's `messages`, if it has them, are the question; the taskset's reward sees
    what follows the thought.
    """

    def __init__(self, **args: Any) -> None:
        self.args = ThinkingArgs(**args)

    async def run(self, task: Task, ctx: RunContext) -> Transcript:
        asked = task.row.get("messages")
        messages = [dict(m) for m in asked] if isinstance(asked, list) and asked else task.chat()
        (end,) = await self._tokens(ctx, self.args.think_end, one=True)
        room = task.sampling.max_tokens
        thought = await ctx.chat(
            messages,
            max_tokens=min(self.args.thinking_token_budget, room),
            stop=(*task.sampling.stop, self.args.think_end),
        )
        written = [int(t) for t in thought.tokens]
        if end in written[:-1]:
            raise ValueError(
                f"the engine does not stop at {self.args.think_end!r}: it is a special token, "
                f"which is no text"
            )
        closed = written[-1:] == [end]
        forced: list[int] = []
        if thought.finish_reason == "length" and not closed:
            forced = await self._tokens(ctx, self.args.reasoning_end_str or self.args.think_end)
        left = room - len(written) - len(forced)
        metrics = {"thinking_tokens": float(len(written)), "thinking_ended": float(bool(forced))}
        if (closed or forced) and left > 0:
            await ctx.sample(
                prompt_tokens=[*map(int, thought.prompt_tokens), *written, *forced], max_tokens=left
            )
        return ctx.transcript(metrics=metrics, limited=bool(closed or forced) and left <= 0)

    async def _tokens(self, ctx: RunContext, text: str, *, one: bool = False) -> list[int]:
        """The tokens of a text, which the engine knows: as a prompt that is nothing else."""
        request = GenerateRequest(
            messages=({"role": "user", "content": text},),
            chat_template=_AS_IT_IS,
            sampling=SamplingArgs(max_tokens=1),
            request_id=f"{ctx.request_id}-end",
        )
        (made,) = await ctx.policy.generate(request)
        found = [int(t) for t in made.prompt_tokens]
        if one and len(found) != 1:
            raise ValueError(
                f"think_end {text!r} is {len(found)} tokens of this model; name the one token that "
                f"ends its thoughts"
            )
        return found

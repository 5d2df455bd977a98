"""Runs of several model calls: one loop that counts turns and tokens, whatever answers the model.

    class Guess(MultiTurnWorkflow):
        def begin(self, task):                    # opening messages
            self.secret = int(task.truth)
            return task.chat()
        def react(self, answer):                  # Completion -> Reply
            hit = answer.text.strip() == str(self.secret)
            return Reply.say("no", reward=0.0) if not hit else Reply(reward=1.0, done=True)

Knows no engine and no environment.  Invariant: earlier messages are never changed, so one sequence
holds the run token by token.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import xxhash
from pydantic import BaseModel, ConfigDict, Field, model_validator

from rft.engine.base import PromptTooLong
from rft.types.completion import Completion, Score, Transcript
from rft.types.task import Task
from rft.worker.threads import unblocked
from rft.workflow.base import RunContext, Workflow

Message = dict[str, Any]


async def waited(value: Any) -> Any:
    """What user code gave, which may be awaitable."""
    return await value if inspect.isawaitable(value) else value


@dataclass(frozen=True)
class Reply:
    """What follows an answer: messages for the model, a reward for this step (None: it has none),
    and whether the run is over.

    `info` (JSON values) goes into the step's experience.
    """

    messages: tuple[Message, ...] = ()
    reward: float | None = None
    done: bool = False
    info: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def say(text: str, **more: Any) -> Reply:
        """A user's message: `Reply.say("colder", reward=0.0)`."""
        return Reply(({"role": "user", "content": text},), **more)


class TurnArgs(BaseModel):
    """How long a run may be, and what becomes of its calls."""

    model_config = ConfigDict(extra="forbid")

    max_turns: int = Field(10, ge=1, description="model calls of a run at most")
    max_turn_tokens: int | None = Field(
        None,
        ge=1,
        description="tokens of one answer at most; all turns together, with what was said in "
        "between: max_response_tokens",
    )
    layout: Literal["joined", "steps"] = Field(
        "joined", description="one sequence of the whole run, or one for each call"
    )
    credit: Literal["run", "step"] = Field(
        "run", description="steps: each row has the reward of the whole run, or of its own step"
    )
    history: int | None = Field(
        None,
        ge=0,
        description="steps: how many earlier turns the model is shown besides the opening; null: "
        "all",
    )

    @model_validator(mode="after")
    def _fit(self) -> TurnArgs:
        if self.layout == "joined" and (self.credit != "run" or self.history is not None):
            raise ValueError(
                "credit: step and history need layout: steps; a joined run is one row with one "
                "reward and its whole history"
            )
        return self


class MultiTurnWorkflow(Workflow):
    """Base of workflows with several turns.  One object plays one run; its methods may be async or
    ordinary functions.

    Override `begin` and `react`; `close` is called in the end, whatever happens; `outcome` gives
    named numbers for the score. `blocking = True` lets ordinary methods run in threads of their
    own.
    """

    Args: type[BaseModel] = TurnArgs
    blocking = False
    # opening messages, the last ones, that are part of the first turn: not always shown where
    # history is limited
    observed = 0

    def __init__(self, **args: Any) -> None:
        self.args: Any = self.Args(**args)

    def begin(self, task: Task) -> Any:
        """The opening messages."""
        return task.chat()

    def react(self, answer: Completion) -> Any:
        """What follows the answer, a Reply."""
        raise NotImplementedError(
            f"{type(self).__name__} must have a method react(self, answer) that gives a Reply"
        )

    def outcome(self) -> dict[str, float]:
        """Named parts of the score, e.g. {"success": 1.0}; logged as reward/NAME."""
        return {}

    def leftover(self) -> Any:
        """Reward of a run that a limit ended, added to that of its last step; None: nothing is
        added.
        """
        return None

    def counts(self) -> dict[str, float]:
        """More numbers for the monitor, rollout/NAME/mean."""
        return {}

    def close(self) -> Any:
        """Frees what the run held."""

    async def call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The result of a method that may be async, or block."""
        if self.blocking:
            return await unblocked(
                method, f"{type(self).__name__}.{method.__name__}", *args, **kwargs
            )
        return await waited(method(*args, **kwargs))

    async def run(self, task: Task, ctx: RunContext) -> Transcript:
        try:
            return await self._converse(task, ctx)
        finally:
            await self.call(self.close)

    async def _converse(self, task: Task, ctx: RunContext) -> Transcript:
        args = self.args
        messages: list[Message] = [dict(m) for m in await self.call(self.begin, task)]
        rewards: list[float | None] = []
        opening = len(messages)
        left = task.sampling.max_tokens
        done = False
        cut = False
        start: int | None = None
        for _ in range(args.max_turns):
            most = left if args.max_turn_tokens is None else min(left, args.max_turn_tokens)
            try:
                answer = await ctx.chat(
                    self._shown(messages, opening),
                    tools=list(self.tools()) or None,
                    max_tokens=most,
                )
            except PromptTooLong:
                if start is None:
                    raise
                cut = True  # what was said in between has used up the room
                break
            start = len(answer.prompt_tokens) if start is None else start
            messages.append(answer.message)
            reply = await self.call(self.react, answer)
            if not isinstance(reply, Reply):
                raise TypeError(
                    f"{type(self).__name__}.react returned {type(reply).__name__}; it must return "
                    f"a Reply"
                )
            rewards.append(reply.reward)
            self._scored(ctx, reply)
            messages += reply.messages
            done = reply.done
            left = self._left(task, ctx, start)
            if done:
                break
            if left < 1:
                cut = True
                break
        if not done and rewards and (more := await self.call(self.leftover)) is not None:
            rewards[-1] = (rewards[-1] or 0.0) + float(more)
            self._scored(ctx, Reply(reward=rewards[-1]))
        return self._transcript(ctx, rewards, done=done, cut=cut)

    def tools(self) -> Sequence[Message]:
        """Tools that the model is told of; none: those of the task."""
        return ()

    def _shown(self, messages: list[Message], opening: int) -> list[Message]:
        """What the model sees: all, or the opening and the last turns."""
        if self.args.history is None:
            return messages
        head = opening - self.observed
        answers = [i for i, m in enumerate(messages) if m["role"] == "assistant" and i >= opening]
        kept = answers[len(answers) - self.args.history :] if self.args.history else []
        if len(answers) <= self.args.history:
            return messages
        first = kept[0] if kept else answers[-1] + 1
        return [*messages[:head], *messages[_observed(messages, first, head) :]]

    def _left(self, task: Task, ctx: RunContext, start: int) -> int:
        """Tokens that the run may still take: answers and what was said in between count, the
        opening does not.
        """
        if self.args.layout == "joined":
            last = ctx.completions[-1]
            return task.sampling.max_tokens - (len(last.prompt_tokens) + len(last.tokens) - start)
        return task.sampling.max_tokens - sum(len(c.tokens) for c in ctx.completions)

    def _scored(self, ctx: RunContext, reply: Reply) -> None:
        step = 0.0 if reply.reward is None else float(reply.reward)
        if self.args.layout == "steps":
            info = {"step_reward": step, **reply.info} if reply.reward is not None else reply.info
            ctx.score_step(step if self.args.credit == "step" else None, **info)
        else:
            ctx.score_step(None, **reply.info)

    def _transcript(
        self, ctx: RunContext, rewards: list[float | None], *, done: bool, cut: bool
    ) -> Transcript:
        given = [float(r) for r in rewards if r is not None]
        if self.args.credit == "step" and not given:
            raise ValueError(f"{type(self).__name__}: credit: step, but no step had a reward")
        score = (
            Score(value=math.fsum(given), parts=self.outcome())
            if given and self.args.credit == "run"
            else None
        )
        metrics = {
            "turns": float(len(rewards)),
            "finished": float(done),
            "over_limit": float(cut),
            **self.counts(),
        }
        if self.args.credit == "step":
            metrics |= self.outcome()
        return ctx.transcript(score=score, metrics=metrics, layout=self.args.layout, limited=cut)


class StepArgs(TurnArgs):
    """As TurnArgs; one row for each call, each with the reward of its own step."""

    layout: Literal["joined", "steps"] = Field("steps", description="one sequence for each call")
    credit: Literal["run", "step"] = Field(
        "step", description="each row has the reward of its own step"
    )


class PropagationArgs(StepArgs):
    """As TurnArgs; one row for each call, all with the reward of the whole run."""

    credit: Literal["run", "step"] = Field(
        "run", description="all rows have the reward of the whole run"
    )


class StepWiseWorkflow(MultiTurnWorkflow):
    """Every call is an experience with the reward that `react` gave it."""

    Args: type[BaseModel] = StepArgs


class RewardPropagationWorkflow(MultiTurnWorkflow):
    """Every call is an experience; all have the run's one reward (the sum of what `react` gave, or
    the taskset's reward).
    """

    Args: type[BaseModel] = PropagationArgs


def _observed(messages: list[Message], answer: int, head: int) -> int:
    """Where the messages begin that stand before answer number `answer` and after the one before
    it, the head left out.
    """
    i = answer
    while i > head and messages[i - 1]["role"] != "assistant":
        i -= 1
    return i


def row_seed(task: Task) -> int:
    """The seed that the task's row names, else the task's number."""
    seed = task.row.get("seed")
    return task.index if seed is None else int(seed)


@dataclass(frozen=True)
class Step:
    """What an action led to.  `info` holds JSON values; its `success` becomes a part of the score.

    `reward` None: the step says nothing about the score.  A run none of whose steps has a reward is
    scored by the taskset's reward.
    """

    observation: str
    reward: float | None = None
    done: bool = False
    info: dict[str, Any] = field(default_factory=dict)


class EnvWorkflow(MultiTurnWorkflow):
    """Base of environments, text in and text out: override `reset(task)` → observation and
    `step(action)` → Step.

        class Guess(EnvWorkflow):
            def reset(self, task):
                self.secret = int(task.truth)
                return "Guess a digit."
            def step(self, action):
                right = action.strip() == str(self.secret)
                return Step("Right!" if right else "Wrong.", reward=float(right), done=right)

    `instruction(task)` is the system message.  The reward of a run is the sum of its steps'
    rewards; where no step has one, the taskset's reward scores the run.  If nobody names a reward,
    a step without one earns 0.  With `layout: steps` each row's info has `step_reward` and
    `env_state_hash` (of `state()`, by default the observation), which `gigpo` reads.
    """

    observed = 1
    _state = ""
    _observation = ""
    _success: float | None = None
    _missing: float | None = None  # reward of a step that names none

    @staticmethod
    def gives(args: Mapping[str, Any]) -> set[str]:
        """What algorithms find in the rows."""
        return {"info.env_state_hash"} if args.get("layout") == "steps" else set()

    def reset(self, task: Task) -> Any:
        """The first observation, a text."""
        raise NotImplementedError(
            f"{type(self).__name__} must have a method reset(self, task) that gives the first "
            f"observation"
        )

    def step(self, action: str) -> Any:
        """What an action leads to, a Step.  `action` is the answer's text behind its thought."""
        raise NotImplementedError(
            f"{type(self).__name__} must have a method step(self, action) that gives a Step"
        )

    def instruction(self, task: Task) -> str:
        """What the model is told first; empty: nothing but the task's own system prompt."""
        return task.system_prompt or ""

    def state(self) -> str:
        """A text that is equal for equal states; by default what the model was shown last."""
        return self._observation

    def outcome(self) -> dict[str, float]:
        return {} if self._success is None else {"success": self._success}

    async def begin(self, task: Task) -> list[Message]:
        self._missing = 0.0 if task.reward is None and self.usual_reward is None else None
        self._observation = await self.call(self.reset, task)
        self._state = self.state()
        told = self.instruction(task)
        system = [{"role": "system", "content": told}] if told else []
        return [*system, {"role": "user", "content": self._observation}]

    async def react(self, answer: Completion) -> Reply:
        began = self._state
        step = await self.call(self.step, answer.answer)
        if not isinstance(step, Step):
            raise TypeError(
                f"{type(self).__name__}.step returned {type(step).__name__}; it must return a Step"
            )
        self._observation = step.observation
        self._state = self.state()
        if "success" in step.info:
            self._success = float(step.info["success"])
        info = {"env_state_hash": xxhash.xxh3_64_hexdigest(began.encode()), **step.info}
        reward = self._missing if step.reward is None else float(step.reward)
        return Reply.say(step.observation, reward=reward, done=step.done, info=info)

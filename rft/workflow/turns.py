"""Runs of several model calls: one loop that counts turns and tokens.

    class Guess(MultiTurnWorkflow):
        def begin(self, task):                    # opening messages
            self.secret = int(task.truth)
            return task.chat()
        def react(self, answer):                  # Completion -> Reply
            hit = answer.text.strip() == str(self.secret)
            return Reply.say("no", reward=0.0) if not hit else Reply(reward=1.0, done=True)

Depends on no engine and no environment.  Invariant: earlier messages never change, so one sequence
holds all tokens of the run.
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
from rft.types.images import Image, Observation, content_of
from rft.types.task import Task
from rft.worker.threads import unblocked
from rft.workflow.base import RunContext, Workflow

Message = dict[str, Any]


async def waited(value: Any) -> Any:
    """Return the value of user code, awaited if it is awaitable."""
    return await value if inspect.isawaitable(value) else value


@dataclass(frozen=True)
class Reply:
    """The reaction to an answer: messages for the model, a reward for this step (None: no reward),
    and whether the run is over.

    `info` (JSON values) is stored in the step's experience.
    """

    messages: tuple[Message, ...] = ()
    reward: float | None = None
    done: bool = False
    info: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def say(text: Observation, **more: Any) -> Reply:
        """Reply with a user message: `Reply.say("colder", reward=0.0)`."""
        return Reply(({"role": "user", "content": content_of(text)},), **more)


class TurnArgs(BaseModel):
    """Limits of a run, and the layout of its experiences."""

    model_config = ConfigDict(extra="forbid")

    max_turns: int = Field(10, ge=1, description="model calls of a run at most")
    max_turn_tokens: int | None = Field(
        None,
        ge=1,
        description="tokens of one answer at most; of all turns and the messages in between: "
        "max_response_tokens",
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
        description="steps: earlier turns in the prompt besides the opening; null: all",
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
    """Base of workflows with several turns.  One object plays one run; its methods may be async.

    Override `begin` and `react`; `close` is always called at the end; `outcome` returns named parts
    of the score.  `blocking = True`: ordinary methods run in threads.
    """

    Args: type[BaseModel] = TurnArgs
    blocking = False
    # number of last opening messages that belong to the first turn, which `history` may drop
    observed = 0

    def __init__(self, **args: Any) -> None:
        self.args: Any = self.Args(**args)

    def begin(self, task: Task) -> Any:
        """Return the opening messages."""
        return task.chat()

    def react(self, answer: Completion) -> Any:
        """Return the Reply to an answer."""
        raise NotImplementedError(
            f"{type(self).__name__} must have a method react(self, answer) that gives a Reply"
        )

    def outcome(self) -> dict[str, float]:
        """Return named parts of the score, e.g. {"success": 1.0}; logged as reward/NAME."""
        return {}

    def leftover(self) -> Any:
        """Return the reward to add to the last step of a run that a limit ended, or None."""
        return None

    def counts(self) -> dict[str, float]:
        """Return further metrics, rollout/NAME/mean."""
        return {}

    def close(self) -> Any:
        """Free the resources of the run."""

    async def call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return the result of a method that may be async, or block."""
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
        budget = task.sampling.max_tokens
        done = False
        cut = False
        start: int | None = None
        for _ in range(args.max_turns):
            max_tokens = min(budget, args.max_turn_tokens or budget)
            try:
                answer = await ctx.chat(
                    self._shown(messages, opening),
                    tools=list(self.tools()) or None,
                    max_tokens=max_tokens,
                )
            except PromptTooLong:
                if start is None:
                    raise
                cut = True  # messages in between filled the context
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
            if done:
                break
            budget = self._token_budget(task, ctx, start)
            if budget < 1:
                cut = True
                break
        if not done and rewards and (more := await self.call(self.leftover)) is not None:
            rewards[-1] = (rewards[-1] or 0.0) + float(more)
            self._scored(ctx, Reply(reward=rewards[-1]))
        return self._transcript(ctx, rewards, done=done, cut=cut)

    def tools(self) -> Sequence[Message]:
        """Return the tools for the chat template; empty = the task's."""
        return ()

    def _shown(self, messages: list[Message], opening: int) -> list[Message]:
        """Return the messages of the prompt: all, or the opening and the last turns."""
        if self.args.history is None:
            return messages
        head = opening - self.observed
        answers = [i for i, m in enumerate(messages) if m["role"] == "assistant" and i >= opening]
        if len(answers) <= self.args.history:
            return messages
        first = answers[-self.args.history] if self.args.history else answers[-1] + 1
        return [*messages[:head], *messages[_observed(messages, first, head) :]]

    def _token_budget(self, task: Task, ctx: RunContext, start: int) -> int:
        """Return the tokens left for the run; its opening of `start` tokens does not count."""
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
        values = [float(r) for r in rewards if r is not None]
        if self.args.credit == "step" and not values:
            raise ValueError(f"{type(self).__name__}: credit: step, but no step had a reward")
        score = None
        if values and self.args.credit == "run":
            score = Score(value=math.fsum(values), parts=self.outcome())
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
    """Like TurnArgs; one row per call, with the reward of its step."""

    layout: Literal["joined", "steps"] = Field("steps", description="one sequence for each call")
    credit: Literal["run", "step"] = Field(
        "step", description="each row has the reward of its step"
    )


class PropagationArgs(StepArgs):
    """Like TurnArgs; one row per call, all with the reward of the whole run."""

    credit: Literal["run", "step"] = Field(
        "run", description="all rows have the reward of the whole run"
    )


class StepWiseWorkflow(MultiTurnWorkflow):
    """Makes every call an experience with the reward that `react` returned."""

    Args: type[BaseModel] = StepArgs


class RewardPropagationWorkflow(MultiTurnWorkflow):
    """Makes every call an experience; all have the run's reward (sum of step rewards, or the
    taskset's reward).
    """

    Args: type[BaseModel] = PropagationArgs


def _observed(messages: list[Message], answer: int, head: int) -> int:
    """Return the index of the first message between `answer` and the answer before it, at least
    `head`.
    """
    i = answer
    while i > head and messages[i - 1]["role"] != "assistant":
        i -= 1
    return i


def row_seed(task: Task) -> int:
    """Return the seed in the task's row, else the task's index."""
    seed = task.row.get("seed")
    return task.index if seed is None else int(seed)


@dataclass(frozen=True)
class Step:
    """The result of an action.  `info` holds JSON values; its `success` becomes a part of the score.

    `reward` None: no reward.  A run without rewards of its steps is scored by the taskset's reward.
    """

    observation: Observation
    reward: float | None = None
    done: bool = False
    info: dict[str, Any] = field(default_factory=dict)


class EnvWorkflow(MultiTurnWorkflow):
    """Base of environments: override `reset(task)` → observation and
    `step(action)` → Step.

        class Guess(EnvWorkflow):
            def reset(self, task):
                self.secret = int(task.truth)
                return "Guess a digit."
            def step(self, action):
                right = action.strip() == str(self.secret)
                return Step("Right!" if right else "Wrong.", reward=float(right), done=right)

    An observation is a text, or a list of texts and image files (bytes), for a model that reads images.
    `instruction(task)` is the system message.  The reward of a run is the sum of its steps'
    rewards; without any, the taskset's reward scores the run.  Where the taskset names none either,
    a step without a reward earns 0.  With `layout: steps` each row's info has `step_reward` and
    `env_state_hash` (of `state()`, by default the observation), which `gigpo` reads.
    """

    observed = 1
    _state = ""
    _observation: Observation = ""
    _success: float | None = None
    _missing: float | None = None  # reward of a step without one

    @staticmethod
    def gives(args: Mapping[str, Any]) -> set[str]:
        """Return the fields that the workflow writes for algorithms."""
        return {"info.env_state_hash"} if args.get("layout") == "steps" else set()

    def reset(self, task: Task) -> Any:
        """Return the first observation."""
        raise NotImplementedError(
            f"{type(self).__name__} must have a method reset(self, task) that gives the first "
            f"observation"
        )

    def step(self, action: str) -> Any:
        """Return the Step of an action, the answer's text after its thought."""
        raise NotImplementedError(
            f"{type(self).__name__} must have a method step(self, action) that gives a Step"
        )

    def instruction(self, task: Task) -> str:
        """Return the system message, by default the task's; empty: none."""
        return task.system_prompt or ""

    def state(self) -> str:
        """Return a text that is equal for equal states, by default the last observation."""
        pieces = self._observation
        if isinstance(pieces, str):
            return pieces
        return "".join(p if isinstance(p, str) else Image.of(p).sha256 for p in pieces)

    def outcome(self) -> dict[str, float]:
        return {} if self._success is None else {"success": self._success}

    async def begin(self, task: Task) -> list[Message]:
        self._missing = 0.0 if task.reward is None and self.usual_reward is None else None
        self._observation = await self.call(self.reset, task)
        self._state = self.state()
        instruction = self.instruction(task)
        system = [{"role": "system", "content": instruction}] if instruction else []
        return [*system, {"role": "user", "content": content_of(self._observation)}]

    async def react(self, answer: Completion) -> Reply:
        previous_state = self._state
        step = await self.call(self.step, answer.answer)
        if not isinstance(step, Step):
            raise TypeError(
                f"{type(self).__name__}.step returned {type(step).__name__}; it must return a Step"
            )
        self._observation = step.observation
        self._state = self.state()
        if "success" in step.info:
            self._success = float(step.info["success"])
        info = {"env_state_hash": xxhash.xxh3_64_hexdigest(previous_state.encode()), **step.info}
        reward = self._missing if step.reward is None else float(step.reward)
        return Reply.say(step.observation, reward=reward, done=step.done, info=info)

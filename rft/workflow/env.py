"""Runs in an environment: text observations in, text actions out, a reward for each step.

    class Guess(EnvWorkflow):
        def reset(self, task):
            self.secret = int(task.truth)
            return "Guess a digit."
        def step(self, action):
            right = action.strip() == str(self.secret)
            return Step("Right!" if right else "Wrong.", reward=float(right), done=right)

Knows no environment library (see rft.workflow.adapters).  Invariant: a step's experience names the state that the model saw.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import xxhash

from rft.types.completion import Completion
from rft.types.task import Task
from rft.workflow.turns import Message, MultiTurnWorkflow, Reply


@dataclass(frozen=True)
class Step:
    """What an action led to.  `info` holds JSON values; its `success` becomes a part of the score."""

    observation: str
    reward: float = 0.0
    done: bool = False
    info: dict[str, Any] = field(default_factory=dict)


class EnvWorkflow(MultiTurnWorkflow):
    """Base of environments: override `reset(task)` → observation and `step(action)` → Step.

    `instruction(task)` is the system message.  The reward of a run is the sum of its steps' rewards.  With `layout: steps` each row's
    info has `step_reward` and `env_state_hash` (of `state()`, by default the observation), which `gigpo` reads.
    """

    def __init__(self, **args: Any) -> None:
        super().__init__(**args)
        self._state = ""
        self._observation = ""
        self._success: float | None = None

    @staticmethod
    def gives(args: Mapping[str, Any]) -> set[str]:
        """What algorithms find in the rows."""
        return {"info.env_state_hash"} if args.get("layout") == "steps" else set()

    def reset(self, task: Task) -> Any:
        """The first observation, a text."""
        raise NotImplementedError(f"{type(self).__name__} must have a method reset(self, task) that gives the first observation")

    def step(self, action: str) -> Any:
        """What the answer's text leads to, a Step."""
        raise NotImplementedError(f"{type(self).__name__} must have a method step(self, action) that gives a Step")

    def instruction(self, task: Task) -> str:
        """What the model is told first; empty: nothing but the task's own system prompt."""
        return task.system_prompt or ""

    def state(self) -> str:
        """A text that is equal for equal states; by default what the model was shown last."""
        return self._observation

    def outcome(self) -> dict[str, float]:
        return {} if self._success is None else {"success": self._success}

    async def begin(self, task: Task) -> list[Message]:
        self._observation = await self.call(self.reset, task)
        self._state = self.state()
        told = self.instruction(task)
        system = [{"role": "system", "content": told}] if told else []
        return [*system, {"role": "user", "content": self._observation}]

    async def react(self, answer: Completion) -> Reply:
        began = self._state
        step = await self.call(self.step, answer.text)
        if not isinstance(step, Step):
            raise TypeError(f"{type(self).__name__}.step returned {type(step).__name__}; it must return a Step")
        self._observation = step.observation
        self._state = self.state()
        if "success" in step.info:
            self._success = float(step.info["success"])
        info = {"env_state_hash": xxhash.xxh3_64_hexdigest(began.encode()), **step.info}
        return Reply.say(step.observation, reward=float(step.reward), done=step.done, info=info)

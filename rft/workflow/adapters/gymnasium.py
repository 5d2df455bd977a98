"""Environments of gymnasium with a few named actions (`pip install rft-platform[gymnasium]`).

    class Blackjack(GymWorkflow):
        env_id = "Blackjack-v1"
        actions = {"stick": 0, "hit": 1}
        def describe(self, observation):
            return f"You hold {observation[0]}, the dealer shows {observation[1]}."

An answer counts as the action that it names; one that names none costs a turn and is told so.  Knows only gymnasium's API: reset(seed=),
step(action), close().  Invariant: equal rows and answers play the same, because the row's `seed` seeds the environment.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, Field

from rft.errors import SetupError
from rft.types.task import Task
from rft.workflow.env import EnvWorkflow, Step
from rft.workflow.turns import TurnArgs

_TAGGED = re.compile(r"<action>(.*?)</action>", re.DOTALL | re.IGNORECASE)


def chosen(text: str, words: Mapping[str, Any]) -> str | None:
    """The action that an answer names: inside <action> tags if there are any, else the last of `words` in it."""
    if tagged := _TAGGED.findall(text):
        text = tagged[-1]
    found = re.findall("|".join(rf"\b{re.escape(w)}\b" for w in sorted(words, key=len, reverse=True)), text, re.IGNORECASE)
    by_name = {w.lower(): w for w in words}
    return by_name[found[-1].lower()] if found else None


def gymnasium() -> Any:
    """The library.  Raises SetupError where it is not installed."""
    try:
        import gymnasium as library
    except ImportError as e:
        raise SetupError(f"this workflow needs gymnasium ({e}): pip install 'rft-platform[gymnasium]'") from e
    return library


class GymArgs(TurnArgs):
    """As TurnArgs, for environments with named actions."""

    invalid_reward: float = Field(0.0, description="reward of an answer that names no action")


class GymWorkflow(EnvWorkflow):
    """Base: give `env_id`, `actions` and `describe`; override `make` for environments that depend on the task."""

    Args: type[BaseModel] = GymArgs
    env_id: ClassVar[str] = ""
    actions: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, **args: Any) -> None:
        super().__init__(**args)
        self.env: Any = None
        self.invalid = 0

    def make(self, task: Task) -> Any:
        """The environment of a task."""
        return gymnasium().make(self.env_id)

    def describe(self, observation: Any) -> str:
        """What the model is told of an observation."""
        return str(observation)

    def succeeded(self, reward: float, terminated: bool) -> bool:
        """Whether an episode that ended with `reward` counts as a success."""
        return terminated and reward > 0

    def reward(self, reward: float) -> float:
        """What an action earns here."""
        return reward

    def instruction(self, task: Task) -> str:
        names = ", ".join(self.actions)
        return task.system_prompt or f"Choose one action in every turn and answer with its name alone: {names}."

    def reset(self, task: Task) -> str:
        self.env = self.make(task)
        seed = task.row.get("seed")
        observation, _ = self.env.reset(seed=task.index if seed is None else int(seed))
        return self._told(observation)

    def step(self, action: str) -> Step:
        name = chosen(action, self.actions)
        if name is None:
            self.invalid += 1
            return Step(
                f"That is no action. {self._seen}", reward=self.args.invalid_reward, info={"action": "", "success": False}
            )
        observation, reward, terminated, truncated, _ = self.env.step(self.actions[name])
        success = self.succeeded(float(reward), bool(terminated))
        return Step(
            self._told(observation),
            reward=self.reward(float(reward)),
            done=bool(terminated or truncated),
            info={"action": name, "success": success},
        )

    def state(self) -> str:
        return self._seen

    def counts(self) -> dict[str, float]:
        return {"invalid_actions": float(self.invalid)}

    def close(self) -> None:
        if self.env is not None:
            self.env.close()

    def _told(self, observation: Any) -> str:
        self._seen = self.describe(observation)
        return self._seen

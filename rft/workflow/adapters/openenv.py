"""Environments of OpenEnv's shape: a client with reset() and step(action), each giving (observation, reward, done), and close().

    workflow_args: {client: "my_env:MyClient", base_url: "http://127.0.0.1:8000", action: "my_env:MyAction", action_field: text}

Sync and async clients will do.  Knows no server.  Invariant: one client for each run, closed with it.
"""

from __future__ import annotations

from typing import Any

import msgspec
from pydantic import BaseModel, Field

from rft.plugins import REGISTRY
from rft.types.task import Task
from rft.workflow.env import EnvWorkflow, Step
from rft.workflow.turns import TurnArgs


class OpenEnvArgs(TurnArgs):
    """As TurnArgs; which client, and how texts become actions and observations texts."""

    client: str = Field(description="the client's class: pkg.module:Name or path/file.py:Name")
    base_url: str | None = Field(None, description="address of the environment's server; null: the client takes none")
    action: str | None = Field(None, description="the action's class; null: the text itself is the action")
    action_field: str = Field("message", description="which of the action's fields holds the answer's text")
    observation_field: str | None = Field(None, description="which of the observation's fields is shown; null: all, as JSON")
    reset_args: dict[str, Any] = Field(default_factory=dict, description="arguments of reset; a row's `seed` is added")
    instruction: str = Field("", description="system message")
    success_above: float = Field(0.0, description="a run succeeds if its last reward is above this")


class OpenEnvWorkflow(EnvWorkflow):
    """The environment's rewards."""

    Args: type[BaseModel] = OpenEnvArgs

    def __init__(self, **args: Any) -> None:
        super().__init__(**args)
        self.client: Any = None

    def instruction(self, task: Task) -> str:
        return task.system_prompt or str(self.args.instruction)

    async def reset(self, task: Task) -> str:
        cls = REGISTRY.get("environment", self.args.client).obj
        self.client = cls() if self.args.base_url is None else cls(base_url=self.args.base_url)
        seed = {"seed": int(task.row["seed"])} if "seed" in task.row else {}
        return self._text((await self.call(_of(self.client.reset, **seed, **self.args.reset_args))).observation)

    async def step(self, action: str) -> Step:
        made: Any = action
        if self.args.action is not None:
            made = REGISTRY.get("environment", self.args.action).obj(**{self.args.action_field: action})
        result = await self.call(_of(self.client.step, made))
        reward = 0.0 if result.reward is None else float(result.reward)
        done = bool(result.done)
        return Step(
            self._text(result.observation), reward=reward, done=done, info={"success": done and reward > self.args.success_above}
        )

    async def close(self) -> None:
        if self.client is not None:
            await self.call(_of(self.client.close))

    def _text(self, observation: Any) -> str:
        if isinstance(observation, str):
            return observation
        if self.args.observation_field is not None:
            return str(getattr(observation, self.args.observation_field))
        plain = observation.model_dump() if isinstance(observation, BaseModel) else getattr(observation, "__dict__", observation)
        return msgspec.json.encode(plain, enc_hook=str).decode()


def _of(method: Any, *args: Any, **kwargs: Any) -> Any:
    def ask() -> Any:
        return method(*args, **kwargs)

    return ask

"""Environments of the shape of verifiers' MultiTurnEnv and SingleTurnEnv (the classic interface, not the 1.x server).

The shape: `setup_state(state)`, `is_completed(state)` or (messages, state), `env_response(messages, state)` -> messages or (messages,
state), `rubric.score_rollout(state)`; each may be async.  `load_environment` is named as pkg.module:load_environment.
Invariant: model calls are made by the run's own context, so their tokens are kept; the environment makes none.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import msgspec
from pydantic import BaseModel, Field

from rft.errors import ConfigError
from rft.plugins import REGISTRY
from rft.types.completion import Completion
from rft.types.task import Task
from rft.workflow.turns import Message, MultiTurnWorkflow, Reply, TurnArgs


class VerifiersArgs(TurnArgs):
    """As TurnArgs; which environment."""

    env: str = Field(description="what makes the environment: pkg.module:load_environment or path/file.py:load_environment")
    env_args: dict[str, Any] = Field(default_factory=dict, description="its arguments")


class VerifiersWorkflow(MultiTurnWorkflow):
    """A row's `prompt` (text or messages), `answer` and `info` become the state; the rubric's reward is the score."""

    Args: type[BaseModel] = VerifiersArgs

    def __init__(self, **args: Any) -> None:
        super().__init__(**args)
        self.env = environment(self.args.env, msgspec.json.encode(self.args.env_args, order="sorted").decode())
        self.state: dict[str, Any] = {}
        self._parts: dict[str, float] = {}

    async def begin(self, task: Task) -> list[Message]:
        messages = task.chat()
        if (told := getattr(self.env, "system_prompt", None)) and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": told}, *messages]
        answer = task.truth if task.truth is not None else task.row.get("answer", "")
        info = task.row.get("info") or {}
        self.state = {
            "prompt": list(messages),
            "completion": [],
            "answer": answer,
            "task": task.row.get("task", "default"),
            "info": dict(info) if isinstance(info, Mapping) else info,
            "turn": 0,
            "trajectory": [],
            "responses": [],
        }
        if callable(setup := getattr(self.env, "setup_state", None)):
            self.state = (await _waited(setup(self.state))) or self.state
        return messages

    async def react(self, answer: Completion) -> Reply:
        self.state["completion"] = [*self.state["completion"], answer.message]
        self.state["turn"] += 1
        respond = getattr(self.env, "env_response", None)
        if respond is None or self.state["turn"] >= self.args.max_turns or await self._completed():
            return await self._scored_reply()
        said = await _waited(respond(self._messages(), self.state))
        if isinstance(said, tuple):
            said, self.state = said
        messages = [dict(m) for m in ([{"role": "user", "content": said}] if isinstance(said, str) else said)]
        self.state["completion"] = [*self.state["completion"], *messages]
        return await self._scored_reply() if await self._completed() else Reply(tuple(messages))

    async def leftover(self) -> float:
        return (await self._scored_reply()).reward or 0.0

    def outcome(self) -> dict[str, float]:
        return self._parts

    async def _completed(self) -> bool:
        ask = getattr(self.env, "is_completed", None)
        if ask is None:
            return False
        both = len(inspect.signature(ask).parameters) > 1
        return bool(await _waited(ask(self._messages(), self.state) if both else ask(self.state)))

    async def _scored_reply(self) -> Reply:
        result = await _waited(self.env.rubric.score_rollout(self.state))
        reward = getattr(result, "reward", None) if result is not None else None
        metrics = getattr(result, "metrics", None) if result is not None else None
        reward = self.state.get("reward") if reward is None else reward
        if reward is None:
            raise ValueError(f"{self.args.env}: its rubric gave no reward")
        self._parts = {k: float(v) for k, v in (metrics or self.state.get("metrics") or {}).items()}
        return Reply(reward=float(reward), done=True)

    def _messages(self) -> list[Message]:
        return [*self.state["prompt"], *self.state["completion"]]


@lru_cache(maxsize=16)
def environment(name: str, args: str) -> Any:
    """The environment, made once.  Raises ConfigError for what has another shape."""
    made = REGISTRY.get("environment", name).obj(**msgspec.json.decode(args))
    if not callable(getattr(getattr(made, "rubric", None), "score_rollout", None)):
        raise ConfigError(
            f"{name} gives {type(made).__name__}, which has no rubric.score_rollout; environments of verifiers 1.x run their own agents: "
            "let those call the endpoint (docs/howto/agent.md)",
            key="workflow_args.env",
        )
    return made


async def _waited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value

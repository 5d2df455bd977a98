"""Environments of other libraries as workflows: gymnasium, textarena, OpenEnv, verifiers; and any
object with the same interface.

    class Blackjack(GymWorkflow):
        env_id = "Blackjack-v1"
        actions = {"stick": 0, "hit": 1}

        def describe(self, observation):
            return f"You hold {observation[0]}, the dealer shows {observation[1]}."

Invariant: the run's own context makes all model calls, so their tokens are recorded; an environment
belongs to one run and closes with it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, ClassVar

import msgspec
from pydantic import BaseModel, Field

from rft.errors import ConfigError, SetupError
from rft.plugins import REGISTRY
from rft.reward.extract import blocks
from rft.types.completion import Completion
from rft.types.task import Task
from rft.workflow.turns import (
    EnvWorkflow,
    Message,
    MultiTurnWorkflow,
    Reply,
    Step,
    TurnArgs,
    row_seed,
    waited,
)


def chosen(text: str, words: Mapping[str, Any]) -> str | None:
    """Return an answer's action: inside <action> tags if any, else the last of `words` in it."""
    if tagged := blocks(text, "action", ignore_case=True):
        text = tagged[-1]
    mentions = re.findall(
        "|".join(rf"\b{re.escape(w)}\b" for w in sorted(words, key=len, reverse=True)),
        text,
        re.IGNORECASE,
    )
    by_name = {w.lower(): w for w in words}
    return by_name[mentions[-1].lower()] if mentions else None


def gymnasium() -> Any:
    """Import the library.  Raises SetupError if it is not installed."""
    try:
        import gymnasium as library
    except ImportError as e:
        raise SetupError(
            f"this workflow needs gymnasium ({e}): pip install 'rft-platform[gymnasium]'"
        ) from e
    return library


class GymArgs(TurnArgs):
    """TurnArgs for environments with named actions."""

    invalid_reward: float = Field(0.0, description="reward of an answer that names no action")


class GymWorkflow(EnvWorkflow):
    """Base class: define `env_id`, `actions` and `describe`; override `make` for environments that
    depend on the task.
    """

    Args: type[BaseModel] = GymArgs
    scores_itself = True
    env_id: ClassVar[str] = ""
    actions: ClassVar[Mapping[str, Any]] = {}
    env: Any = None
    invalid = 0

    def make(self, task: Task) -> Any:
        """Return the environment of a task."""
        return gymnasium().make(self.env_id)

    def describe(self, observation: Any) -> str:
        """Return the text of an observation for the model."""
        return str(observation)

    def succeeded(self, reward: float, terminated: bool) -> bool:
        """Return whether an episode that ended with `reward` is a success."""
        return terminated and reward > 0

    def reward(self, reward: float) -> float:
        """Return the run's reward for an environment's reward."""
        return reward

    def instruction(self, task: Task) -> str:
        names = ", ".join(self.actions)
        return (
            task.system_prompt
            or f"Choose one action in every turn and answer with its name alone: {names}."
        )

    def reset(self, task: Task) -> str:
        self.env = self.make(task)
        observation, _ = self.env.reset(seed=row_seed(task))
        return self._describe_and_keep(observation)

    def step(self, action: str) -> Step:
        name = chosen(action, self.actions)
        if name is None:
            self.invalid += 1
            return Step(
                f"That is no action. {self._description}",
                reward=self.args.invalid_reward,
                info={"action": "", "success": False},
            )
        observation, reward, terminated, truncated, _ = self.env.step(self.actions[name])
        success = self.succeeded(float(reward), bool(terminated))
        return Step(
            self._describe_and_keep(observation),
            reward=self.reward(float(reward)),
            done=bool(terminated or truncated),
            info={"action": name, "success": success},
        )

    def state(self) -> str:
        return self._description

    def counts(self) -> dict[str, float]:
        return {"invalid_actions": float(self.invalid)}

    def close(self) -> None:
        if self.env is not None:
            self.env.close()

    def _describe_and_keep(self, observation: Any) -> str:
        self._description = self.describe(observation)
        return self._description


class TextGameArgs(TurnArgs):
    """TurnArgs, and the game."""

    env_id: str = Field(
        description="textarena's name, e.g. GuessTheNumber-v0; or pkg.module:make, "
        "path/file.py:make of your own"
    )
    env_args: dict[str, Any] = Field(default_factory=dict, description="arguments of the game")


class TextGame(EnvWorkflow):
    """Plays a text game of textarena; the score is player 0's final reward.

    The game itself reports invalid moves.  A row's `seed` seeds it.
    """

    Args: type[BaseModel] = TextGameArgs
    blocking = True
    scores_itself = True
    observed = 0  # the first observation contains the rules
    game: Any = None
    _reward: float | None = None

    def reset(self, task: Task) -> str:
        self.game = _maker(self.args.env_id)(**self.args.env_args)
        self.game.reset(num_players=1, seed=row_seed(task))
        return self._observed()

    def step(self, action: str) -> Step:
        done, info = self.game.step(action)
        if not done:
            return Step(self._observed(), reward=0.0, info={"success": False})
        reward = self._closed()
        return Step(
            str((info or {}).get("reason", "The game is over.")),
            reward=reward,
            done=True,
            info={"success": reward > 0},
        )

    def leftover(self) -> float:
        return self._closed()

    def close(self) -> None:
        if self.game is not None:
            self._closed()

    def _observed(self) -> str:
        player, observations = self.game.get_observation()
        if player != 0:
            raise ValueError(
                f"{self.args.env_id} is for {player + 1} players or more; only games for one are "
                f"played"
            )
        if isinstance(observations, str):
            return observations
        lines = [
            str(m[1]) if isinstance(m, tuple) else str(m)
            for m in observations
            if not (isinstance(m, tuple) and m[0] == player)
        ]
        # the conversation already has the player's own messages
        return "\n".join(lines) or "Your turn."

    def _closed(self) -> float:
        """Return the reward, requested only once."""
        if self._reward is None:
            ended = self.game.close()
            rewards = ended[0] if isinstance(ended, tuple) else ended
            self._reward = float((rewards or {}).get(0, 0.0))
        return self._reward


def _maker(name: str) -> Callable[..., Any]:
    if ":" in name:
        maker: Callable[..., Any] = REGISTRY.get("game", name).obj
        return maker
    try:
        import textarena
    except ImportError as e:
        raise SetupError(
            f"{name} is a game of textarena, which is not installed ({e}): pip install "
            f"'rft-platform[textarena]'"
        ) from e
    # without -raw the game repeats all earlier turns in every turn
    raw = name if name.endswith(("-raw", "-train")) else f"{name}-raw"
    return lambda **args: textarena.make(env_id=raw, **args)


class OpenEnvArgs(TurnArgs):
    """TurnArgs, the client, and the conversion of texts to actions and of observations to texts."""

    client: str = Field(description="the client's class: pkg.module:Name or path/file.py:Name")
    base_url: str | None = Field(
        None, description="address of the environment's server; null: the client takes none"
    )
    action: str | None = Field(
        None, description="the action's class; null: the text itself is the action"
    )
    action_field: str = Field(
        "message", description="which of the action's fields holds the answer's text"
    )
    observation_field: str | None = Field(
        None, description="which of the observation's fields is shown; null: all, as JSON"
    )
    reset_args: dict[str, Any] = Field(
        default_factory=dict, description="arguments of reset; a row's `seed` comes before theirs"
    )
    instruction: str = Field("", description="system message")
    success_above: float = Field(0.0, description="a run succeeds if its last reward is above this")


class OpenEnvWorkflow(EnvWorkflow):
    """Plays an OpenEnv environment; the environment gives the rewards."""

    Args: type[BaseModel] = OpenEnvArgs
    scores_itself = True
    client: Any = None

    def instruction(self, task: Task) -> str:
        return task.system_prompt or str(self.args.instruction)

    async def reset(self, task: Task) -> str:
        cls = REGISTRY.get("environment", self.args.client).obj
        self.client = cls() if self.args.base_url is None else cls(base_url=self.args.base_url)
        seed = {} if task.row.get("seed") is None else {"seed": row_seed(task)}
        return self._text(
            (await self.call(self.client.reset, **{**self.args.reset_args, **seed})).observation
        )

    async def step(self, action: str) -> Step:
        typed_action: Any = action
        if self.args.action is not None:
            typed_action = REGISTRY.get("environment", self.args.action).obj(
                **{self.args.action_field: action}
            )
        result = await self.call(self.client.step, typed_action)
        reward = 0.0 if result.reward is None else float(result.reward)
        done = bool(result.done)
        return Step(
            self._text(result.observation),
            reward=reward,
            done=done,
            info={"success": done and reward > self.args.success_above},
        )

    async def close(self) -> None:
        if self.client is not None:
            await self.call(self.client.close)

    def _text(self, observation: Any) -> str:
        if isinstance(observation, str):
            return observation
        if (field := self.args.observation_field) is not None:
            is_mapping = isinstance(observation, Mapping)  # of OpenEnv's generic client
            return str(observation[field] if is_mapping else getattr(observation, field))
        encodable = (
            observation.model_dump()
            if isinstance(observation, BaseModel)
            else getattr(observation, "__dict__", observation)
        )
        return msgspec.json.encode(encodable, enc_hook=str).decode()


class VerifiersArgs(TurnArgs):
    """TurnArgs, and the environment."""

    env: str = Field(
        description="what makes the environment: pkg.module:load_environment or "
        "path/file.py:load_environment"
    )
    env_args: dict[str, Any] = Field(default_factory=dict, description="its arguments")


class VerifiersWorkflow(MultiTurnWorkflow):
    """Plays an environment of verifiers; the rubric's reward is the score.

    A row's `prompt` (text or messages), `answer` and `info` become the state.
    """

    Args: type[BaseModel] = VerifiersArgs
    scores_itself = True

    def __init__(self, **args: Any) -> None:
        super().__init__(**args)
        self.env = environment(
            self.args.env, msgspec.json.encode(self.args.env_args, order="sorted").decode()
        )
        self.state: dict[str, Any] = {}
        self._parts: dict[str, float] = {}

    async def begin(self, task: Task) -> list[Message]:
        messages = task.chat()
        if (system_prompt := getattr(self.env, "system_prompt", None)) and messages[0][
            "role"
        ] != "system":
            messages = [{"role": "system", "content": system_prompt}, *messages]
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
            self.state = (await waited(setup(self.state))) or self.state
        return messages

    async def react(self, answer: Completion) -> Reply:
        self.state["completion"] = [*self.state["completion"], answer.message]
        self.state["turn"] += 1
        respond = getattr(self.env, "env_response", None)
        if respond is None or self.state["turn"] >= self.args.max_turns or await self._completed():
            return await self._scored_reply()
        response = await waited(respond(self._messages(), self.state))
        if isinstance(response, tuple):
            response, self.state = response
        messages = [
            dict(m)
            for m in (
                [{"role": "user", "content": response}] if isinstance(response, str) else response
            )
        ]
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
        return bool(await waited(ask(self._messages(), self.state) if both else ask(self.state)))

    async def _scored_reply(self) -> Reply:
        result = await waited(self.env.rubric.score_rollout(self.state))
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
    """Return the environment, built once.  Raises ConfigError for another interface."""
    environment = REGISTRY.get("environment", name).obj(**msgspec.json.decode(args))
    if not callable(getattr(getattr(environment, "rubric", None), "score_rollout", None)):
        raise ConfigError(
            f"{name} gives {type(environment).__name__}, which has no rubric.score_rollout; environments "
            "of verifiers v1 run their own agents: use agent_command_workflow, as in examples/verifiers",
            key="workflow_args.env",
        )
    return environment

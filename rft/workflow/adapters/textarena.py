"""Text games of textarena (`pip install 'rft-platform[textarena]'`), for one player; and any object of that shape.

The shape: reset(num_players=, seed=), get_observation() -> (player, text or list of messages), step(text) -> (done, info),
close() -> (rewards by player, info).  Invariant: a run plays player 0 and nobody else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, Field

from rft.errors import SetupError
from rft.plugins import REGISTRY
from rft.types.task import Task
from rft.workflow.env import EnvWorkflow, Step
from rft.workflow.turns import TurnArgs


class TextGameArgs(TurnArgs):
    """As TurnArgs; which game."""

    env_id: str = Field(description="textarena's name, e.g. GuessTheNumber-v0; or pkg.module:make, path/file.py:make of your own")
    env_args: dict[str, Any] = Field(default_factory=dict, description="arguments of the game")


class TextGame(EnvWorkflow):
    """The game's reward of player 0 in the end; an invalid move is told by the game itself.  A row's `seed` seeds it."""

    Args: type[BaseModel] = TextGameArgs
    blocking = True

    def __init__(self, **args: Any) -> None:
        super().__init__(**args)
        self.game: Any = None
        self._reward: float | None = None

    def reset(self, task: Task) -> str:
        self.game = _maker(self.args.env_id)(**self.args.env_args)
        self.game.reset(num_players=1, seed=int(task.row.get("seed", task.index)))
        return self._observed()

    def step(self, action: str) -> Step:
        done, info = self.game.step(action)
        if not done:
            return Step(self._observed(), info={"success": False})
        reward = self._closed()
        return Step(str((info or {}).get("reason", "The game is over.")), reward=reward, done=True, info={"success": reward > 0})

    def leftover(self) -> float:
        return self._closed()

    def close(self) -> None:
        if self.game is not None:
            self._closed()

    def _observed(self) -> str:
        player, seen = self.game.get_observation()
        if player != 0:
            raise ValueError(f"{self.args.env_id} is for {player + 1} players or more; only games for one are played")
        if isinstance(seen, str):
            return seen
        told = [str(m[1]) if isinstance(m, tuple) else str(m) for m in seen if not (isinstance(m, tuple) and m[0] == player)]
        return "\n".join(told) or "Your turn."  # what the player said itself is in the conversation already

    def _closed(self) -> float:
        """The reward, asked once."""
        if self._reward is None:
            ended = self.game.close()
            rewards = ended[0] if isinstance(ended, tuple) else ended
            self._reward = float((rewards or {}).get(0, 0.0))
        return self._reward


def _maker(name: str) -> Callable[..., Any]:
    if ":" in name:
        found: Callable[..., Any] = REGISTRY.get("game", name).obj
        return found
    try:
        import textarena
    except ImportError as e:
        raise SetupError(
            f"{name} is a game of textarena, which is not installed ({e}): pip install 'rft-platform[textarena]'"
        ) from e
    raw = (
        name if name.endswith(("-raw", "-train")) else f"{name}-raw"
    )  # the plain name says all earlier turns again in every turn
    return lambda **args: textarena.make(env_id=raw, **args)

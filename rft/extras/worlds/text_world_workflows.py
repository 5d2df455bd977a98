"""Worlds of text: TextWorld's games, ALFWorld's households and ScienceWorld's experiments.

explorer_input:
  taskset: {path: games.jsonl, default_workflow_type: textworld_workflow}                # {"game_file": "games/one.z8"}
  taskset: {path: games.jsonl, default_workflow_type: alfworld_workflow}                 # {"game_file": ".../game.tw-pddl"}
  taskset: {path: experiments.jsonl, default_workflow_type: sciworld_workflow}           # {"task_name": "boil", "var_num": 0}

The model thinks and writes one command in <action>...</action>.  step_wise_alfworld_workflow is
alfworld_workflow with `layout: steps`.
"""

import atexit
import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, Field

from rft import EnvWorkflow, Step, Task, TurnArgs, register
from rft.reward.extract import blocks


class WorldArgs(TurnArgs):
    """TurnArgs, and the reward of a run that does not end in time."""

    max_turns: int = Field(30, ge=1, description="commands at most")
    max_env_steps: int | None = Field(None, ge=1, description="Trinity-RFT's name of max_turns")
    max_turn_tokens: int | None = Field(512, ge=1, description="tokens of one answer at most")
    unfinished_reward: float = Field(
        0.0, description="reward, in the end, of a run that the last turn ended"
    )

    def model_post_init(self, _: Any) -> None:
        if self.max_env_steps is not None:
            object.__setattr__(self, "max_turns", self.max_env_steps)


class World(EnvWorkflow):
    """Base class: `start` returns the first observation, `act` the result of a command as
    (observation, score so far in [0, 1], over).
    """

    Args: type[BaseModel] = WorldArgs
    blocking = True
    scores_itself = True
    role: ClassVar[str] = "You play a game of text."
    commands: ClassVar[str] = ""

    def __init__(self, **args: Any) -> None:
        super().__init__(**args)
        self._score = 0.0
        self._over = False

    def start(self, task: Task) -> str:
        raise NotImplementedError

    def act(self, command: str) -> tuple[str, float, bool]:
        raise NotImplementedError

    def instruction(self, task: Task) -> str:
        rules = (
            f"{self.role} In every turn think first, inside <think>...</think>, then write one "
            f"command inside <action>...</action>."
        )
        return task.system_prompt or f"{rules}{self.commands}"

    def reset(self, task: Task) -> str:
        return f"Observation: {self.start(task)}"

    def step(self, action: str) -> Step:
        actions = blocks(action, "action", ignore_case=True)
        if not actions:
            return Step(
                "Observation: That is no command; write one inside <action>...</action>.",
                reward=0.0,
            )
        observation, score, self._over = self.act(actions[-1].strip())
        earned = score - self._score
        self._score = score
        info = {"action": actions[-1].strip()[:200], "success": score >= 1.0}
        return Step(f"Observation: {observation}", reward=earned, done=self._over, info=info)

    def leftover(self) -> float:
        return 0.0 if self._over or self._score else float(self.args.unfinished_reward)


@register.workflow("textworld_workflow", args=WorldArgs)
class TextWorld(World):
    """Plays a game of TextWorld; the score is the reached share of the game's points.

    A row's `game_file`, or its prompt, names the game (.z8, .ulx, .tw-pddl).
    """

    needs: ClassVar[Mapping[str, str]] = {"textworld": "textworld"}
    wrappers: ClassVar[tuple[str, ...]] = ()

    def start(self, task: Task) -> str:
        import textworld

        path = Path(str(task.row.get("game_file") or task.prompt)).expanduser()
        if not path.is_file():
            raise ValueError(f"task {task.taskset}[{task.index}]: there is no game {path}")
        infos = textworld.EnvInfos(
            description=True, admissible_commands=True, max_score=True, score=True, won=True
        )
        self.game = textworld.start(str(path), infos, wrappers=self.made_wrappers())
        return str(self.game.reset().feedback).strip()

    def made_wrappers(self) -> list[Any]:
        return []

    def act(self, command: str) -> tuple[str, float, bool]:
        state, score, done = self.game.step(command)
        share = 1.0 if state.get("won") else float(score or 0) / (state.get("max_score") or 1)
        return str(state.feedback).strip(), share, bool(done)

    def close(self) -> None:
        if (game := vars(self).get("game")) is not None:  # None if it could not be built
            game.close()


class AlfWorldArgs(WorldArgs):
    """WorldArgs with Trinity-RFT's reward of an unfinished run."""

    unfinished_reward: float = Field(
        -0.1, description="reward, in the end, of a run that the last turn ended"
    )


class AlfWorldStepsArgs(AlfWorldArgs):
    """AlfWorldArgs with one row per call."""

    layout: Literal["joined", "steps"] = "steps"


@register.workflow("alfworld_workflow", args=AlfWorldArgs)
class AlfWorld(TextWorld):
    """The score is 1 for a finished household task, -0.1 for an unfinished one."""

    Args: type[BaseModel] = AlfWorldArgs
    needs: ClassVar[Mapping[str, str]] = {"alfworld": "alfworld"}
    role = "You act in a household of text."
    commands = (
        " Commands: look, inventory, go to R, open R, close R, take O from R, move O to R, examine "
        "X, use O, heat O with R, clean O with "
        "R, cool O with R, slice O with O; R is a receptacle such as cabinet 1, O an object such "
        "as mug 2. You can hold one object."
    )

    def made_wrappers(self) -> list[Any]:
        from alfworld.agents.environment.alfred_tw_env import AlfredDemangler

        return [AlfredDemangler()]


# Trinity-RFT's name; algorithm raft trains successful runs
register.workflow("RAFT_alfworld_workflow", args=AlfWorldArgs)(AlfWorld)


@register.workflow("step_wise_alfworld_workflow", args=AlfWorldStepsArgs)
class AlfWorldSteps(AlfWorld):
    """alfworld_workflow with one row per call and the reward of the run.

    Advantage gigpo compares the rows by state.
    """

    Args: type[BaseModel] = AlfWorldStepsArgs

    @staticmethod
    def gives(args: Mapping[str, Any]) -> set[str]:
        return {"info.env_state_hash"} if args.get("layout", "steps") == "steps" else set()


# ScienceWorld's idle simulators: each is a Java program that takes seconds to start
_IDLE: list[Any] = []
_LOCK = threading.Lock()


@atexit.register
def _close_idle() -> None:
    while _IDLE:
        _IDLE.pop().close()


class SciWorldArgs(WorldArgs):
    """WorldArgs, and ScienceWorld's simplifications."""

    simplification: str = Field(
        "easy", description="ScienceWorld's, e.g. easy, or teleportAction,openDoors; empty: none"
    )


@register.workflow("sciworld_workflow", args=SciWorldArgs)
class SciWorld(World):
    """Does an experiment of ScienceWorld; the score is its best so far, as a share of 100.

    A row has `task_name` and `var_num`, or its prompt contains them as JSON.
    """

    Args: type[BaseModel] = SciWorldArgs
    needs: ClassVar[Mapping[str, str]] = {"scienceworld": "scienceworld"}
    role = "You do an experiment in a world of text."
    commands = (
        " Commands: open X, close X, activate X, deactivate X, connect X to Y, disconnect X, use X "
        "on Y, look around, examine X, "
        "look at X, read X, move X to Y, pick up X, pour X into Y, mix X, teleport to PLACE, focus "
        "on X, wait, wait1."
    )
    env: Any = None

    def start(self, task: Task) -> str:
        from scienceworld import ScienceWorldEnv

        row = task.row if "task_name" in task.row else json.loads(str(task.prompt))
        with _LOCK:
            env = _IDLE.pop() if _IDLE else None
        if env is None:
            env = ScienceWorldEnv("", envStepLimit=10_000)  # this workflow counts turns
        env.load(str(row["task_name"]), int(row.get("var_num", 0)), self.args.simplification)
        observation, info = env.reset()
        self.env = env
        return f"{info['taskDesc'].strip()}\n{observation.strip()}"

    def act(self, command: str) -> tuple[str, float, bool]:
        env = self.env  # no other run gets the simulator of an aborted run
        self.env = None
        observation, _, done, info = env.step(command)
        self.env = env
        return str(observation).strip(), max(self._score, info["score"] / 100), bool(done)

    def close(self) -> None:
        if self.env is not None:
            with _LOCK:
                _IDLE.append(self.env)
            self.env = None

"""From the names in a task to the things that play and score it, each built once per name and arguments."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rft.errors import ConfigError, SetupError
from rft.plugins import REGISTRY, Plugin, checked_args
from rft.reward.base import Reward
from rft.reward.build import build as build_reward
from rft.types.ports import ChatModel
from rft.types.task import Task
from rft.workflow import known
from rft.workflow.base import NO_MODELS, Workflow
from rft.workflow.isolated import Place


@dataclass(frozen=True)
class Recipe:
    """How tasks of one kind are played: `make()` gives a fresh workflow object for one run."""

    name: str
    make: Callable[[], Workflow]
    blocking: bool  # `run` is an ordinary function
    reward: Reward | None
    place: Place | None = None  # where its runs are forked, if the class says `isolated`
    keywords: Mapping[str, Any] = field(default_factory=dict)  # of its constructor
    plays_group: bool = False  # it has `run_group(task, contexts)`: one object plays all runs of a task

    @property
    def scores_group(self) -> bool:
        """Whether the reward sees all runs of a task at once."""
        return bool(getattr(self.reward, "whole_group", False))


class Recipes:
    """Finds workflow and reward of a task by name and checks their arguments.  Plugins must be loaded."""

    def __init__(self) -> None:
        self._built: dict[bytes, Recipe] = {}
        self._ready: dict[int, tuple[Reward, asyncio.Future[None]]] = {}
        self._models: Mapping[str, ChatModel] = NO_MODELS

    async def prepare(self, models: Mapping[str, ChatModel]) -> None:
        """Hands the auxiliary models to every reward that asks for them (`async def prepare(models)`)."""
        self._models = models
        for recipe in list(self._built.values()):
            await self._prepare(recipe)

    async def get(self, task: Task) -> Recipe:
        """As `of`, with its reward prepared."""
        recipe = self.of(task)
        await self._prepare(recipe)
        return recipe

    async def _prepare(self, recipe: Recipe) -> None:
        reward = recipe.reward
        if reward is None or not callable(prepare := getattr(reward, "prepare", None)):
            return
        if (ready := self._ready.get(id(reward))) is None:
            ready = self._ready[id(reward)] = (reward, asyncio.ensure_future(prepare(self._models)))
        await asyncio.shield(ready[1])

    async def close(self) -> None:
        """Closes the rewards that were prepared, last first, and the processes that isolated runs are forked from."""
        for recipe in self._built.values():
            if recipe.place is not None:
                recipe.place.close()
        while self._ready:
            _, (reward, _) = self._ready.popitem()
            if callable(close := getattr(reward, "close", None)):
                await close()

    def of(self, task: Task) -> Recipe:
        """Raises PluginError for an unknown name, ConfigError for arguments that do not fit."""
        key = msgspec.msgpack.encode((task.workflow, task.workflow_args, task.reward, task.reward_args))
        if (found := self._built.get(key)) is None:
            found = self._built[key] = _build(task)
        return found


def _build(task: Task) -> Recipe:
    reward = None
    if task.reward is not None:
        reward = build_reward(task.reward, task.reward_args, key=f"taskset {task.taskset}.reward_fn_args")
    if (why := known.advice(task.workflow)) and task.workflow not in REGISTRY.names("workflow"):
        raise ConfigError(f"workflow {task.workflow!r}: {why}", key=f"taskset {task.taskset}.workflow", given=task.workflow)
    return recipe(REGISTRY.get("workflow", task.workflow), task, reward)


def refuse_group_reward(recipe: Recipe, task: Task) -> None:
    """Raises ConfigError for a reward that sees all runs of a task: that of a greedy run, alone in its group, is not comparable."""
    if recipe.scores_group:
        raise ConfigError(
            "this algorithm takes the reward of a greedy run from those of a task's other runs, and this reward sees all runs of a task "
            "at once; use one that scores each run alone, or algorithm_type: rloo, whose baseline comes from the other runs",
            key=f"taskset {task.taskset}.default_reward_fn_type",
            given=task.reward,
        )


def recipe(plugin: Plugin, task: Task, reward: Reward | None) -> Recipe:
    """How `task` is played by this workflow and scored by this reward.

    Raises ConfigError for arguments that do not fit, SetupError where a library of the class's `needs` (by the extra that brings it) is
    not installed.
    """
    where = f"taskset {task.taskset}"
    cls: Any = plugin.obj
    a_class = inspect.isclass(cls)
    plays_group = callable(getattr(cls, "run_group", None))
    if not a_class or not (plays_group or callable(getattr(cls, "run", None))):
        raise ConfigError(
            f"workflow {task.workflow!r} must be a class with a method run(self, task, ctx)", key=f"{where}.workflow"
        )
    for library, extra in getattr(cls, "needs", {}).items():
        if importlib.util.find_spec(library) is None:
            raise SetupError(f"workflow {task.workflow} needs {library}: pip install 'rft-platform[{extra}]'")
    keywords = checked_args(plugin, task.workflow_args, key=f"{where}.workflow_args")
    blocking = not inspect.iscoroutinefunction(cls.run_group if plays_group else cls.run)
    wanted = getattr(cls, "isolated", False)
    place = None if wanted is False else Place(cls, wanted, key=f"{where}.workflow")
    return Recipe(
        task.workflow, lambda: cls(**keywords), blocking, reward, place=place, keywords=keywords, plays_group=plays_group
    )

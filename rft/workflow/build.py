"""From the names in a task to the things that play and score it, each built once per name and arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from rft.errors import ConfigError
from rft.plugins import REGISTRY, checked_args
from rft.reward.base import Reward
from rft.reward.build import build as build_reward
from rft.types.task import Task
from rft.workflow.base import Workflow


@dataclass(frozen=True)
class Recipe:
    """How tasks of one kind are played: `make()` gives a fresh workflow object for one run."""

    name: str
    make: Callable[[], Workflow]
    blocking: bool  # `run` is an ordinary function
    reward: Reward | None


class Recipes:
    """Finds workflow and reward of a task by name and checks their arguments.  Plugins must be loaded."""

    def __init__(self) -> None:
        self._built: dict[bytes, Recipe] = {}

    def of(self, task: Task) -> Recipe:
        """Raises PluginError for an unknown name, ConfigError for arguments that do not fit."""
        key = msgspec.msgpack.encode((task.workflow, task.workflow_args, task.reward, task.reward_args))
        if (found := self._built.get(key)) is None:
            found = self._built[key] = _build(task)
        return found


def _build(task: Task) -> Recipe:
    where = f"taskset {task.taskset}"
    plugin = REGISTRY.get("workflow", task.workflow)
    if not inspect.isclass(plugin.obj) or not callable(getattr(plugin.obj, "run", None)):
        raise ConfigError(
            f"workflow {task.workflow!r} must be a class with a method run(self, task, ctx)", key=f"{where}.workflow"
        )
    cls: Any = plugin.obj
    keywords = checked_args(plugin, task.workflow_args, key=f"{where}.workflow_args")
    reward = None if task.reward is None else build_reward(task.reward, task.reward_args, key=f"{where}.reward_fn_args")
    return Recipe(task.workflow, lambda: cls(**keywords), not inspect.iscoroutinefunction(cls.run), reward)

"""Build workflow and reward from the names in a task, once per name and arguments."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rft.errors import ConfigError, SetupError
from rft.plugins import REGISTRY, Plugin, check_call, checked_args, derived, refused_names
from rft.reward.base import Reward, hook
from rft.reward.build_reward import build as build_reward
from rft.types.ports import ChatModel
from rft.types.task import Task
from rft.workflow.base import NO_MODELS, Workflow
from rft.workflow.isolated import IsolatedRuns

TEACHER = "teacher_logprobs"
GIVES: dict[str, str] = {
    TEACHER: "on_policy_distill_workflow, or a workflow that calls ctx.teach(name)",
    "info.env_state_hash": "an environment and workflow_args.layout: steps "
    "(docs/howto/environment.md)",
}
"""Fields that only some algorithms read, and the workflows that write them."""


@dataclass(frozen=True)
class Recipe:
    """Workflow and reward for tasks of one kind: `make()` returns a new workflow object."""

    name: str
    make: Callable[[], Workflow]
    blocking: bool  # `run` is an ordinary function
    reward: Reward | None
    isolation: IsolatedRuns | None = None  # plays the runs of a class that is `isolated`
    keywords: Mapping[str, Any] = field(default_factory=dict)  # of the constructor
    # the class has `run_group`: one object plays all runs of a task
    plays_group: bool = False
    scores_itself: bool = False  # the reward is never used
    needs_reward: bool = False  # nothing else scores a run

    @property
    def scores_group(self) -> bool:
        """Whether the reward sees all runs of a task at once."""
        return self.reward is not None and self.reward.whole_group


class Recipes:
    """Finds workflow and reward of a task by name and checks their arguments.  Plugins must be
    loaded.
    """

    def __init__(self) -> None:
        self._built: dict[bytes, Recipe] = {}
        self._ready: dict[int, tuple[Reward, asyncio.Future[None]]] = {}
        self._models: Mapping[str, ChatModel] = NO_MODELS

    async def prepare(self, models: Mapping[str, ChatModel]) -> None:
        """Call the hook `prepare(models)` of every reward with the auxiliary models."""
        self._models = models
        for recipe in list(self._built.values()):
            await self._prepare(recipe)

    async def get(self, task: Task) -> Recipe:
        """Return the recipe of a task with its reward prepared."""
        recipe = self.find(task)
        await self._prepare(recipe)
        return recipe

    async def _prepare(self, recipe: Recipe) -> None:
        if (reward := recipe.reward) is None:
            return
        if (ready := self._ready.get(id(reward))) is None:
            ready = self._ready[id(reward)] = (
                reward,
                asyncio.ensure_future(hook(reward.prepare, self._models)),
            )
        await asyncio.shield(ready[1])

    async def close(self) -> None:
        """Close the prepared rewards, last first, and the servers of isolated runs."""
        for recipe in self._built.values():
            if recipe.isolation is not None:
                recipe.isolation.close()
        while self._ready:
            _, (reward, _) = self._ready.popitem()
            await hook(reward.close)

    def find(self, task: Task) -> Recipe:
        """Return the recipe of a task, with an unprepared reward.  Raises PluginError for an
        unknown name, ConfigError for invalid arguments.
        """
        key = msgspec.msgpack.encode(
            (task.workflow, task.workflow_args, task.reward, task.reward_args)
        )
        recipe = self._built.get(key)
        if recipe is None:
            recipe = self._built[key] = _build(task)
        return recipe


def _build(task: Task) -> Recipe:
    reason = refused_names("workflow").get(task.workflow)
    if reason and task.workflow not in REGISTRY.names("workflow"):
        raise ConfigError(
            f"workflow {task.workflow!r}: {reason}",
            key=f"taskset {task.taskset}.workflow",
            given=task.workflow,
        )
    plugin = REGISTRY.get("workflow", task.workflow)
    cls = workflow_class(plugin, key=f"taskset {task.taskset}.workflow")
    reward_name = task.reward
    args = task.reward_args
    if reward_name is None and cls.usual_reward is not None:
        reward_name = cls.usual_reward
        args = {**cls.usual_reward_args, **args}
    reward = None
    if reward_name is not None:
        reward = build_reward(reward_name, args, key=f"taskset {task.taskset}.reward_fn_args")
    return recipe(plugin, task, reward)


def refuse_group_reward(recipe: Recipe, task: Task) -> None:
    """Raise ConfigError for a reward that sees all runs of a task: it cannot score the single
    greedy run.
    """
    if recipe.scores_group:
        raise ConfigError(
            "this algorithm takes the reward of a greedy run from those of a task's other runs, "
            "and this reward sees all runs of a task "
            "at once; use one that scores each run alone, or algorithm_type: rloo, whose baseline "
            "comes from the other runs",
            key=f"taskset {task.taskset}.default_reward_fn_type",
            given=task.reward,
        )


def refuse_unused_reward(recipe: Recipe, task: Task) -> None:
    """Raise ConfigError for a reward that is unused because the workflow scores every run itself."""
    if recipe.scores_itself and recipe.reward is not None:
        raise ConfigError(
            f"workflow {recipe.name!r} scores its runs itself, so this reward would never be used; "
            f"leave it out, or use a workflow that "
            "returns no score",
            key=f"taskset {task.taskset}.default_reward_fn_type",
            given=task.reward,
        )


def refuse_missing_reward(recipe: Recipe, task: Task) -> None:
    """Raise ConfigError where nothing would score a run."""
    if recipe.needs_reward and recipe.reward is None:
        raise ConfigError(
            f"workflow {recipe.name!r} gives no score, and no reward is named: every run would "
            f"fail.  Name one, such as exact_answer or path/file.py:function; data of veRL name "
            f"theirs with format.preset: verl",
            key=f"taskset {task.taskset}.default_reward_fn_type",
        )


def workflow_class(plugin: Plugin, *, key: str = "") -> type[Workflow]:
    """Return the plugin's class, derived from Workflow.  Raises ConfigError without run and
    run_group.
    """
    cls = derived(plugin.obj, Workflow) if inspect.isclass(plugin.obj) else Workflow
    if cls.run is Workflow.run and cls.run_group is Workflow.run_group:
        raise ConfigError(
            f"workflow {plugin.name!r} must be a class with a method run(self, task, ctx)", key=key
        )
    for method in filter(
        inspect.isfunction, (inspect.getattr_static(cls, name) for name in ("run", "run_group"))
    ):
        signature = inspect.signature(method)
        try:
            signature.bind("self", "task", "ctx")
        except TypeError:
            raise ConfigError(
                f"workflow {plugin.name!r}: {method.__name__}{signature} must take (self, task, ctx)",
                key=key,
            ) from None
    return cls


def recipe(plugin: Plugin, task: Task, reward: Reward | None) -> Recipe:
    """Build the recipe of a task from its workflow and reward.

    Raises ConfigError for invalid arguments, SetupError naming the extra if a library of the
    class's `needs` is not installed.
    """
    where = f"taskset {task.taskset}"
    cls = workflow_class(plugin, key=f"{where}.workflow")
    for library, extra in cls.needs.items():
        if importlib.util.find_spec(library) is None:
            raise SetupError(
                f"workflow {task.workflow} needs {library}: pip install 'rft-platform[{extra}]'"
            )
    keywords = checked_args(plugin, task.workflow_args, key=f"{where}.workflow_args")
    check_call(plugin, keywords, key=f"{where}.workflow_args")
    plays_group = cls.run_group is not Workflow.run_group
    blocking = not inspect.iscoroutinefunction(cls.run_group if plays_group else cls.run)
    isolation = None
    if cls.isolated is not False:
        isolation = IsolatedRuns(plugin.obj, cls.isolated, key=f"{where}.workflow")
    return Recipe(
        task.workflow,
        lambda: cls(**keywords),
        blocking,
        reward,
        isolation=isolation,
        keywords=keywords,
        plays_group=plays_group,
        scores_itself=cls.scores_itself,
        needs_reward=cls.needs_reward and _first(cls, "needs_reward") <= _first(cls, "run"),
    )


def _first(cls: type, name: str) -> int:
    """The place in its order of bases of the class that has this attribute."""
    return next(i for i, base in enumerate(cls.__mro__) if name in vars(base))

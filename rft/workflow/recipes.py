"""From the names in a task to the things that play and score it, each built once per name and
arguments.

`INSTEAD`: workflows that are known by name elsewhere and not offered, with what to use instead;
none of these names is registered.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rft.errors import ConfigError, SetupError
from rft.plugins import REGISTRY, Plugin, check_call, checked_args, derived
from rft.reward.base import Reward, hook
from rft.reward.build_reward import build as build_reward
from rft.types.ports import ChatModel
from rft.types.task import Task
from rft.workflow.base import NO_MODELS, Workflow
from rft.workflow.isolated import Place

_AGENT = (
    "agents run against an OpenAI endpoint: use react_agent_workflow, or "
    "agent_command_workflow for a program (docs/howto/agent.md)"
)
_WORLD = (
    "its simulator is not part of this package: derive from EnvWorkflow with its reset and "
    "step (docs/howto/environment.md)"
)
_TEXT = "images and videos are not offered: use text"

INSTEAD: dict[str, str] = {
    **dict.fromkeys(("agentscope_workflow_adapter", "agentscope_workflow_adapter_v1"), _AGENT),
    "agentscope_v1_react_search_workflow": "it asks a search service: name that tool in an MCP "
    "file and use tool_workflow",
    "webshop_workflow": _WORLD,
    "RAFT_reflect_alfworld_workflow": "it trains answers behind another prompt than theirs: use "
    "alfworld_workflow with algorithm_type raft",
    "intercode_sql_workflow": "it needs containers: use sql_workflow, which keeps its databases in "
    "SQLite",
    "rubric_judge_openai_workflow": "use rubric_judge_workflow, and name the judge in "
    "explorer.auxiliary_models with engine_type: external",
    **dict.fromkeys(("simple_mm_workflow", "async_simple_mm_workflow"), _TEXT),
    "harbor_workflow": "its task packages need containers: play them with agent_command_workflow "
    "or a workflow of your own",
}

TEACHER = "teacher_logprobs"
GIVES: dict[str, str] = {
    TEACHER: "on_policy_distill_workflow, or a workflow that calls ctx.teach(name)",
    "info.env_state_hash": "an environment and workflow_args.layout: steps "
    "(docs/howto/environment.md)",
}
"""Who writes what only some algorithms read."""


@dataclass(frozen=True)
class Recipe:
    """How tasks of one kind are played: `make()` gives a fresh workflow object for one run."""

    name: str
    make: Callable[[], Workflow]
    blocking: bool  # `run` is an ordinary function
    reward: Reward | None
    place: Place | None = None  # where its runs are forked, if the class says `isolated`
    keywords: Mapping[str, Any] = field(default_factory=dict)  # of its constructor
    # it has `run_group(task, contexts)`: one object plays all runs of a task
    plays_group: bool = False
    scores_itself: bool = False  # the reward is never used

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
        """Hands the auxiliary models to every reward that asks for them (`async def
        prepare(models)`).
        """
        self._models = models
        for recipe in list(self._built.values()):
            await self._prepare(recipe)

    async def get(self, task: Task) -> Recipe:
        """As `of`, with its reward prepared."""
        recipe = self.of(task)
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
        """Closes the rewards that were prepared, last first, and the processes that isolated runs
        are forked from.
        """
        for recipe in self._built.values():
            if recipe.place is not None:
                recipe.place.close()
        while self._ready:
            _, (reward, _) = self._ready.popitem()
            await hook(reward.close)

    def of(self, task: Task) -> Recipe:
        """Raises PluginError for an unknown name, ConfigError for arguments that do not fit."""
        key = msgspec.msgpack.encode(
            (task.workflow, task.workflow_args, task.reward, task.reward_args)
        )
        if (found := self._built.get(key)) is None:
            found = self._built[key] = _build(task)
        return found


def _build(task: Task) -> Recipe:
    if (why := INSTEAD.get(task.workflow)) and task.workflow not in REGISTRY.names("workflow"):
        raise ConfigError(
            f"workflow {task.workflow!r}: {why}",
            key=f"taskset {task.taskset}.workflow",
            given=task.workflow,
        )
    plugin = REGISTRY.get("workflow", task.workflow)
    cls = workflow_class(plugin, key=f"taskset {task.taskset}.workflow")
    named = task.reward
    args = task.reward_args
    if named is None and cls.usual_reward is not None:
        named = cls.usual_reward
        args = {**cls.usual_reward_args, **args}
    reward = None
    if named is not None:
        reward = build_reward(named, args, key=f"taskset {task.taskset}.reward_fn_args")
    return recipe(plugin, task, reward)


def refuse_group_reward(recipe: Recipe, task: Task) -> None:
    """Raises ConfigError for a reward that sees all runs of a task: that of a greedy run, alone in
    its group, is not comparable.
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
    """Raises ConfigError for a reward beside a workflow that scores every run itself."""
    if recipe.scores_itself and recipe.reward is not None:
        raise ConfigError(
            f"workflow {recipe.name!r} scores its runs itself, so this reward would never be used; "
            f"leave it out, or use a workflow that "
            "returns no score",
            key=f"taskset {task.taskset}.default_reward_fn_type",
            given=task.reward,
        )


def workflow_class(plugin: Plugin, *, key: str = "") -> type[Workflow]:
    """The plugin's class; one without the base class gets its hooks.  Raises ConfigError for what
    plays nothing.
    """
    cls = derived(plugin.obj, Workflow) if inspect.isclass(plugin.obj) else Workflow
    if cls.run is Workflow.run and cls.run_group is Workflow.run_group:
        raise ConfigError(
            f"workflow {plugin.name!r} must be a class with a method run(self, task, ctx)", key=key
        )
    for method in filter(
        inspect.isfunction, (inspect.getattr_static(cls, name) for name in ("run", "run_group"))
    ):
        given = inspect.signature(method)
        try:
            given.bind("self", "task", "ctx")
        except TypeError:
            raise ConfigError(
                f"workflow {plugin.name!r}: {method.__name__}{given} must take (self, task, ctx)",
                key=key,
            ) from None
    return cls


def recipe(plugin: Plugin, task: Task, reward: Reward | None) -> Recipe:
    """How `task` is played by this workflow and scored by this reward.

    Raises ConfigError for arguments that do not fit, SetupError where a library of the class's
    `needs` (by the extra that brings it) is not installed.
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
    place = (
        None if cls.isolated is False else Place(plugin.obj, cls.isolated, key=f"{where}.workflow")
    )
    return Recipe(
        task.workflow,
        lambda: cls(**keywords),
        blocking,
        reward,
        place=place,
        keywords=keywords,
        plays_group=plays_group,
        scores_itself=cls.scores_itself,
    )

"""Whether the workflow of a taskset writes what the algorithm reads: a teacher's log-probs, the states of an environment.

Knows no workflow by name.  Invariant: what cannot be known (a class of the user's that says nothing) is never an error.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from rft.config.plan import Plan
from rft.config.problems import Problems
from rft.plugins import REGISTRY, shipped_workflows
from rft.types.task import Task
from rft.workflow.build import Recipe
from rft.workflow.known import GIVES

_READS = {"on_policy_distill": "teacher", "jsd": "teacher", "gigpo": "state"}


def check(plan: Plan, task: Task, recipe: Recipe, key: str, problems: Problems) -> None:
    """Adds an error where the workflow of a training taskset cannot give what `plan`'s advantage reads."""
    name = plan.learner.algorithm.advantage_fn
    needed = _READS.get(name, "")
    if not needed or (needed == "state" and plan.learner.algorithm.advantage_fn_args.get("omega") == 0):
        return
    cls = REGISTRY.get("workflow", task.workflow).obj
    given = _gives(cls, recipe)
    if given is not None and needed not in given:
        problems.error(
            f"{key}.default_workflow_type",
            f"advantage_fn {name} reads what {Path(task.workflow).name} does not write here.  It needs {GIVES[needed]}",
            task.workflow,
        )
    elif given is not None and needed == "teacher":
        _teacher(plan, recipe, key, problems)


def _gives(cls: Any, recipe: Recipe) -> frozenset[str] | None:
    """None where nobody says."""
    if callable(say := getattr(cls, "gives", None)):
        return frozenset(say(recipe.keywords))
    module = sys.modules.get(cls.__module__)
    place = getattr(module, "__file__", None)
    ours = cls.__module__.startswith("rft.") or (place is not None and Path(place).parent == shipped_workflows().resolve())
    return frozenset() if ours else None


def _teacher(plan: Plan, recipe: Recipe, key: str, problems: Problems) -> None:
    there = [name for m in plan.auxiliary for name in m.names]
    named = recipe.keywords.get("teacher")
    if not there:
        problems.error(
            "explorer.auxiliary_models", f"{recipe.name} asks a teacher; name one: [{{name: teacher, model_path: ...}}]"
        )
    elif named is not None and named not in there:
        problems.error(f"{key}.workflow_args.teacher", f"no auxiliary model has this name; there is {', '.join(there)}", named)

"""Check that a workflow or operator writes every field that the algorithm's parts read besides
tokens, log-probs and rewards.

Part of the second stage of `rft.preflight.check`: plugins are loaded and tasksets open.  A workflow
or operator declares its fields in `gives` of its class.  Invariant: a part whose fields no class
declares is refused here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rft.algorithm.args import declared
from rft.algorithm.catalog import KINDS, part_args
from rft.config.context import Problems
from rft.config.plan import Plan
from rft.errors import ConfigError
from rft.plugins import REGISTRY, checked_args
from rft.preflight import teacher_checks
from rft.preflight.model_folder import ModelFiles
from rft.taskset.settings import TasksetSettings
from rft.workflow.recipes import GIVES, TEACHER, workflow_class

if TYPE_CHECKING:
    from rft.taskset.base import Taskset

_INFO = "info."
_ADVANTAGE = "algorithm.advantage_fn"


def look(
    plan: Plan, tasksets: Sequence[Taskset], model: ModelFiles | None, problems: Problems
) -> None:
    """Report missing fields; `tasksets`: the open ones, for training and for evaluation."""
    if plan.trainer.alone or plan.mode == "bench":
        return
    workflows = [
        (t.settings, name)
        for t in tasksets
        if not t.settings.is_eval
        for name in sorted({t.settings.workflow, *t.workflows()} - {""})
    ]
    if plan.serve is not None:  # the session workflow writes the fields that clients post
        session = TasksetSettings(name="serve", path="", workflow="session")
        workflows = [(session, session.workflow)]
    if plan.explorer.baseline:
        _check_greedy_runs(plan, workflows, problems)
    operators = plan.explorer.pipeline.operators
    from_operators = _provided("operator", ((o.name, o.args) for o in operators))
    for kind, part, field in _required(plan):
        for taskset, workflow in workflows:
            provided = _provided("workflow", [(workflow, taskset.workflow_args)])
            if field not in from_operators | provided:
                text = _missing(part, field, workflow, taskset.name)
                problems.error(f"algorithm.{kind}", text, given=part)
            elif field == TEACHER and field in provided:
                teacher_checks.can_score(plan, workflow, taskset, problems)
    if not problems.errors:
        teacher_checks.prompts_fit(plan, tasksets, model, problems)


def _check_greedy_runs(
    plan: Plan, workflows: Sequence[tuple[TasksetSettings, str]], problems: Problems
) -> None:
    """Check that the reward of every task's greedy run can be subtracted."""
    name = plan.learner.algorithm.advantage_fn
    if plan.serve is not None:
        text = (
            f"{name} reads the reward of a greedy run of every task, which no client plays; "
            f"choose another advantage"
        )
        problems.error(_ADVANTAGE, text, given=name)
    for taskset, workflow in workflows:
        with suppress(ConfigError):  # the check of its arguments reports it
            plugin = REGISTRY.get("workflow", workflow)
            if checked_args(plugin, taskset.workflow_args).get("credit") == "step":
                text = (
                    f"subtracts the reward of a whole greedy run, and rows of {workflow} have that "
                    f"of their step; write credit: run"
                )
                problems.error(_ADVANTAGE, text, given=name)


def _required(plan: Plan) -> list[tuple[str, str, str]]:
    """Return (kind, part, field) for every field that a part reads."""
    a = plan.learner.algorithm
    required = []
    for kind in KINDS:
        name = getattr(a, kind)
        with suppress(ConfigError):  # reported by `resolve`
            required += [(kind, name, field) for field in declared(part_args(a, kind)).wants]
    return required


def _provided(kind: str, plugins: Iterable[tuple[str, Mapping[str, Any]]]) -> set[str]:
    fields: set[str] = set()
    for name, args in plugins:
        with suppress(ConfigError):  # the check of its name reports it
            plugin = REGISTRY.get(kind, name)
            cls = plugin.obj if kind == "operator" else workflow_class(plugin)
            fields |= cls.provides(args)
    return fields


def _missing(part: str, field: str, workflow: str, taskset: str) -> str:
    quoted = f'info["{field.removeprefix(_INFO)}"]' if field.startswith(_INFO) else field
    hint = f"It comes with {GIVES[field]}.  " if field in GIVES else ""
    workflow = Path(workflow).name if ":" in workflow else workflow
    return (
        f"{part} reads {quoted} of every experience, but nothing declares it: neither workflow "
        f"{workflow!r} of taskset {taskset} nor an operator.  {hint}A class that writes it "
        f'declares `gives = ("{field}",)`'
    )

"""Checks that a workflow or operator writes every field that the algorithm's parts read beyond
tokens, log-probs and rewards.

Part of the second stage of `check`: plugins are loaded and tasksets open.  A workflow or operator
says what it writes in `gives` of its class: names, or a function of its arguments that returns
them.  Invariant: a part whose data no class declares is refused here and never reaches a first
step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rft.algorithm.args import declared
from rft.algorithm.catalog import KINDS, check_args
from rft.config.context import Problems
from rft.config.plan import Plan
from rft.errors import ConfigError
from rft.plugins import REGISTRY, checked_args
from rft.taskset.settings import TasksetSettings
from rft.workflow.recipes import GIVES, TEACHER, workflow_class

if TYPE_CHECKING:
    from rft.taskset.base import Taskset

_INFO = "info."


def look(plan: Plan, tasksets: Sequence[Taskset], problems: Problems) -> None:
    """`tasksets`: those that are open, also such for evaluation."""
    if plan.trainer.alone or plan.mode == "bench":
        return
    operators = _provided("operator", ((o.name, o.args) for o in plan.explorer.pipeline.operators))
    flows = [
        (t.settings, name)
        for t in tasksets
        if not t.settings.is_eval
        for name in sorted({t.settings.workflow, *t.workflows()} - {""})
    ]
    if plan.serve is not None:
        # it writes what clients post, no more
        flows = [(TasksetSettings(name="serve", path="", workflow="session"), "session")]
        if plan.explorer.baseline:
            name = plan.learner.algorithm.advantage_fn
            text = (
                f"{name} reads the reward of a greedy run of every task, which no client plays; "
                f"choose another advantage"
            )
            problems.error("algorithm.advantage_fn", text, given=name)
    for taskset, flow in flows if plan.explorer.baseline else ():
        with suppress(ConfigError):  # told where its arguments are
            plugin = REGISTRY.get("workflow", flow)
            if checked_args(plugin, taskset.workflow_args).get("credit") == "step":
                text = (
                    f"subtracts the reward of a whole greedy run, and rows of {flow} have that "
                    f"of their step; write credit: run"
                )
                problems.error(
                    "algorithm.advantage_fn", text, given=plan.learner.algorithm.advantage_fn
                )
    for kind, part, want in _required(plan):
        for taskset, flow in flows:
            given = _provided("workflow", [(flow, taskset.workflow_args)])
            if want not in operators | given:
                problems.error(
                    f"algorithm.{kind}", _missing(part, want, flow, taskset.name), given=part
                )
            elif want == TEACHER and want in given:
                _teacher(plan, flow, taskset, problems)


def _required(plan: Plan) -> list[tuple[str, str, str]]:
    """(kind, part, what it reads) of every part that reads something."""
    a = plan.learner.algorithm
    found = []
    for kind in KINDS:
        name = getattr(a, kind)
        try:
            args = check_args(kind, name, getattr(a, f"{kind}_args"))
        except ConfigError:
            continue  # told by `resolve`
        found += [(kind, name, want) for want in declared(args).wants]
    return found


def _provided(kind: str, named: Iterable[tuple[str, Mapping[str, Any]]]) -> set[str]:
    found: set[str] = set()
    for name, args in named:
        try:
            plugin = REGISTRY.get(kind, name)
            found |= (plugin.obj if kind == "operator" else workflow_class(plugin)).provides(args)
        except ConfigError:
            continue  # told where it is named
    return found


def _missing(part: str, want: str, flow: str, taskset: str) -> str:
    what = f'info["{want.removeprefix(_INFO)}"]' if want.startswith(_INFO) else want
    known = f"It comes with {GIVES[want]}.  " if want in GIVES else ""
    flow = Path(flow).name if ":" in flow else flow
    return (
        f"{part} reads {what} of every experience, but nothing declares it: neither workflow "
        f"{flow!r} of taskset {taskset} "
        f'nor an operator.  {known}A class that writes it declares `gives = ("{want}",)`'
    )


def _teacher(plan: Plan, flow: str, taskset: TasksetSettings, problems: Problems) -> None:
    there = {name: m.engines[0].engine_type for m in plan.auxiliary for name in m.names}
    named = taskset.workflow_args.get("teacher")
    temperature = taskset.sampling.temperature
    if not there:
        problems.error(
            "explorer.auxiliary_models",
            f"{flow} asks a teacher; name one: [{{name: teacher, model_path: ...}}]",
        )
    elif named is not None and named not in there:
        problems.error(
            "explorer.auxiliary_models",
            f"no model has the name of workflow_args.teacher; the models are {', '.join(there)}",
            named,
        )
    elif temperature != 1 and {t for name, t in there.items() if named in (None, name)} == {"vllm"}:
        text = (
            "has log-probs at temperature 1 only; sample at 1, or write engine_type: "
            "transformers for the teacher"
        )
        problems.error(
            "model.temperature",
            f"is {temperature:g} for {taskset.name}, and a teacher of engine_type vllm {text}",
        )

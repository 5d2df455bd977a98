"""Whether somebody writes what the algorithm's parts read of every experience beyond tokens, log-probs and rewards.

Part of the second stage of `check`: plugins are loaded and tasksets open.  A workflow or operator says what it writes in an attribute
`gives` of its class.  Invariant: a part whose data nobody gives is refused here and never reaches a first step.
"""

from __future__ import annotations

from collections.abc import Iterable

from rft.algorithm.args import KINDS, check_args
from rft.config.plan import Plan
from rft.config.problems import Problems
from rft.config.roles import explores, trains
from rft.errors import ConfigError
from rft.plugins import REGISTRY

_INFO = "info."


def look(plan: Plan, workflows: dict[str, set[str]], problems: Problems) -> None:
    """`workflows`: by the name of each training taskset, those that its rows are played with."""
    if plan.trainer.given is not None or not (explores(plan.mode) and trains(plan.mode)):
        return
    a = plan.learner.algorithm
    operators = _given("operator", (o.name for o in plan.explorer.pipeline.operators))
    for kind in KINDS:
        name = getattr(a, kind)
        try:
            args = check_args(kind, name, getattr(a, f"{kind}_args"))
        except ConfigError:
            continue  # told by `resolve`
        for want in getattr(args, "wants", ()):
            for taskset, names in workflows.items():
                for flow in sorted(names):
                    if want not in operators | _given("workflow", [flow]):
                        problems.error(f"algorithm.{kind}", _missing(name, want, flow, taskset), given=name)


def _given(kind: str, names: Iterable[str]) -> set[str]:
    found: set[str] = set()
    for name in names:
        try:
            found |= set(getattr(REGISTRY.get(kind, name).obj, "gives", ()))
        except ConfigError:
            continue  # told where it is named
    return found


def _missing(part: str, want: str, flow: str, taskset: str) -> str:
    what = f'info["{want.removeprefix(_INFO)}"]' if want.startswith(_INFO) else want
    return (
        f"{part} reads {what} of every experience, and nobody says that it is written: neither workflow {flow!r} of taskset {taskset} "
        f'nor an operator.  One that does it has the line `gives = ("{want}",)` in its class'
    )

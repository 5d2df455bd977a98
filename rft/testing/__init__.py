"""Test tools for authors of workflows, rewards, judges and algorithms, without a model or an
engine's library.

    from rft.testing import ScriptedModel, run_workflow

    def test_it_asks_twice():
        result = run_workflow(MyWorkflow, {"prompt": "2+2?", "truth": "4"}, ScriptedModel("5", "4"))
        assert result.reward == 1.0

Names are imported on first access.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rft.testing.algorithm import AlgorithmRow as AlgorithmRow
    from rft.testing.algorithm import try_algorithm as try_algorithm
    from rft.testing.fakes import CassetteMiss as CassetteMiss
    from rft.testing.fakes import FlakyModel as FlakyModel
    from rft.testing.fakes import RecordedModel as RecordedModel
    from rft.testing.fakes import ScriptedModel as ScriptedModel
    from rft.testing.fakes import tool_call as tool_call
    from rft.testing.judge import FakeJudge as FakeJudge
    from rft.testing.judge import judged as judged
    from rft.testing.play import run_workflow as run_workflow
    from rft.testing.play import run_workflow_async as run_workflow_async
    from rft.testing.play import task_of as task_of
    from rft.testing.trace import WorkflowResult as WorkflowResult

_HOMES = {
    "AlgorithmRow": "algorithm",
    "try_algorithm": "algorithm",
    "CassetteMiss": "fakes",
    "RecordedModel": "fakes",
    "FlakyModel": "fakes",
    "ScriptedModel": "fakes",
    "tool_call": "fakes",
    "FakeJudge": "judge",
    "judged": "judge",
    "WorkflowResult": "trace",
    "run_workflow": "play",
    "run_workflow_async": "play",
    "task_of": "play",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)

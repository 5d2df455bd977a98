"""rft: reinforcement fine-tuning of language models.

What authors of workflows, rewards and algorithms need, and what a notebook needs, can be imported
from here.  A name is loaded when it is first used, so `import rft` loads no library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rft.algorithm.args import Args
    from rft.algorithm.base import LossInputs, LossOutput, StepInputs, define_algorithm
    from rft.api.evaluation import evaluate
    from rft.api.stored_run import StoredRun, metrics, open_run, rollouts, run
    from rft.buffer.operators.base import Operator, OperatorArgs
    from rft.errors import ConfigError, RftError
    from rft.monitor.base import Tracker, TrackerArgs
    from rft.plugins import register
    from rft.reward.base import Reward
    from rft.reward.delimiters import PromptDelimiters, Scale, WordChoice
    from rft.reward.judge_args import JudgeArgs
    from rft.reward.judge_base import Judge, JudgeCase
    from rft.taskset.base import TaskSource
    from rft.types.completion import Completion, Score, Transcript
    from rft.types.task import SamplingArgs, Task
    from rft.workflow.agent import AgentWorkflow
    from rft.workflow.base import RunContext, Workflow
    from rft.workflow.toolrun import ToolArgs, ToolWorkflow
    from rft.workflow.turns import EnvWorkflow, MultiTurnWorkflow, Reply, Step, TurnArgs

__version__ = "0.1.0"
__all__ = [
    "AgentWorkflow",
    "Args",
    "Completion",
    "ConfigError",
    "EnvWorkflow",
    "Judge",
    "JudgeArgs",
    "JudgeCase",
    "LossInputs",
    "LossOutput",
    "MultiTurnWorkflow",
    "Operator",
    "OperatorArgs",
    "PromptDelimiters",
    "Reply",
    "Reward",
    "RftError",
    "RunContext",
    "SamplingArgs",
    "Scale",
    "Score",
    "Step",
    "StepInputs",
    "StoredRun",
    "Task",
    "TaskSource",
    "ToolArgs",
    "ToolWorkflow",
    "Tracker",
    "TrackerArgs",
    "Transcript",
    "TurnArgs",
    "WordChoice",
    "Workflow",
    "__version__",
    "define_algorithm",
    "evaluate",
    "metrics",
    "open_run",
    "register",
    "rollouts",
    "run",
]
_HOMES = {
    "rft.algorithm.args": ("Args",),
    "rft.algorithm.base": ("LossInputs", "LossOutput", "StepInputs", "define_algorithm"),
    "rft.buffer.operators.base": ("Operator", "OperatorArgs"),
    "rft.errors": ("ConfigError", "RftError"),
    "rft.monitor.base": ("Tracker", "TrackerArgs"),
    "rft.api.evaluation": ("evaluate",),
    "rft.api.stored_run": ("StoredRun", "metrics", "open_run", "rollouts", "run"),
    "rft.plugins": ("register",),
    "rft.reward.base": ("Reward",),
    "rft.reward.judge_base": ("Judge", "JudgeCase"),
    "rft.reward.delimiters": ("PromptDelimiters", "Scale", "WordChoice"),
    "rft.reward.judge_args": ("JudgeArgs",),
    "rft.taskset.base": ("TaskSource",),
    "rft.types.completion": ("Completion", "Score", "Transcript"),
    "rft.types.task": ("SamplingArgs", "Task"),
    "rft.workflow.agent": ("AgentWorkflow",),
    "rft.workflow.base": ("RunContext", "Workflow"),
    "rft.workflow.toolrun": ("ToolArgs", "ToolWorkflow"),
    "rft.workflow.turns": ("EnvWorkflow", "MultiTurnWorkflow", "Reply", "Step", "TurnArgs"),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module 'rft' has no attribute {name!r}; it offers {', '.join(__all__)}")


def __dir__() -> list[str]:
    return __all__

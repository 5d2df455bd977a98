"""The classes that workflow and reward files of Trinity-RFT 0.6 import, run by `rft`.

    sed -E -i 's/from (trinity|verl)\\.[a-z0-9_.]+ import/from rft.extras.migrate.compat import/'
    my_workflow.py

A leaf: nothing else of `rft` imports it.  Names are looked up when they are asked for, so a reward
file does not import torch. Invariant: a name that cannot be kept says what to use instead.
"""

from __future__ import annotations

import importlib
from typing import Any

NAMES = {
    "trinity_experience": ("EID", "Experience", "CustomField", "group_by"),
    "trinity_grading": (
        "fix_fracs",
        "grade_answer",
        "match_answer",
        "math_equal",
        "math_normalize",
        "remove_right_units",
        "timeout_limit",
        "validate_think_pattern",
    ),
    "trinity_model": ("ModelWrapper",),
    "trinity_operators": ("ExperienceOperator", "ExperienceOperatorV1"),
    "trinity_registry": (
        "Registry",
        "WORKFLOWS",
        "REWARD_FUNCTIONS",
        "EXPERIENCE_OPERATORS",
        "SELECTORS",
        "ADVANTAGE_FN",
        "POLICY_LOSS_FN",
        "PRIORITY_FUNC",
        "get_logger",
        "Deprecated",
    ),
    "trinity_rewards": (
        "RewardFn",
        "MathRewardFn",
        "MathBoxedRewardFn",
        "AccuracyReward",
        "FormatReward",
        "MathDAPORewardFn",
        "CountDownRewardFn",
    ),
    "trinity_task": ("Task", "FormatConfig", "GenerationConfig"),
    "trinity_workflow": (
        "Workflow",
        "BaseSimpleWorkflow",
        "SimpleWorkflow",
        "AsyncSimpleWorkflow",
        "MathWorkflow",
        "AsyncMathWorkflow",
        "MultiTurnWorkflow",
        "MathBoxedWorkflow",
        "AsyncMathBoxedWorkflow",
    ),
    "trinity_steps": (
        "StepWiseRewardWorkflow",
        "AsyncStepWiseRewardWorkflow",
        "RewardPropagationWorkflow",
        "AsyncRewardPropagationWorkflow",
    ),
}
REFUSED = {
    "build_mm_message": "the messages of a task show its images: send task.task_desc as it is",
    "AdvantageFn": "write a function of the whole train step, see docs/howto/algorithm.md",
    "GroupAdvantage": "write a function of the whole train step, see docs/howto/algorithm.md",
    "PolicyLossFn": "write a function of a micro-batch that gives sums over the step's "
    "denominators, see docs/howto/algorithm.md",
    "PriorityFunction": "write a class called with a Candidate, see rft/buffer/priority.py and "
    "docs/howto/buffer.md",
    "BaseSelector": "write a rft.taskset.selectors.TaskSelector: its order follows from its "
    "arguments, so that a resumed run repeats it",
    "InferenceModel": "write an engine, see docs/howto/engine.md",
    "AgentScopeReActAgent": "write the agent against the OpenAI client, see docs/howto/agent.md",
    "Config": "settings reach a workflow through task.workflow_args",
}
CLASSES = {  # whose names other classes of `rft` have
    name: f"Trinity{name}"
    for name in (
        "Experience",
        "FormatConfig",
        "MultiTurnWorkflow",
        "Registry",
        "RewardPropagationWorkflow",
        "Task",
        "Workflow",
    )
}
_HOME = {name: module for module, names in NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in REFUSED:
        raise AttributeError(f"{name} of Trinity-RFT is not kept: {REFUSED[name]}")
    if name not in _HOME:
        raise AttributeError(f"{__name__} has no {name}; it has {', '.join(sorted(_HOME))}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), CLASSES.get(name, name))


def __dir__() -> list[str]:
    return sorted(_HOME)

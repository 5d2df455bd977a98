"""Names that people bring along: each is registered, or refused with what to do instead."""

from __future__ import annotations

from typing import Any

import pytest

from rft.buffer.operators.experience_pipeline import REFUSED
from rft.errors import ConfigError
from rft.plugins import REGISTRY, checked_args, load_all, refused_names
from rft.reward.build_reward import build
from rft.types.task import Task
from rft.workflow.recipes import Recipes

TRINITY = {
    "workflow": """simple_workflow async_simple_workflow math_workflow async_math_workflow math_boxed_workflow
        async_math_boxed_workflow math_eval_workflow async_math_eval_workflow math_rm_workflow async_math_rm_workflow tool_call_workflow
        agentscope_workflow_adapter agentscope_workflow_adapter_v1 agentscope_react_workflow as_react_workflow
        agentscope_react_math_workflow agentscopev0_react_math_workflow agentscope_v1_react_search_workflow email_search_workflow
        alfworld_workflow step_wise_alfworld_workflow RAFT_alfworld_workflow RAFT_reflect_alfworld_workflow frozen_lake_workflow
        sciworld_workflow webshop_workflow intercode_sql_workflow sudoku_workflow math_ruler_workflow async_math_ruler_workflow
        math_trainable_ruler_workflow rubric_judge_workflow rubric_judge_openai_workflow simple_mm_workflow async_simple_mm_workflow
        on_policy_distill_workflow on_policy_distill_math_workflow harbor_workflow thinking_budget_workflow""",
    "reward": """math_reward math_boxed_reward accuracy_reward format_reward countdown_reward math_dapo_reward rlcr_reward openjudge_reward
        trajectory_accuracy_grader_reward openjudge_trajectory_accuracy_reward openjudge_multi_grader_reward rm_gallery_reward""",
    "operator": """reward_filter reward_std_filter dapo_dynamic_sampling mask_response_truncated reward_shaping_mapper
        pass_rate_calculator invalid_reward_filter data_juicer""",
    "selector": "sequential shuffle random offline_easy2hard difficulty_based",
    "priority": "linear_decay decay_limit_randomization",
}
ROWS = [(kind, name) for kind, names in TRINITY.items() for name in names.split()]


@pytest.fixture(scope="module", autouse=True)
def plugins() -> None:
    import rft.buffer.priority
    import rft.taskset.selectors  # noqa: F401

    load_all()


@pytest.mark.extra
@pytest.mark.parametrize(("kind", "name"), ROWS)
def test_every_name_is_there_or_has_a_reason(kind: str, name: str) -> None:
    there = name in REGISTRY.names(kind)
    reasons = REFUSED if kind == "operator" else refused_names(kind)
    assert there != (name in reasons)


@pytest.mark.extra
def test_the_reasons_are_what_a_configuration_is_told() -> None:
    for name, why in refused_names("workflow").items():
        with pytest.raises(ConfigError) as e:
            Recipes().find(Task(taskset="t", index=0, prompt="x", workflow=name))
        assert why in str(e.value) and len(why) > 20
    for name, why in refused_names("reward").items():
        with pytest.raises(ConfigError) as e:
            build(name, {})
        assert why in str(e.value)


KINDS: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1.5,
    1e400,
    "x",
    "\ud800",
    [],
    [1],
    [{}],
    {},
    {"x": {"y": [None]}},
    [{"name": 3}],
)


@pytest.mark.parametrize("kind", ["workflow", "reward"])
def test_arguments_of_other_kinds_are_taken_or_refused_by_name(kind: str) -> None:
    """Every argument of every shipped workflow and reward with values of other kinds: ConfigError,
    or it is taken; never another error.
    """
    tried = refused = 0
    for name in REGISTRY.names(kind):
        plugin = REGISTRY.get(kind, name)
        # its parts are rewards of their own
        if plugin.args is None or (kind == "reward" and name == "weighted_reward"):
            continue
        for field in plugin.args.model_fields:  # type: ignore[attr-defined]
            for value in KINDS:
                tried += 1
                try:
                    checked_args(plugin, {field: value}, key="taskset.args")
                except ConfigError as e:
                    refused += 1
                    assert e.key in ("taskset.args", f"workflow_args.{field}"), (name, field, value)
                    assert field in f"{e.key}: {e.message}" and len(str(e)) < 2000, (
                        name,
                        field,
                        value,
                    )
    assert tried > 500 and refused > tried / 4

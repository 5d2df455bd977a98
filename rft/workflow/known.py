"""Workflows that people of this family know by name: which of ours it is, or why it is not offered and what to do.

Knows no registry.  Invariant: a name of `OURS` that is also registered is the same workflow; no name of `INSTEAD` is registered.
"""

from __future__ import annotations

_AGENT = "agents run against an OpenAI endpoint: use react_agent_workflow, or agent_command_workflow for a program (docs/howto/agent.md)"
_WORLD = "its simulator is not part of this package: derive from EnvWorkflow with its reset and step (docs/howto/environment.md)"
_TEXT = "images and videos are not offered: use text"
_JUDGE = "is a reward here: use simple_workflow with default_reward_fn_type"

OURS: dict[str, str] = {
    "simple_workflow": "simple_workflow",
    "async_simple_workflow": "async_simple_workflow",
    "math_workflow": "math_workflow",
    "async_math_workflow": "async_math_workflow",
    "math_boxed_workflow": "math_boxed_workflow",
    "async_math_boxed_workflow": "async_math_boxed_workflow",
    "math_eval_workflow": "math_eval_workflow",
    "async_math_eval_workflow": "async_math_eval_workflow",
    "math_rm_workflow": "math_rm_workflow",
    "async_math_rm_workflow": "async_math_rm_workflow",
    "tool_call_workflow": "tool_call_workflow",
    "frozen_lake_workflow": "frozen_lake_workflow",
    "on_policy_distill_workflow": "on_policy_distill_workflow",
    "on_policy_distill_math_workflow": "on_policy_distill_math_workflow",
}

INSTEAD: dict[str, str] = {
    **dict.fromkeys(
        (
            "agentscope_workflow_adapter",
            "agentscope_workflow_adapter_v1",
            "agentscope_react_workflow",
            "as_react_workflow",
            "agentscope_react_math_workflow",
            "agentscopev0_react_math_workflow",
            "agentscope_v1_react_search_workflow",
        ),
        _AGENT,
    ),
    "email_search_workflow": "its mailbox is not part of this package: write the tools and use tool_workflow (docs/howto/environment.md)",
    **dict.fromkeys(
        (
            "alfworld_workflow",
            "step_wise_alfworld_workflow",
            "RAFT_alfworld_workflow",
            "RAFT_reflect_alfworld_workflow",
            "sciworld_workflow",
            "webshop_workflow",
        ),
        _WORLD,
    ),
    "intercode_sql_workflow": "it needs containers: use sql_workflow, which keeps its databases in SQLite",
    "sudoku_workflow": "use the taskset reasoning_gym://mini_sudoku with simple_workflow",
    **dict.fromkeys(
        ("math_ruler_workflow", "async_math_ruler_workflow"),
        "use math_workflow with default_reward_fn_type: ruler_judge, which compares the answers of a task",
    ),
    "math_trainable_ruler_workflow": "use math_workflow with default_reward_fn_type: ruler_judge and a judge in explorer.auxiliary_models",
    "rubric_judge_workflow": f"{_JUDGE}: rubric_judge",
    "rubric_judge_openai_workflow": f"{_JUDGE}: rubric_judge and an auxiliary model of engine_type: external",
    **dict.fromkeys(("simple_mm_workflow", "async_simple_mm_workflow"), _TEXT),
    "harbor_workflow": "its task packages need containers: play them with agent_command_workflow or a workflow of your own",
    "thinking_budget_workflow": "set max_response_tokens, or write a workflow with two calls (docs/howto/workflow.md)",
}

TEACHER = "teacher_logprobs"
GIVES: dict[str, str] = {
    TEACHER: "on_policy_distill_workflow, or a workflow that calls ctx.teach(name)",
    "info.env_state_hash": "an environment and workflow_args.layout: steps (docs/howto/environment.md)",
}
"""Who writes what only some algorithms read."""


def advice(name: str) -> str:
    """What to do about a workflow that is not offered; "" for one that nobody knows."""
    return INSTEAD.get(name, "")

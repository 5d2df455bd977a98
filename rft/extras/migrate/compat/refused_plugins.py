"""Workflows and rewards of Trinity-RFT and veRL that are not offered: what to use instead.

Invariant: none of these names is registered.
"""

from __future__ import annotations

_AGENT = (
    "agents run against an OpenAI endpoint: use react_agent_workflow, or "
    "agent_command_workflow for a program (docs/howto/agent.md)"
)
_WORLD = (
    "its simulator is not part of this package: derive from EnvWorkflow with its reset and "
    "step (docs/howto/environment.md)"
)

WORKFLOWS: dict[str, str] = {
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
    "harbor_workflow": "its task packages need containers: play them with agent_command_workflow "
    "or a workflow of your own",
}

REWARDS: dict[str, str] = {
    **dict.fromkeys(
        (
            "openjudge_reward",
            "trajectory_accuracy_grader_reward",
            "openjudge_trajectory_accuracy_reward",
            "openjudge_multi_grader_reward",
            "rm_gallery_reward",
        ),
        "OpenJudge's graders are not offered: use rubric_judge or reference_judge, with a model in "
        "explorer.auxiliary_models",
    ),
    "rlcr": "calibration is scored by rlcr_reward",
}

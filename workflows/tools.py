"""A conversation in which the model's tool calls are run.

explorer_input:
  taskset:
    path: questions.jsonl
    default_workflow_type: tool_workflow
    workflow_args: {tools: ["tools.py:weather"], max_turns: 4}
    default_reward_fn_type: exact_answer
"""

from rft import ToolArgs, ToolWorkflow, register

register.workflow("tool_workflow", args=ToolArgs)(ToolWorkflow)

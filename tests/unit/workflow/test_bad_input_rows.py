"""Bad runs and faults that reach the explorer, its workflows and its models: which test shows what
becomes of each; and those that have no other home.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from rft.engine.scripted import ScriptedEngine
from rft.types.completion import Score
from rft.types.ids import GroupId
from rft.types.task import Task
from rft.workflow.base import Workflow, workflow
from rft.workflow.group import run_group
from rft.workflow.play_run import RunLimits
from rft.workflow.recipes import Recipes

TESTS = Path(__file__).parents[2]
TABLE = {
    "I1 empty answer": (
        "unit/workflow/test_run_group.py::test_truncated_and_empty_answers_are_kept",
        "unit/explorer/test_explorer_pipeline.py::test_a_row_without_a_trained_token_is_explained",
        "unit/buffer/test_buffer_bad_input.py::test_an_answer_of_nothing_but_its_end_is_kept",
    ),
    "I2 too long": (
        "unit/workflow/test_run_group.py::test_a_prompt_that_is_too_long_is_not_tried_again",
        "unit/workflow/test_isolated_runs.py::test_a_prompt_that_is_too_long_is_named",
        "unit/config/test_config_check.py::test_prompts_that_are_too_long",
    ),
    "I7 group without a member": (
        "unit/explorer/test_explorer_limits.py::test_group_policies",
        "unit/explorer/test_explorer_limits.py::test_a_group_ends_at_its_deadline_and_is_trained_without_the_missing_runs",
        "unit/workflow/test_run_group.py::test_groups_need_two_scored_members",
        "unit/explorer/test_explorer.py::test_rejected_groups_are_replaced",
    ),
    "I17 template that hides earlier answers": (
        "unit/engine/test_chat_prefix.py::test_a_template_that_hides_answers_is_refused",
        "unit/engine/test_chat_prefix.py::test_the_check_warns_once_counts_and_ends",
        "unit/workflow/test_rows_of_a_run.py::test_joined_calls_that_do_not_go_on_are_refused",
    ),
    "I18 tool calls": (
        "unit/workflow/test_bad_tools_and_servers.py::test_whatever_a_tool_gives_the_run_goes_on",
        "unit/workflow/test_bad_tools_and_servers.py::test_whatever_a_model_calls_it_is_told",
        "unit/workflow/test_tools_in_runs.py::test_results_and_errors_are_told_and_counted",
        "unit/workflow/test_tools_in_runs.py::test_a_slow_tool_is_not_waited_for",
        "unit/workflow/test_tools_in_runs.py::test_long_results_are_cut",
    ),
    "I19 replies of judges": (
        "unit/reward/test_judge.py::test_anything_else_is_unreadable",
        "unit/reward/test_judge.py::test_unreadable_is_asked_again_then_unscored_and_never_zero",
        "unit/reward/test_judge.py::test_no_text_closes_its_block_or_the_message",
        "attacks/test_judge_probes.py::test_a_fenced_prompt_is_not",
    ),
    "I22 servers": (
        "unit/workflow/test_bad_tools_and_servers.py::test_strangers_get_nothing_and_change_nothing",
        "unit/workflow/test_bad_tools_and_servers.py::test_connections_that_say_nothing_hold_up_nobody",
        "unit/workflow/test_endpoint.py::test_keys_open_their_own_run_only",
        "unit/workflow/test_endpoint.py::test_what_cannot_be_served_is_refused_by_name",
    ),
    "I23 plugins": (
        "integration/test_run_doors.py::test_a_plugin_that_does_not_import_stops_the_run_before_it_starts",
        "unit/workflow/test_run_group.py::test_bad_workflows_are_named",
        "unit/workflow/test_isolated_runs.py::test_what_ends_a_run_is_its_record",
        "unit/workflow/test_isolated_runs.py::test_what_a_run_leaves_behind_is_gone",
        "unit/workflow/test_bad_input_rows.py::test_a_run_that_changes_its_task_changes_nothing_for_others",
    ),
    "I28 programs as answers": (
        "attacks/test_sandbox.py::test_attack",
        "attacks/test_sandbox.py::test_a_daemon_dies_with_its_space",
        "attacks/test_sandbox.py::test_a_box_dies_with_its_caller",
    ),
    "F3 engine killed": (
        "fault/test_run_engine_kill.py::test_engines_that_are_killed_come_back",
        "unit/engine/test_pool.py::test_requests_of_a_dead_engine_are_asked_elsewhere",
        "unit/engine/test_pool.py::test_an_engine_that_cannot_be_brought_back_fails_everyone",
    ),
    "F4 judge killed": (
        "fault/test_run_engine_kill.py::test_engines_that_are_killed_come_back",
        "unit/reward/test_judge.py::test_sixteen_pending_scores_survive_the_death_of_the_judge",
        "unit/reward/test_judge.py::test_a_model_that_is_gone_ends_the_run_and_writes_no_score",
    ),
    "F13 stuck workflow": (
        "unit/workflow/test_run_group.py::test_deadline",
        "unit/workflow/test_isolated_runs.py::test_a_stuck_run_is_killed_at_its_deadline",
        "unit/workflow/test_isolated_runs.py::test_one_spinning_run_holds_up_no_other",
        "unit/explorer/test_explorer.py::test_one_stuck_run_holds_up_nobody_else",
        "unit/explorer/test_explorer_limits.py::test_deadlines_are_counted",
    ),
    "F14 malformed rollouts": (
        "unit/buffer/test_buffer_bad_input.py::test_it_is_refused_and_counted",
    ),
    "F22 hang without death": (
        "unit/explorer/test_explorer_limits.py::test_an_engine_that_answers_nothing_any_more_ends_the_run_with_its_reason",
        "unit/explorer/test_explorer_limits.py::test_a_slow_engine_is_named_and_the_log_says_so_at_its_interval",
        "unit/reward/test_judge.py::test_a_question_that_is_refused_or_not_answered_in_time_is_unscored",
    ),
    "F23 network": (
        "unit/engine/test_external_engine.py::test_it_asks_again_where_the_server_was_busy_or_gone",
        "unit/engine/test_external_engine.py::test_it_gives_up_with_the_reason",
        "unit/workflow/test_bad_tools_and_servers.py::test_a_server_that_breaks_off_is_asked_again",
        "unit/workflow/test_endpoint.py::test_observers_ask_without_being_recorded",
    ),
    "F25 crash loop": (
        "unit/explorer/test_explorer.py::test_a_workflow_that_raises_every_time_trips_the_breaker",
        "fault/test_run_failures.py::test_user_code_that_always_fails_stops_the_run",
    ),
}


@pytest.mark.parametrize("row", TABLE)
def test_every_row_has_its_tests(row: str) -> None:
    for where in TABLE[row]:
        file, _, name = where.partition("::")
        tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
        assert name in {
            n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
        }, where


async def test_a_run_that_changes_its_task_changes_nothing_for_others() -> None:
    @workflow("test_bad_input_changes_its_task")
    class Changes(Workflow):
        async def run(self, task, ctx):  # type: ignore[no-untyped-def]
            seen = list(task.row["choices"])
            await ctx.chat(task.chat())
            task.row["choices"].append("mine")
            task.row.pop("other")
            task.chat()[0]["content"] = "mine too"
            return ctx.transcript(score=Score(value=float(len(seen))))

    task = Task(
        taskset="t",
        index=0,
        row={"choices": ["a", "b"], "other": 1},
        messages=({"role": "user", "content": "2+2?"},),
        workflow="test_bad_input_changes_its_task",
        num_runs=3,
    )
    engine = ScriptedEngine(answer=lambda m: "4")
    group = await run_group(
        task, Recipes().find(task), engine, GroupId(1, 0, 0, 0), limits=RunLimits(20.0)
    )
    assert group.rewards == [2.0, 2.0, 2.0] and task.row == {"choices": ["a", "b"], "other": 1}
    assert {c.messages[0]["content"] for c in engine.calls} == {"2+2?"}

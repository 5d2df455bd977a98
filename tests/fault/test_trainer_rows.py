"""What shows that the trainer answers faults and bad input as it should: which tests, by row of the
two tables it is asked for.

F: faults; I: bad input.  A row without a test would be one that nobody looks at, so this file fails
where a named test is gone.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "tests"
ROWS: dict[str, tuple[str, ...]] = {
    "F9 corrupted checkpoint": (
        "unit/trainer/test_manifest.py::test_one_changed_byte_anywhere_is_seen",
        "unit/trainer/test_manifest.py::test_damage_names_the_file_and_falls_back",
        "unit/trainer/test_manifest.py::test_nothing_whole_is_an_error_not_a_fresh_start",
        "unit/trainer/test_shards.py::test_damaged_shards_are_named_and_passed_over",
        "unit/trainer/test_shards.py::test_what_is_not_safetensors_is_refused",
        "fault/test_run_failures.py::test_a_damaged_checkpoint_is_passed_over",
        "fault/test_run_failures.py::test_when_every_checkpoint_is_damaged_the_run_does_not_start_afresh",
    ),
    "F12 not finite": (
        "unit/trainer/test_learner.py::test_nothing_that_is_not_finite_gets_into_weights",
        "unit/trainer/test_learner.py::test_a_step_that_is_not_finite_changes_not_one_bit",
        "integration/test_learner_ranks.py::test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_all",
        "unit/trainer/test_trainer_loop.py::test_non_finite_steps_are_explained_and_end_the_run_with_a_checkpoint",
        "golden/test_advantage_vectors.py::test_a_reward_that_is_not_finite_stops_it",
        "golden/test_advantage_vectors.py::test_equal_rewards_give_exactly_zero",
        "contract/test_transport.py::test_non_finite_weights_are_never_published",
    ),
    "F17 resume exactness": (
        "fault/test_resume_exactness.py::test_killed_in_mid_step_and_in_mid_checkpoint",
        "fault/test_resume_exactness.py::test_ten_random_kills",
        "fault/test_resume_exactness.py::test_two_ranks_on_ray_that_write_their_checkpoints_aside",
        "unit/sync/test_schedule.py::test_resume_at_any_step_goes_on_within_the_bound",
    ),
    "F18 resume edge cases": (
        # over an epoch's end; other rows are refused
        "integration/test_given_data.py::test_a_resumed_run_is_the_same_run",
        "unit/trainer/test_trainer_loop.py::test_end_of_data_finishes_early",
        "fault/test_run_failures.py::test_a_finished_run_has_nothing_to_do",
        "unit/explorer/test_explorer.py::test_resumed_and_uninterrupted_runs_play_the_same_tasks",
        "fault/test_run_failures.py::test_another_learning_rate_is_taken_and_logged",
        "fault/test_run_failures.py::test_another_model_is_refused",
        "unit/config/test_config_save.py::test_changes_on_resume",
        "integration/test_learner_ranks.py::test_another_world_size_goes_on",
    ),
    "I5 log-probs": (
        "unit/buffer/test_buffer_bad_input.py::test_it_is_refused_and_counted",
        "unit/buffer/test_buffer_bad_input.py::test_rows_without_logprobs_say_so",
        "unit/trainer/test_batch_builder.py::test_rows_that_cannot_be_trained_on_are_refused_by_name",
        "unit/trainer/test_batch_builder.py::test_log_probs_that_are_all_zero_are_told",
        "unit/trainer/test_batch_builder.py::test_imitation_takes_rows_without_a_sampling_policy",
    ),
    "I6 rewards": (
        "unit/buffer/test_buffer_bad_input.py::test_it_is_refused_and_counted",
        "unit/buffer/test_buffer_bad_input.py::test_no_reward_is_unscored_and_not_zero",
        "fault/test_run_failures.py::test_user_code_that_always_fails_stops_the_run",
    ),
    "I8 equal rewards": (
        "golden/test_advantage_vectors.py::test_equal_rewards_give_exactly_zero",
        "unit/trainer/test_batch_builder.py::test_rows_of_equal_rewards_are_left_out_but_counted",
        "unit/trainer/test_batch_builder.py::test_all_rewards_equal_leaves_no_micro_batch",
        # frac_reward_zero_std
        "unit/docs/test_metrics_page.py::test_what_is_documented_as_always_there_is_written",
    ),
    "I14 conflicting options": (
        "unit/config/test_config_resolve.py::test_error_given_values",
        "unit/config/test_config_keys_a.py::test_losses_and_policies_that_do_not_go_together",
        "unit/config/test_config_check_advice.py::test_truncated_sampling_in_training_is_refused_and_groups_of_one_are_warned_about",
        "unit/config/test_config_lora.py::test_bad_values_are_refused",
        "unit/config/test_config_check.py::test_what_nobody_provides_is_refused",
        "integration/test_given_data.py::test_check_refuses",
    ),
    "I15 model folder": (
        "unit/config/test_config_check.py::test_damaged_model_folders",
        "unit/config/test_config_check.py::test_pickled_weights_are_refused",
        "unit/config/test_config_check.py::test_weights_of_another_model",
        "unit/config/test_config_check.py::test_own_and_tied_head_is_warned_about",
        "unit/config/test_config_check.py::test_tokenizer_is_needed",
        "integration/test_run_bad_input.py::test_damaged_model",
        "unit/trainer/test_loading.py::test_missing_weights_are_refused_by_name",
    ),
    "I16 adapters": (
        "unit/trainer/test_lora.py::test_adapters_that_do_not_fit_are_refused",
        "unit/trainer/test_lora.py::test_an_adapter_of_another_base_is_refused",
        "unit/trainer/test_lora.py::test_another_base_name_rank_or_kind_is_refused",
    ),
    "I30 weights to be served": (
        "contract/test_transport.py::test_non_finite_weights_are_never_published",
        "contract/test_transport.py::test_another_set_of_tensors_than_before_is_refused",
        "unit/engine/test_weights.py::test_a_manifest_that_does_not_fit_is_bad",
    ),
}


@pytest.mark.parametrize("row", ROWS)
def test_its_tests_are_there(row: str) -> None:
    for named in ROWS[row]:
        file, function = named.split("::")
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        there = {n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert function in there, named

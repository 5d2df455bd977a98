"""Values that a conversion must not lose or change without a word."""

from __future__ import annotations

from pathlib import Path

import pytest

from rft.config import yamlfile
from rft.errors import ConfigError
from rft.extras.migrate.compat.key_names import describe
from rft.extras.migrate.convert import report, trinity
from rft.extras.migrate.convert.launch import read_launch
from rft.extras.migrate.convert.verl import Conversion, convert
from tests.extras.migrate.test_verl_vectors import SHARED, A, R, T, found, made, outcome

REF = "actor_rollout_ref.ref"
INPUT = "buffer.explorer_input"


def read(folder: Path, text: str) -> Conversion:
    path = folder / "run.sh"
    path.write_text(text, encoding="utf-8")
    return convert(read_launch(path))


def test_another_reference_model_is_refused() -> None:
    model = "actor_rollout_ref.model.path=/m"
    assert (
        outcome(made(*SHARED, model, f"{REF}.model.path=/m"), f"{REF}.model.path")[0] == "derived"
    )
    assert (
        outcome(made(*SHARED, model, f"{REF}.model.path=${{oc.env:TEACHER}}"), f"{REF}.model.path")[
            0
        ]
        == "refused"
    )
    kind, why = outcome(made(*SHARED, model, f"{REF}.model.path=/teacher"), f"{REF}.model.path")
    assert kind == "refused" and "the reference model is the one that is trained" in why


def test_a_reference_to_a_key_that_nobody_knows_is_refused() -> None:
    c = made(
        *SHARED,
        "trainer.project_name=${foo.bar}_x",
        "trainer.experiment_name=${trainer.experiment_name}",
    )
    assert outcome(c, "trainer.project_name") == (
        "refused",
        "${foo.bar} refers to a key that the file does not have; write its value",
    )
    assert (
        outcome(c, "trainer.experiment_name")[0] == "refused"
        and found(c)["project"] == "verl_examples"
    )


def test_a_reference_to_what_only_running_knows_is_refused_as_that_is(tmp_path: Path) -> None:
    names = "trainer.project_name=$(whose) 'trainer.experiment_name=${trainer.project_name}_1'"
    c = read(tmp_path, f"python3 -m verl.trainer.main_ppo {' '.join(SHARED)} {names}")
    assert [r.argument.key for r in c.refused] == [
        "trainer.project_name",
        "trainer.experiment_name",
    ]
    assert len({r.outcome.reason for r in c.refused}) == 1


def test_references_in_lists_and_to_groups_are_followed(tmp_path: Path) -> None:
    c = read(
        tmp_path,
        f"python3 -m verl.trainer.main_ppo algorithm.adv_estimator=gae {' '.join(SHARED)} "
        f"{A}.optim.lr=3e-6 critic.optim.lr=1e-5 "
        "'data.train_files=[/d/${trainer.project_name}/a.parquet]' trainer.project_name=p "
        "'critic.optim=${actor_rollout_ref.actor.optim}'",
    )
    assert found(c)[f"{T}.path"] == "/d/p" and not c.refused and not c.errors
    assert found(c)["trainer.critic.optimizer.lr"] == 3e-6


@pytest.mark.parametrize("name", ["1e-6", "12", "on", "0x10"])
def test_a_name_like_a_number_is_a_text_in_the_file(name: str, tmp_path: Path) -> None:
    c = read(
        tmp_path,
        f"python3 -m verl.trainer.main_ppo {' '.join(SHARED)} trainer.experiment_name={name}",
    )
    assert yamlfile.parse(report.yaml_text(c.values), "x")[0] == c.values
    assert isinstance(c.values["name"], str)


def test_fine_tuning_has_its_own_defaults_where_the_environment_decides(tmp_path: Path) -> None:
    c = read(
        tmp_path,
        "torchrun -m verl.trainer.fsdp_sft_trainer data.train_files=/d/t.parquet "
        "data.train_batch_size=$SIZE optim.lr=$LR",
    )
    v = found(c)
    assert (v["buffer.train_batch_size"], v["algorithm.optimizer.lr"]) == (256, 1e-5)
    assert len(c.questions) == 2 and not c.errors


def test_a_threshold_that_the_environment_decides_stays_a_parameter(tmp_path: Path) -> None:
    key = "algorithm.rollout_correction.rollout_rs"
    c = read(
        tmp_path,
        f"python3 -m verl.trainer.main_ppo {' '.join(SHARED)} {key}=seq_mean_k1 "
        f"{key}_threshold=$LIMIT",
    )
    assert found(c)[f"{key}_threshold"] == "${oc.env:LIMIT}" and not c.refused
    (error,) = made(*SHARED, f"{key}=seq_mean_k1", f"{key}_threshold=high").errors
    assert "write a number above 0" in error


def test_fine_tuning_on_several_files_is_refused() -> None:
    c = made(
        "data.train_files=[/d/a.parquet, /d/b.parquet]",
        "data.val_files=[/d/c.parquet, /d/e.parquet]",
        program="sft",
    )
    assert [r.argument.key for r in c.refused] == ["data.train_files", "data.val_files"]


def test_fine_tuning_resumes_from_a_path_where_the_mode_says_so() -> None:
    path = "trainer.resume_from_path=/c/step"
    assert "resume_from_path" not in found(
        made("data.train_files=/d/a.parquet", path, program="sft")
    )
    v = found(
        made(
            "data.train_files=/d/a.parquet", path, "trainer.resume_mode=resume_path", program="sft"
        )
    )
    assert v["resume_from_path"] == "/c/step"


def test_several_passes_over_several_mini_batches_are_told() -> None:
    def told(*arguments: str) -> bool:
        return any(note.startswith("ppo_epochs: each pass") for note in made(*arguments).notes)

    passes = f"{A}.ppo_epochs=2"
    assert told(*SHARED, passes) and not told(*SHARED)
    assert not told("data.train_batch_size=64", f"{A}.ppo_mini_batch_size=64", passes)


def test_a_limit_of_rows_is_one_of_all_files() -> None:
    one = made(*SHARED, "data.train_max_samples=1000")
    assert (
        found(one)[f"{T}.max_rows"] == 1000
        and "at random" in outcome(one, "data.train_max_samples")[1]
    )
    two = made(
        *SHARED, "data.train_files=[a/x.parquet, b/x.parquet]", "data.train_max_samples=1000"
    )
    assert outcome(two, "data.train_max_samples")[0] == "refused"
    assert not any("max_rows" in key for key in found(two))


def test_the_asynchronous_recipe_has_its_own_defaults() -> None:
    v = found(
        made(
            f"{A}.use_dynamic_bsz=True",
            "async_training.trigger_parameter_sync_step=8",
            program="fully_async",
        )
    )
    assert (
        v["synchronizer.staleness_threshold"],
        v["explorer.eval_interval"],
        v["buffer.total_tasks"],
    ) == (0.1, 8, 100)
    stated = (
        "async_training.staleness_threshold=0.5",
        "rollout.test_freq=0",
        "rollout.total_rollout_steps=64",
    )
    v = found(made(f"{A}.use_dynamic_bsz=True", *stated, program="fully_async"))
    assert (
        v["synchronizer.staleness_threshold"],
        v["explorer.eval_interval"],
        v["buffer.total_tasks"],
    ) == (0.5, 0, 64)


@pytest.mark.parametrize("term", [f"{A}.use_kl_loss=True", f"{A}.entropy_coeff=0.01"])
def test_terms_beside_a_loss_of_sequences_keep_their_aggregation(term: str) -> None:
    gspo = f"{A}.policy_loss.loss_mode=gspo"
    assert found(made(gspo, term))["algorithm.loss_agg_mode"] == "token-mean"
    assert (
        found(made(gspo, term, f"{A}.loss_agg_mode=seq-mean-token-sum"))["algorithm.loss_agg_mode"]
        == "seq-mean-token-sum"
    )


def test_an_evaluation_tells_what_only_running_knows(tmp_path: Path) -> None:
    c = read(
        tmp_path,
        "python3 -m verl.trainer.main_eval data.path=$(newest /out) "
        "custom_reward_function.path=r.py",
    )
    assert [r.argument.key for r in c.refused] == ["data.path"]


def test_keys_of_scripts_that_the_documents_do_not_have_are_known_everywhere() -> None:
    (said,) = describe(f"{R}.quantization")
    assert said.meaning.startswith("is not offered: weights cannot be loaded")
    model = {"model": {"model_path": "m", "max_prompt_tokens": 8, "max_response_tokens": 8}}

    def given(name: str, value: object) -> None:
        trinity.convert({**model, "trainer": {"trainer_config": {"rollout": {name: value}}}}, {})

    given("skip_tokenizer_init", True)
    given("expert_parallel_size", 1)
    with pytest.raises(ConfigError, match="is not offered: expert parallel"):
        given("expert_parallel_size", 2)


@pytest.mark.parametrize(
    ("name", "asks"), [("ppo_trainer", 0), ("ppo_trainer.yaml", 0), ("gsm8k_multiturn_grpo", 1)]
)
def test_a_configuration_of_ones_own_is_a_question(name: str, asks: int, tmp_path: Path) -> None:
    c = read(
        tmp_path,
        f"python3 -m verl.trainer.main_ppo --config-path=/c --config-name={name} "
        f"{' '.join(SHARED)}",
    )
    assert len(c.questions) == asks and not c.refused
    assert all(
        "line 1: --config-name gsm8k_multiturn_grpo is a file that is not read here" in q
        for q in c.questions
    )

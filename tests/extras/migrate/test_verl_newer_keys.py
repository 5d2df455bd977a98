"""veRL's newer and older spellings, and what a person has to decide."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rft.cli.main import main
from rft.errors import ConfigError
from rft.extras.migrate.convert.launch import read_launch
from rft.extras.migrate.convert.names import KL
from rft.extras.migrate.convert.verl import Conversion, convert
from tests.extras.migrate.test_verl_vectors import SHARED, A, R, found, made, outcome

RM = "reward_model"
EXAMPLES = "buffer.trainer_input.experience_buffer"
CORRECTION = "algorithm.rollout_correction"


def test_a_reward_model_of_the_reward_loop_is_one_more_engine() -> None:
    c = made(
        *SHARED,
        f"{RM}.enable=True",
        f"{RM}.use_reward_loop=True",
        f"{RM}.model.path=/m/rm",
        f"{RM}.num_workers=8",
        f"{RM}.rollout.name=vllm",
        f"{RM}.rollout.tensor_model_parallel_size=2",
        f"{RM}.rollout.gpu_memory_utilization=0.8",
        f"{RM}.rollout.prompt_length=2048",
        f"{RM}.rollout.response_length=1024",
        f"{RM}.rollout.free_cache_engine=True",
    )
    (model,) = c.values["explorer"]["auxiliary_models"]
    assert (model["engine_num"], model["tensor_parallel_size"]) == (1, 2), "a quarter of eight GPUs"
    assert (model["max_model_len"], model["gpu_memory_utilization"], model["task"]) == (
        3072,
        0.8,
        "score",
    )
    assert not c.refused and not c.errors and not c.questions


def test_rewards_in_the_section_of_newer_versions() -> None:
    """reward.* of veRL 1dda039b; its own legacy_reward_impl.yaml says which older keys mean the
    same.
    """
    manager = (
        "overlong_buffer_cfg.enable=True",
        "overlong_buffer_cfg.len=64",
        "overlong_buffer_cfg.penalty_factor=0.5",
    )
    older = made(
        *SHARED,
        f"{RM}.reward_manager=dapo",
        *(f"{RM}.reward_kwargs.{k}" for k in manager),
        "custom_reward_function.path=f.py",
    )
    newer = made(
        *SHARED,
        "reward.reward_manager.name=dapo",
        *(f"reward.reward_kwargs.{k}" for k in manager),
        "reward.custom_reward_function.path=f.py",
    )
    assert newer.values == older.values and not newer.errors and not newer.refused
    served = [
        made(
            *SHARED,
            f"{begin}.enable=True",
            f"{path}=/m/rm",
            f"{begin}.rollout.tensor_model_parallel_size=2",
        ).values
        for begin, path in (
            (RM, f"{RM}.model.path"),
            ("reward.reward_model", "reward.reward_model.model_path"),
        )
    ]
    assert served[0] == served[1] and served[0]["explorer"]["auxiliary_models"]


def test_a_pool_of_its_own_gives_the_reward_model_more_gpus() -> None:
    c = made(
        *SHARED,
        f"{RM}.enable=True",
        f"{RM}.model.path=/m/rm",
        f"{RM}.enable_resource_pool=True",
        f"{RM}.nnodes=1",
        f"{RM}.n_gpus_per_node=8",
        f"{RM}.rollout.tensor_model_parallel_size=4",
    )
    assert c.values["cluster"] == {"node_num": 2, "gpu_per_node": 8}
    assert c.values["explorer"]["auxiliary_models"][0]["engine_num"] == 2 and not c.errors


def test_a_function_beside_a_reward_model_is_a_question() -> None:
    c = made(
        *SHARED, f"{RM}.enable=True", f"{RM}.model.path=/m/rm", "custom_reward_function.path=grm.py"
    )
    (question,) = c.questions
    assert "grm.py may ask the reward model itself" in question and "rft new judge" in question


@pytest.mark.parametrize(
    ("arguments", "key", "value"),
    [
        (
            (
                f"{CORRECTION}.rollout_rs=geometric",
                f"{CORRECTION}.rollout_rs_threshold=1.001",
                f"{CORRECTION}.rollout_rs_threshold_lower=0.999",
            ),
            f"{CORRECTION}.rollout_rs_threshold",
            "0.999_1.001",
        ),
        (
            (f"{CORRECTION}.rollout_rs=seq_mean_k1", f"{CORRECTION}.rollout_rs_threshold=2"),
            f"{CORRECTION}.rollout_rs_threshold",
            2.0,
        ),
        (
            (
                f"{CORRECTION}.rollout_rs='token_k1,seq_max_k2'",
                f"{CORRECTION}.rollout_rs_threshold='0.5_2.0,0.1'",
            ),
            f"{CORRECTION}.rollout_rs_threshold",
            "0.5_2.0,0.1",
        ),
        (
            ("algorithm.adv_estimator=gdpo", 'algorithm.gdpo_reward_keys=["accuracy","format"]'),
            "algorithm.advantage_fn_args.weights.accuracy",
            1.0,
        ),
        (
            (
                "algorithm.adv_estimator=gdpo",
                "algorithm.gdpo_reward_keys=[accuracy,format]",
                "algorithm.gdpo_reward_weights=[1.0,0.5]",
            ),
            "algorithm.advantage_fn_args.weights.format",
            0.5,
        ),
        (
            ("algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[accuracy]"),
            "algorithm.algorithm_type",
            "gdpo",
        ),
        (
            (f"{A}.loss_mode=clip_cov", f"{A}.clip_cov_ratio=0.1"),
            "algorithm.policy_loss_fn_args.clip_cov_ratio",
            0.1,
        ),
        (
            (f"{A}.policy_loss.loss_mode=sapo", f"{A}.policy_loss.tau_neg=2.0"),
            "algorithm.policy_loss_fn_args.tau_neg",
            2.0,
        ),
        (
            (f"{A}.policy_loss.loss_mode=cispo", f"{A}.clip_ratio_low=10"),
            "algorithm.policy_loss_fn_args.clip_range_low",
            1.0,
        ),
        ((f"{A}.fsdp_config.fsdp_size=8",), "trainer.fsdp_size", None),
        ((f"{A}.profiler.ranks=[0,4,7]",), "trainer.profiler.ranks", [0]),
        (
            (f"{R}.pipeline_model_parallel_size=2",),
            "explorer.rollout_model.pipeline_parallel_size",
            2,
        ),
        (
            (f"{R}.agent.default_agent_loop=tool_agent",),
            "buffer.explorer_input.default_workflow_type",
            "tool_workflow",
        ),
        (
            ("actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.lora_adapter_path=/a"),
            "model.lora_configs[0].path",
            "/a",
        ),
    ],
)
def test_becomes(arguments: tuple[str, ...], key: str, value: Any) -> None:
    c = made(*SHARED, *arguments)
    assert found(c).get(key, -1 if value is None else None) == (-1 if value is None else value)
    assert not c.refused and not c.errors, (c.refused, c.errors)


def test_evaluation_of_deepscalers_copy() -> None:
    """There the temperature counts without do_sample, so nothing is asked; 0 is greedy, as its code
    has it.
    """
    c = made(
        *SHARED,
        "data.val_files=/d/test.parquet",
        f"{R}.val_temperature=0.6",
        f"{R}.n_val=16",
        f"{R}.mode=sync",
    )
    held_out = "buffer.explorer_input.eval_tasksets[0]"
    assert (
        found(c)[f"{held_out}.rollout_args.temperature"],
        found(c)[f"{held_out}.repeat_times"],
    ) == (0.6, 16)
    assert not c.refused and not c.errors and not c.questions, (c.refused, c.errors, c.questions)
    greedy = made(
        *SHARED, "data.val_files=/d/test.parquet", f"{R}.val_temperature=0", f"{R}.n_val=1"
    )
    assert (
        found(greedy)[f"{held_out}.rollout_args.temperature"] == 0
        and not greedy.questions
        and not greedy.refused
    )


SFT = (
    "data.train_files=/d/train.parquet",
    "data.val_files=/d/test.parquet",
    "model.path=/m/q",
    "engine=fsdp",
    "optim=fsdp",
)


def trainer(tmp_path: Path, *arguments: str) -> Conversion:
    """Of the program that took the place of fsdp_sft_trainer; its keys are those of the ordinary
    trainer's groups.
    """
    (tmp_path / "sft.sh").write_text(
        f"torchrun --nproc_per_node=2 -m verl.trainer.sft_trainer {' '.join((*SFT, *arguments))}\n"
    )
    return convert(read_launch(tmp_path / "sft.sh"))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            (),
            {
                "model.model_path": "/m/q",
                "algorithm.optimizer.lr": 1e-3,
                "algorithm.optimizer.betas": [0.9, 0.999],
                "algorithm.optimizer.lr_scheduler_type": "constant",
                "trainer.use_dynamic_bsz": True,
                "model.max_model_len": 1024,
                "trainer.max_token_len_per_gpu": 8192,
                "cluster.gpu_per_node": 2,
                f"{EXAMPLES}.eval_split": "test",
                f"{EXAMPLES}.format.messages_key": "messages",
                f"{EXAMPLES}.format.enable_concatenated_multi_turn": True,
            },
        ),
        (
            ("data.messages_key=turns", "data.tools_key=functions"),
            {
                f"{EXAMPLES}.format.messages_key": "turns",
                f"{EXAMPLES}.format.tools_key": "functions",
            },
        ),
        (
            ("data.use_dynamic_bsz=False",),
            {"trainer.use_dynamic_bsz": False, "trainer.micro_batch_size_per_gpu": 4},
        ),
        (
            (
                "optim.lr_warmup_steps_ratio=0.2",
                "optim.lr_scheduler_type=cosine",
                "optim.min_lr_ratio=0.1",
                "optim.clip_grad=0.5",
            ),
            {
                "algorithm.optimizer.lr_warmup_steps_ratio": 0.2,
                "algorithm.optimizer.lr_scheduler_type": "cosine",
                "algorithm.optimizer.min_lr_ratio": 0.1,
                "trainer.grad_clip": 0.5,
            },
        ),
        (
            (
                "engine.ulysses_sequence_parallel_size=2",
                "engine.param_offload=True",
                "engine.strategy=fsdp2",
                "engine.dtype=bfloat16",
            ),
            {
                "trainer.ulysses_sequence_parallel_size": 2,
                "trainer.offload_policy": True,
                "trainer.param_dtype": "bfloat16",
            },
        ),
        (
            (
                "model.lora_rank=8",
                "model.tokenizer_path=/t",
                "+data.apply_chat_template_kwargs.enable_thinking=False",
            ),
            {
                "model.lora_configs[0].lora_rank": 8,
                "model.tokenizer_path": "/t",
                f"{EXAMPLES}.format.chat_template_args.enable_thinking": False,
            },
        ),
        (
            (
                "profiler.ranks=[0]",
                "profiler.enable=True",
                "profiler.tool_config.torch.discrete=True",
            ),
            {"trainer.profiler.ranks": [0]},
        ),
        (
            ("checkpoint.save_contents=[model]", "trainer.seed=3"),
            {"trainer.checkpoint.save_contents": ["model"], "seed": 3},
        ),
    ],
)
def test_keys_of_sft_trainer_become(
    tmp_path: Path, arguments: tuple[str, ...], expected: dict[str, Any]
) -> None:
    c = trainer(tmp_path, *arguments)
    assert not c.refused and not c.errors and not c.questions, (c.refused, c.errors)
    assert expected.items() <= found(c).items(), {k: found(c).get(k) for k in expected}


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("engine=megatron", "megatron is not offered; use fsdp"),
        ("data.train_max_samples=100", "put fewer into it"),
        ("data.enable_thinking_key=think", "write model.enable_thinking"),
        ("engine.qat.enable=True", "is not offered"),
        ("model.mtp.enable=True", "not trained"),
        ("model.hf_config_path=/c", "put it there"),
        ("data.truncation=left", "are not cut"),
    ],
)
def test_keys_of_sft_trainer_that_would_change_results_are_refused(
    tmp_path: Path, argument: str, says: str
) -> None:
    (row,) = trainer(tmp_path, argument).refused
    assert says in row.outcome.reason


def test_data_for_a_model_of_images_is_a_question(tmp_path: Path) -> None:
    """Its script names nothing else that tells."""
    (question,) = trainer(tmp_path, "model.path=/m/Qwen3-VL-2B-Instruct").questions
    assert (
        question.startswith("Do the rows hold images?")
        and not trainer(tmp_path, "model.path=/m/vlad").questions
    )


def test_the_critic_s_engine_stands_at_the_critic() -> None:
    given = (
        "algorithm.adv_estimator=gae",
        "critic.fsdp.param_offload=True",
        "critic.fsdp.ulysses_sequence_parallel_size=2",
        f"{A}.fsdp_config.ulysses_sequence_parallel_size=2",
    )
    c = made(*SHARED, *given)
    assert (
        found(c)["trainer.critic.offload_policy"] is True
        and found(c)["trainer.ulysses_sequence_parallel_size"] == 2
    )
    assert not c.refused and not c.errors, (c.refused, c.errors)


def test_no_steps_of_warm_up_beside_a_ratio_are_told() -> None:
    given = (f"{A}.optim.lr_warmup_steps=0", f"{A}.optim.lr_warmup_steps_ratio=0.1")
    c = made(*SHARED, *given)
    assert (
        found(c)["algorithm.optimizer.lr_warmup_steps"] == -1
        and found(c)["algorithm.optimizer.lr_warmup_steps_ratio"] == 0.1
    )
    assert any(w.startswith(f"{A}.optim.lr_warmup_steps 0 and a ratio") for w in c.warnings)
    assert not any(
        "lr_warmup_steps 0" in w for i in (0, 1) for w in made(*SHARED, given[i]).warnings
    )


def test_a_loss_is_not_given_arguments_that_it_does_not_read() -> None:
    c = made(
        *SHARED,
        f"{A}.policy_loss.loss_mode=kl_cov",
        f"{A}.clip_ratio_low=0.2",
        f"{A}.clip_ratio_c=10",
    )
    assert not c.errors and not any("clip_r" in k for k in found(c))
    assert outcome(c, f"{A}.clip_ratio_c") == ("ignored", "this loss does not read it")


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        (f"{CORRECTION}.rollout_token_veto_threshold=1e-4", "older veRL"),
        (f"{R}.agent.agent_loop_config_path=loop.yaml", "rft new workflow"),
        (f"{R}.multi_turn.interaction_config_path=i.yaml", "rft new env"),
        (f"{R}.name=sglang", "--set explorer.rollout_model.engine_type=vllm"),
        ("data.sampler.class_path=s.py", "data_selector"),
    ],
)
def test_a_person_decides(argument: str, says: str) -> None:
    c = made(*SHARED, argument)
    (row,) = c.refused
    assert says in row.outcome.reason and not c.errors


IMAGES = ("data.image_key=pictures", "actor_rollout_ref.model.path=/m/Qwen2.5-VL-3B")
TOWER = f"{A}.freeze_vision_tower"


@pytest.mark.parametrize(
    ("more", "column", "trained"),
    [
        ((), None, None),
        (IMAGES[:1], "pictures", True),
        (IMAGES[1:], "images", True),  # veRL's default column
        ((*IMAGES, f"{TOWER}=False"), "pictures", True),
        ((*IMAGES, f"{TOWER}=True"), "pictures", False),
        ((*IMAGES, "actor_rollout_ref.model.lora_rank=8"), "pictures", None),  # the adapter alone
        ((f"{TOWER}=False",), None, None),
    ],
)
def test_images_have_their_column_and_their_tower(
    more: tuple[str, ...], column: str | None, trained: bool | None
) -> None:
    c = made(*SHARED, *more)
    values = found(c)
    assert values.get("buffer.explorer_input.tasksets[0].format.image_key") == column
    assert values.get("buffer.explorer_input.eval_tasksets[0].format.image_key") == column
    assert values.get("trainer.train_vision") == trained and not c.refused and not c.errors


def test_sizes_of_images_are_the_models() -> None:
    sizes = "{max_pixels: 400, min_pixels: 16}"
    for given in (
        (f"data.mm_processor_kwargs={sizes}",),
        ("data.mm_processor_kwargs.max_pixels=400", "data.mm_processor_kwargs.min_pixels=16"),
    ):
        values = found(made(*SHARED, *given))
        assert values["model.image_processor_args.max_pixels"] == 400
        assert values["model.image_processor_args.min_pixels"] == 16
    (row,) = made(*SHARED, "data.mm_processor_kwargs={sampling_rate: 16000}").refused
    assert row.outcome.reason == "sampling_rate: unknown argument"


def test_the_way_out_that_is_named_is_one() -> None:
    c = made(*SHARED, f"{R}.name=sglang", overrides=["explorer.rollout_model.engine_type=vllm"])
    assert not c.refused and not c.errors


def test_megatron_is_one_refusal() -> None:
    keys = [f"{A}.megatron.override_transformer_config.{n}=1" for n in ("a", "b", "c")]
    c = made(*SHARED, f"{A}.strategy=megatron", f"{A}.optim.lr_decay_steps=10", *keys)
    assert [r.argument.key for r in c.refused] == [f"{A}.strategy"]


def test_one_step_off_is_an_offset_of_one_iteration() -> None:
    c = made(*SHARED, "rollout.nnodes=1", "rollout.n_gpus_per_node=8", program="one_step_off")
    sync = c.values["synchronizer"]
    assert (sync["sync_style"], sync["sync_interval"], sync["sync_offset"]) == ("fixed", 4, 4)
    assert (
        c.values["cluster"] == {"node_num": 2, "gpu_per_node": 8}
        and c.gpus is not None
        and c.gpus.trainer == 8
    )
    assert c.values.get("mode") is None and not c.errors


# ------------------------------------------------------------------ what only the environment tells


SCRIPT = """
python3 -m verl.trainer.main_ppo data.train_batch_size=64 actor_rollout_ref.actor.ppo_mini_batch_size=64 \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 {} "$@"
"""


def read(folder: Path, more: str) -> Conversion:
    path = folder / "run.sh"
    path.write_text(SCRIPT.format(more), encoding="utf-8")
    return convert(read_launch(path))


@pytest.mark.parametrize(
    ("given", "key", "value", "asked"),
    [
        (
            "trainer.nnodes=$SLURM_JOB_NUM_NODES",
            "cluster.node_num",
            1,
            "left to $SLURM_JOB_NUM_NODES",
        ),
        ("trainer.nnodes=${NODES:-}", "cluster.node_num", 1, "is empty"),
        (
            "actor_rollout_ref.actor.use_kl_loss=$USE",
            "algorithm.kl_loss_fn",
            "none",
            "left to $USE",
        ),
        (
            "actor_rollout_ref.model.path=${MODEL:-}",
            "model.model_path",
            "~/models/deepseek-llm-7b-chat",
            "is empty",
        ),
    ],
)
def test_a_parameter_gets_verl_s_default_and_a_question(
    tmp_path: Path, given: str, key: str, value: Any, asked: str
) -> None:
    c = read(tmp_path, given)
    (question,) = c.questions
    assert asked in question and question.startswith("line 3: ")
    assert found(c)[key] == value and not c.errors and not c.refused


def test_a_text_of_the_environment_stays_a_parameter(tmp_path: Path) -> None:
    c = read(
        tmp_path,
        "actor_rollout_ref.model.path=$MODEL data.train_files=$TRAIN "
        "data.val_files=$HOME/d/test.parquet",
    )
    assert found(c)["model.model_path"] == "${oc.env:MODEL}" and not c.questions and not c.errors
    (taskset,) = c.values["buffer"]["explorer_input"]["tasksets"]
    assert taskset["path"] == "${oc.env:TRAIN}" and "split" not in taskset


def test_division_by_zero_ends_as_bash_says(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="division by 0"):
        read(tmp_path, "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$((4096 / sp))")


# ------------------------------------------------------------------ generation


def test_generation_is_a_bench_that_writes_its_answers() -> None:
    c = made(
        "trainer.nnodes=1",
        "trainer.n_gpus_per_node=8",
        "data.path=/d/math/test.parquet",
        "data.n_samples=8",
        "data.output_path=/out/answers.parquet",
        "model.path=/m",
        "+model.trust_remote_code=True",
        "rollout.temperature=0.6",
        "rollout.top_p=0.95",
        "rollout.prompt_length=1024",
        "rollout.response_length=4096",
        "rollout.tensor_model_parallel_size=2",
        program="generation",
    )
    v = found(c)
    sets = "buffer.explorer_input.eval_tasksets[0]"
    assert not c.refused and not c.errors
    assert (v["mode"], v["explorer.eval_on_startup"], v["monitor.eval_dump_dir"]) == (
        "bench",
        True,
        "/out/answers",
    )
    assert (v[f"{sets}.path"], v[f"{sets}.split"], v[f"{sets}.repeat_times"]) == (
        "/d/math",
        "test",
        8,
    )
    assert [v[f"{sets}.rollout_args.{n}"] for n in ("temperature", "top_p", "top_k")] == [
        0.6,
        0.95,
        50,
    ]
    assert (
        v["model.max_prompt_tokens"],
        v["model.max_response_tokens"],
        v["explorer.rollout_model.engine_num"],
    ) == (
        1024,
        4096,
        4,
    )


def test_the_generation_server_has_the_trainer_s_keys() -> None:
    c = made(
        "actor_rollout_ref.model.path=/m",
        f"{R}.n=4",
        f"{R}.tensor_model_parallel_size=2",
        "trainer.n_gpus_per_node=8",
        "data.train_files=/d/test.parquet",
        program="generation",
    )
    v = found(c)
    sets = "buffer.explorer_input.eval_tasksets[0]"
    assert not c.refused and not c.errors
    assert (v[f"{sets}.repeat_times"], v[f"{sets}.rollout_args.top_p"], v["model.model_path"]) == (
        4,
        1.0,
        "/m",
    )


# ------------------------------------------------------------------ the account of what is no
# launch


@pytest.mark.parametrize("ending", ["md", "json"])
def test_a_refused_file_has_an_account_too(
    tmp_path: Path, ending: str, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "run.sh"
    report = tmp_path / f"report.{ending}"
    script.write_text("python3 -m recipe.spin.main_spin a=1\n")
    with pytest.raises(SystemExit) as done:
        main(["convert", "verl", str(script), "--report", str(report)])
    assert done.value.code == 2
    assert "recipe.spin.main_spin has no counterpart here" in report.read_text()


def test_epochs_between_checkpoints_are_the_one_argument_that_is_refused() -> None:
    c = made(
        "data.train_files=t.parquet",
        "trainer.save_freq=after_each_epoch",
        "optim.lr=2e-5",
        program="sft_trainer",
    )
    assert outcome(c, "trainer.save_freq") == (
        "refused",
        "is a number of steps here; write how many an epoch has",
    )
    assert outcome(c, "optim.lr")[0] == "mapped" and len(c.refused) == 1


def test_a_trainer_of_parts_of_nodes_is_not_told_about_micro_batches() -> None:
    c = made(
        "data.train_batch_size=512",
        f"{A}.ppo_mini_batch_size=32",
        f"{A}.use_dynamic_bsz=True",
        f"{R}.n=12",
        "trainer.nnodes=2",
        "trainer.n_gpus_per_node=6",
        "rollout.nnodes=2",
        "rollout.n_gpus_per_node=2",
        f"{R}.tensor_model_parallel_size=2",
        f"{A}.ulysses_sequence_parallel_size=4",
        program="one_step_off",
    )
    assert [w for w in c.warnings if "no whole number of nodes" in w]
    assert not [w for w in c.warnings if "micro-batches (" in w]


def test_copies_of_the_engine_that_the_environment_counts_are_asked_about() -> None:
    c = made(*SHARED, f"{R}.data_parallel_size=${{oc.env:COPIES}}")
    assert [q for q in c.questions if "data_parallel_size" in q] and not c.errors


@pytest.mark.parametrize(
    ("more", "workflow", "asks"),
    [
        ((), "tool_workflow", 1),
        ((f"{R}.multi_turn.enable=True",), "tool_workflow", 0),
        ((f"{R}.agent.default_agent_loop=tool_agent",), "tool_workflow", 0),
        ((f"{R}.multi_turn.enable=False",), "simple_workflow", 0),
    ],
)
def test_a_file_of_tools_is_not_dropped_because_a_switch_stands_elsewhere(
    more: tuple[str, ...], workflow: str, asks: int
) -> None:
    """veRL's agent loops read tool_config_path whatever multi_turn.enable is, which its examples
    set in a file of their own.
    """
    c = made(
        *SHARED,
        f"{R}.multi_turn.tool_config_path=tools.yaml",
        f"{R}.multi_turn.max_assistant_turns=4",
        *more,
    )
    v = found(c)
    assert v["buffer.explorer_input.default_workflow_type"] == workflow and len(c.questions) == asks
    args = [
        v.get(f"buffer.explorer_input.tasksets[0].workflow_args.{n}")
        for n in ("tool_config_path", "max_assistant_turns")
    ]
    assert args == (["tools.yaml", 4] if workflow == "tool_workflow" else [None, None])


AGG_MODES = """token-mean token-sum seq-mean-token-sum seq-mean-token-sum-norm
seq-mean-token-mean""".split()
LOSSES = {  # registered in veRL 1dda039b, verl/trainer/ppo/core_algos.py, and what each becomes
    "vanilla": "ppo",
    "dppo_tv": "dppo_tv",
    "dppo_kl": "dppo_kl",
    "gspo": "gspo",
    "sapo": "sapo",
    "gpg": "gpg",
    "clip_cov": "clip_cov",
    "kl_cov": "kl_cov",
    "geo_mean": "geo_mean",
    "dro": "dro",
    "cispo": "cispo",
    "bypass_mode": "ppo",
}


@pytest.mark.parametrize(("name", "becomes"), LOSSES.items())
def test_every_loss_of_verl_has_a_name_here(name: str, becomes: str) -> None:
    c = made(*SHARED, f"{A}.policy_loss.loss_mode={name}")
    assert c.values["algorithm"]["policy_loss_fn"] == becomes
    assert not c.refused and not c.errors and not c.questions


ESTIMATORS = {  # the enumeration AdvantageEstimator of that file
    "gae": "ppo",
    "grpo": "grpo",
    "reinforce_plus_plus": "reinforceplusplus",
    "reinforce_plus_plus_baseline": "reinforceplusplus_baseline",
    "remax": "remax",
    "rloo": "rloo",
    "opo": "opo",
    "grpo_passk": "grpo_passk",
    "gpg": "gpg",
    "rloo_vectorized": "rloo",
    "grpo_vectorized": "grpo",
    "optimal_token_baseline": "optimal_token_baseline",
    "tir_optimal_token_baseline": "optimal_token_baseline",
    "gdpo": "gdpo",
}


@pytest.mark.parametrize(("name", "becomes"), ESTIMATORS.items())
def test_every_estimator_of_verl_has_a_name_here(name: str, becomes: str) -> None:
    parts = ("algorithm.gdpo_reward_keys=[accuracy,format]",) if name == "gdpo" else ()
    c = made(*SHARED, f"algorithm.adv_estimator={name}", f"{R}.n=4", *parts)
    assert c.values["algorithm"]["advantage_fn"] == becomes
    assert not c.refused and not c.errors and not c.questions


@pytest.mark.parametrize("name", AGG_MODES)
def test_every_aggregation_of_verl_has_its_name_here(name: str) -> None:
    c = made(*SHARED, "algorithm.adv_estimator=grpo", f"{A}.loss_agg_mode={name}", f"{R}.n=4")
    assert c.values["algorithm"]["loss_agg_mode"] == name
    assert not c.refused and not c.errors and not c.questions


KLS = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")  # of kl_penalty; "full" is not written


@pytest.mark.parametrize("plus", ["", "+"])
@pytest.mark.parametrize("base", KLS)
def test_every_kl_of_verl_has_a_name_here(base: str, plus: str) -> None:
    loss = (f"{A}.use_kl_loss=True", f"{A}.kl_loss_coef=0.01", f"{A}.kl_loss_type={base}{plus}")
    c = made(*SHARED, "algorithm.adv_estimator=grpo", *loss, f"{R}.n=4")
    assert c.values["algorithm"]["kl_loss_fn"] == KL[base] + plus
    assert not c.refused and not c.errors and not c.questions


def test_arguments_of_the_losses_of_2026() -> None:
    """clip_ratio is DPPO's threshold of divergence in veRL, too."""
    dppo = made(*SHARED, f"{A}.policy_loss.loss_mode=dppo_kl", f"{A}.clip_ratio=0.05")
    assert dppo.values["algorithm"]["policy_loss_fn_args"] == {
        "clip_range_low": 0.05,
        "clip_range_high": 0.05,
        "clip_ratio_c": 3.0,
    }
    dro = made(*SHARED, f"{A}.policy_loss.loss_mode=dro", f"{A}.policy_loss.dro_beta=0.5")
    assert dro.values["algorithm"]["policy_loss_fn_args"] == {"dro_beta": 0.5}
    assert not dro.refused and not dppo.refused


def test_icepop_bounds_and_token_sum() -> None:
    c = made(
        *SHARED,
        f"{CORRECTION}.rollout_is=token",
        f"{CORRECTION}.rollout_is_threshold=0.5_5.0",
        f"{A}.loss_agg_mode=token-sum",
    )
    algorithm = c.values["algorithm"]
    assert algorithm["rollout_correction"]["rollout_is_threshold"] == "0.5_5.0"
    assert algorithm["loss_agg_mode"] == "token-sum"
    assert not c.refused and not c.errors and not c.questions

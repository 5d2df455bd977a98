"""Both worked examples, key by key, in both profiles."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rft.config import yamlfile
from rft.config.schema.source import dotted, leaves
from rft.extras.migrate.convert import report
from rft.extras.migrate.convert.launch import Argument, Launch
from rft.extras.migrate.convert.verl import Conversion, convert
from rft.preflight.check import check

HOME = "${oc.env:HOME}"
PPO = f"""
algorithm.adv_estimator=gae
data.train_files=['{HOME}/data/gsm8k/train.parquet', '{HOME}/data/math/train.parquet']
data.val_files=['{HOME}/data/gsm8k/test.parquet', '{HOME}/data/math/test.parquet']
data.train_batch_size=1024
data.max_prompt_length=1024
data.max_response_length=512
data.filter_overlong_prompts=True
data.truncation=error
data.return_raw_chat=True
actor_rollout_ref.model.path={HOME}/models/Qwen2-7B-Instruct
actor_rollout_ref.actor.optim.lr=1e-6
actor_rollout_ref.model.use_remove_padding=True
actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1
actor_rollout_ref.actor.ppo_mini_batch_size=256
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16
actor_rollout_ref.actor.use_kl_loss=False
actor_rollout_ref.model.enable_gradient_checkpointing=True
actor_rollout_ref.actor.fsdp_config.param_offload=False
actor_rollout_ref.actor.fsdp_config.optimizer_offload=False
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16
actor_rollout_ref.rollout.tensor_model_parallel_size=1
actor_rollout_ref.rollout.name=vllm
actor_rollout_ref.rollout.gpu_memory_utilization=0.6
critic.optim.lr=1e-5
critic.model.use_remove_padding=True
critic.optim.lr_warmup_steps_ratio=0.05
critic.model.path={HOME}/models/Qwen2-7B-Instruct
critic.model.enable_gradient_checkpointing=True
critic.ppo_micro_batch_size_per_gpu=32
critic.model.fsdp_config.param_offload=False
critic.model.fsdp_config.optimizer_offload=False
reward_model.enable=True
reward_model.model.path={HOME}/models/FsfairX-LLaMA3-RM-v0.1
reward_model.model.use_remove_padding=True
reward_model.model.fsdp_config.param_offload=True
reward_model.micro_batch_size_per_gpu=32
algorithm.use_kl_in_reward=False
trainer.critic_warmup=0
trainer.logger=["console","wandb"]
trainer.project_name=verl_example
trainer.val_before_train=False
trainer.experiment_name=Qwen2-7B-Instruct_hybrid_rm
trainer.n_gpus_per_node=8
trainer.nnodes=1
trainer.save_freq=20
trainer.test_freq=5
trainer.total_epochs=15
"""
GRPO = f"""
algorithm.adv_estimator=grpo
data.train_files={HOME}/data/gsm8k/train.parquet
data.val_files={HOME}/data/gsm8k/test.parquet
data.train_batch_size=1024
data.max_prompt_length=512
data.max_response_length=512
data.filter_overlong_prompts=True
data.truncation=error
actor_rollout_ref.model.path=deepseek-ai/deepseek-llm-7b-chat
actor_rollout_ref.actor.optim.lr=1e-6
actor_rollout_ref.model.use_remove_padding=True
actor_rollout_ref.actor.ppo_mini_batch_size=256
actor_rollout_ref.actor.use_dynamic_bsz=True
actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24000
actor_rollout_ref.actor.use_kl_loss=True
actor_rollout_ref.actor.kl_loss_coef=0.001
actor_rollout_ref.actor.kl_loss_type=low_var_kl
actor_rollout_ref.actor.entropy_coeff=0
actor_rollout_ref.model.enable_gradient_checkpointing=True
actor_rollout_ref.actor.fsdp_config.param_offload=False
actor_rollout_ref.actor.fsdp_config.optimizer_offload=False
actor_rollout_ref.rollout.tensor_model_parallel_size=2
actor_rollout_ref.rollout.name=vllm
actor_rollout_ref.rollout.gpu_memory_utilization=0.6
actor_rollout_ref.rollout.n=8
actor_rollout_ref.ref.fsdp_config.param_offload=True
algorithm.use_kl_in_reward=False
trainer.critic_warmup=0
trainer.logger=["console","wandb"]
trainer.project_name=verl_grpo_example_gsm8k
trainer.experiment_name=deepseek_llm_7b_function_rm_seq_packing
trainer.n_gpus_per_node=8
trainer.nnodes=1
trainer.save_freq=20
trainer.test_freq=5
trainer.total_epochs=15
"""


def launch(text: str, program: Any = "main_ppo", name: str = "run.sh") -> Launch:
    """The launch of `key=value` lines."""
    found = []
    for line, one in enumerate(text.strip().splitlines(), 1):
        key, _, value = one.strip().partition("=")
        plain = value if "${" in value and not value.startswith("[") else yamlfile.scalar(value)
        found.append(
            Argument(
                key.lstrip("+~"), plain, value, line, prefix=key[: len(key) - len(key.lstrip("+~"))]
            )
        )
    return Launch(program, tuple(found), passed_through=False, path=f"examples/{name}")


def values(c: Conversion) -> dict[str, Any]:
    return {dotted(loc): value for loc, value in leaves(c.values, lists=False)}


T = "buffer.explorer_input.tasksets"
E = "buffer.explorer_input.eval_tasksets"
PPO_BOTH = {
    "algorithm.algorithm_type": "ppo",
    "algorithm.advantage_fn": "ppo",
    "synchronizer.sync_interval": 4,
    "model.max_prompt_tokens": 1024,
    "model.max_response_tokens": 512,
    "model.model_path": f"{HOME}/models/Qwen2-7B-Instruct",
    "algorithm.optimizer.lr": 1e-6,
    "algorithm.optimizer.lr_warmup_steps_ratio": 0.1,
    "buffer.batch_size": 256,
    "algorithm.kl_loss_fn": "none",
    "explorer.rollout_model.tensor_parallel_size": 1,
    "explorer.rollout_model.gpu_memory_utilization": 0.6,
    "model.critic_model_path": f"{HOME}/models/Qwen2-7B-Instruct",
    "explorer.auxiliary_models[0].model_path": f"{HOME}/models/FsfairX-LLaMA3-RM-v0.1",
    "algorithm.kl_penalty_fn": "none",
    "monitor.monitor_type": "wandb",
    "project": "verl_example",
    "explorer.eval_on_startup": False,
    "name": "Qwen2-7B-Instruct_hybrid_rm",
    "cluster.gpu_per_node": 8,
    "cluster.node_num": 1,
    "buffer.total_epochs": 15,
    # values that no argument states
    "checkpoint_root_dir": "./checkpoints",
    "algorithm.repeat_times": 1,
    "buffer.train_batch_size": 256,
    f"{T}[0].name": "gsm8k",
    f"{T}[0].storage_type": "file",
    f"{T}[0].path": f"{HOME}/data/gsm8k",
    f"{T}[0].split": "train",
    f"{T}[1].name": "math",
    f"{T}[1].storage_type": "file",
    f"{T}[1].path": f"{HOME}/data/math",
    f"{T}[1].split": "train",
    f"{E}[0].name": "gsm8k_eval",
    f"{E}[0].storage_type": "file",
    f"{E}[0].path": f"{HOME}/data/gsm8k",
    f"{E}[0].split": "test",
    f"{E}[1].name": "math_eval",
    f"{E}[1].path": f"{HOME}/data/math",
    f"{E}[1].split": "test",
    "explorer.rollout_model.engine_num": 2,
    "explorer.auxiliary_models[0].engine_num": 2,
    "explorer.auxiliary_models[0].tensor_parallel_size": 1,
    "synchronizer.sync_style": "fixed",
    "synchronizer.sync_timeout": 1200,
}
PPO_GUIDE = PPO_BOTH | {
    "model.enable_prompt_truncation": True,
    "trainer.row_layout": "auto",
    "trainer.micro_batch_size_per_gpu": 16,
    "trainer.enable_gradient_checkpointing": True,
    "trainer.offload_policy": False,
    "trainer.log_prob_micro_batch_size_per_gpu": 16,
    "trainer.critic.optimizer.lr": 1e-5,
    "trainer.critic.row_layout": "auto",
    "trainer.critic.optimizer.lr_warmup_steps_ratio": 0.05,
    "trainer.critic.enable_gradient_checkpointing": True,
    "trainer.critic.micro_batch_size_per_gpu": 32,
    "trainer.critic.offload_policy": False,
    "trainer.critic_warmup": 0,
    "trainer.save_interval": 20,
    "explorer.eval_interval": 5,
    **{f"{s}[{i}].format.prompt_key": "prompt" for s in (T, E) for i in (0, 1)},
    **{f"{s}[{i}].format.response_key": "answer" for s in (T, E) for i in (0, 1)},
    f"{T}[1].rollout_args.temperature": 1.0,
    "synchronizer.sync_offset": 1,
}
PPO_EXACT = PPO_BOTH | {
    **{f"{s}[{i}].filter_overlong_prompts": True for s in (T, E) for i in (0, 1)},
    "trainer.row_layout": "auto",
    "trainer.micro_batch_size_per_gpu": 16,
    "trainer.enable_gradient_checkpointing": True,
    "trainer.offload_policy": False,
    "trainer.log_prob_micro_batch_size_per_gpu": 16,
    "explorer.rollout_model.engine_type": "vllm",
    "trainer.critic.optimizer.lr": 1e-5,
    "trainer.critic.row_layout": "auto",
    "trainer.critic.optimizer.lr_warmup_steps_ratio": 0.05,
    "trainer.critic.enable_gradient_checkpointing": True,
    "trainer.critic.micro_batch_size_per_gpu": 32,
    "trainer.critic.offload_policy": False,
    "explorer.auxiliary_models[0].task": "score",
    **{f"{T}[{i}].default_reward_fn_type": "reward_model" for i in (0, 1)},
    "trainer.critic_warmup": 0,
    "trainer.save_interval": 80,
    "explorer.eval_interval": 20,
    **{f"{s}[{i}].format.preset": "verl" for s in (T, E) for i in (0, 1)},
    "model.temperature": 1.0,
    **{f"{E}[{i}].rollout_args.temperature": 0 for i in (0, 1)},
    **{f"{E}[{i}].repeat_times": 1 for i in (0, 1)},
    "synchronizer.sync_offset": 0,
    # veRL's defaults that differ from ours
    "algorithm.optimizer.lr_warmup_from_zero": True,
    "trainer.critic.optimizer.lr_warmup_from_zero": True,
    "algorithm.optimizer.min_lr_ratio": 0.0,
    "algorithm.optimizer.weight_decay": 0.01,
    "algorithm.optimizer.betas": [0.9, 0.999],
    "algorithm.optimizer.lr_scheduler_type": "constant",
    "algorithm.policy_loss_fn": "ppo",
    "algorithm.policy_loss_fn_args.clip_range_low": 0.2,
    "algorithm.policy_loss_fn_args.clip_range_high": 0.2,
    "algorithm.policy_loss_fn_args.clip_ratio_c": 3.0,
    "algorithm.entropy_loss_fn_args.entropy_coef": 0.0,
    "algorithm.loss_agg_mode": "token-mean",
    "algorithm.advantage_fn_args.gamma": 1.0,
    "algorithm.advantage_fn_args.lam": 1.0,
    "model.enable_prompt_truncation": False,
    "trainer.use_dynamic_bsz": False,
    "trainer.grad_clip": 1.0,
    "trainer.critic.cliprange_value": 0.5,
    **{f"{T}[{i}].data_selector.selector_type": "shuffle" for i in (0, 1)},
}
GRPO_BOTH = {
    "algorithm.algorithm_type": "grpo",
    "algorithm.advantage_fn": "grpo",
    "synchronizer.sync_interval": 4,
    "model.max_prompt_tokens": 512,
    "model.max_response_tokens": 512,
    "model.model_path": "deepseek-ai/deepseek-llm-7b-chat",
    "algorithm.optimizer.lr": 1e-6,
    "buffer.batch_size": 256,
    "trainer.use_dynamic_bsz": True,
    "trainer.max_token_len_per_gpu": 24000,
    "algorithm.kl_loss_fn": "low_var_kl",
    "algorithm.kl_loss_fn_args.kl_coef": 0.001,
    "algorithm.entropy_loss_fn_args.entropy_coef": 0,
    "explorer.rollout_model.tensor_parallel_size": 2,
    "explorer.rollout_model.gpu_memory_utilization": 0.6,
    "algorithm.repeat_times": 8,
    "algorithm.kl_penalty_fn": "none",
    "monitor.monitor_type": "wandb",
    "project": "verl_grpo_example_gsm8k",
    "name": "deepseek_llm_7b_function_rm_seq_packing",
    "cluster.gpu_per_node": 8,
    "cluster.node_num": 1,
    "buffer.total_epochs": 15,
    "checkpoint_root_dir": "./checkpoints",
    "buffer.train_batch_size": 2048,
    f"{T}[0].name": "gsm8k",
    f"{T}[0].storage_type": "file",
    f"{T}[0].path": f"{HOME}/data/gsm8k",
    f"{T}[0].split": "train",
    f"{E}[0].name": "gsm8k_eval",
    f"{E}[0].path": f"{HOME}/data/gsm8k",
    f"{E}[0].split": "test",
    "synchronizer.sync_style": "fixed",
    "synchronizer.sync_timeout": 1200,
}
GRPO_GUIDE = GRPO_BOTH | {
    "model.enable_prompt_truncation": True,
    "trainer.row_layout": "auto",
    "trainer.enable_gradient_checkpointing": True,
    "trainer.offload_policy": False,
    "trainer.ref.param_offload": True,
    "trainer.critic_warmup": 0,
    "trainer.save_interval": 20,
    "explorer.eval_interval": 5,
    **{f"{s}[0].format.prompt_key": "prompt" for s in (T, E)},
    **{f"{s}[0].format.response_key": "answer" for s in (T, E)},
    "explorer.rollout_model.engine_num": 1,
    "synchronizer.sync_offset": 1,
}
GRPO_EXACT = GRPO_BOTH | {
    **{f"{s}[0].filter_overlong_prompts": True for s in (T, E)},
    **{f"{s}[0].format.preset": "verl" for s in (T, E)},
    "trainer.row_layout": "auto",
    "trainer.enable_gradient_checkpointing": True,
    "trainer.offload_policy": False,
    "trainer.ref.param_offload": True,
    "explorer.rollout_model.engine_type": "vllm",
    "trainer.save_interval": 80,
    "explorer.eval_interval": 20,
    f"{E}[0].rollout_args.temperature": 0,
    f"{E}[0].repeat_times": 1,
    "explorer.rollout_model.engine_num": 2,  # 6 trainer GPUs do not divide 2048 rows
    "synchronizer.sync_offset": 0,
    "algorithm.advantage_fn_args.norm_by_std": True,
    "algorithm.optimizer.min_lr_ratio": 0.0,
    "model.temperature": 1.0,
}
ABSENT = {  # beginnings of keys
    ("ppo", "guide"): (
        "trainer.use_dynamic_bsz",
        "trainer.max_token_len_per_gpu",
        f"{T}[0].rollout_args",
        f"{E}[0].rollout_args",
    ),
    ("ppo", "exact"): (
        "trainer.max_token_len_per_gpu",
        "algorithm.kl_loss_fn_args",
        f"{T}[0].rollout_args",
    ),
    ("grpo", "guide"): (
        "explorer.eval_on_startup",
        f"{T}[0].rollout_args",
        f"{E}[0].rollout_args",
        "trainer.critic.",
    ),
    ("grpo", "exact"): (
        "explorer.eval_on_startup",
        "trainer.critic",
        "model.critic_model_path",
    ),
}
EXAMPLES = {
    ("ppo", "guide"): (PPO, PPO_GUIDE),
    ("ppo", "exact"): (PPO, PPO_EXACT),
    ("grpo", "guide"): (GRPO, GRPO_GUIDE),
    ("grpo", "exact"): (GRPO, GRPO_EXACT),
}


@pytest.mark.parametrize(("example", "profile"), EXAMPLES)
def test_worked_example_key_by_key(example: str, profile: Any) -> None:
    text, expected = EXAMPLES[example, profile]
    found = values(convert(launch(text), profile=profile))
    wrong = {
        k: (found.get(k, "absent"), v)
        for k, v in expected.items()
        if k not in found or found[k] != v
    }
    assert not wrong
    there = [
        k for k in found if k.startswith(ABSENT[example, profile]) or "ppo_mini_batch_size" in k
    ]
    assert not there


@pytest.mark.parametrize(("example", "profile"), EXAMPLES)
def test_worked_example_passes_check_without_a_gpu(
    example: str, profile: Any, tmp_path: Any
) -> None:
    done = convert(launch(EXAMPLES[example, profile][0]), profile=profile)
    file = tmp_path / "out.yaml"
    file.write_text(report.yaml_text(done.values, report.head(done)), encoding="utf-8")
    found = check(file, schema_only=True)
    assert not found.errors
    assert not done.errors
    assert done.counts["refused"] == 0
    assert len(done.rows) == len(launch(EXAMPLES[example, profile][0]).arguments)
    assert found.plan is not None and found.plan.cluster.trainer_gpus == (
        6 if (example, profile) == ("grpo", "guide") else 4
    )


def test_gpu_arithmetic_of_the_ppo_example() -> None:
    g = convert(launch(PPO)).gpus
    assert g is not None
    assert (g.total, g.rollout, g.auxiliary, g.trainer) == (8, 2, 2, 4)
    assert (g.local_mini_batch, g.actor_accumulation, g.critic_accumulation) == (64, 4, 2)
    assert g.verl == {
        "gpus": 8,
        "local_mini_batch": 32,
        "actor_accumulation": 2,
        "critic_accumulation": 1,
    }


def test_gpu_arithmetic_of_the_grpo_example() -> None:
    guide, exact, asked = (
        convert(launch(GRPO), profile=p, engine_num=n)
        for p, n in (("guide", None), ("exact", None), ("exact", 1))
    )  # type: ignore[arg-type]
    assert (
        guide.gpus is not None and guide.gpus.trainer == 6 and guide.gpus.local_mini_batch is None
    )
    assert any("do not divide" in w for w in guide.warnings)
    assert exact.gpus is not None and exact.gpus.trainer == 4 and exact.gpus.local_mini_batch == 512
    assert asked.gpus is not None and asked.gpus.trainer == 6


def test_differences_are_told() -> None:
    notes = "\n".join(convert(launch(PPO)).notes)
    for text in (
        "GPU split",
        "learning rate",
        "whitening",
        "old log-probs",
        "permutes a whole iteration",
        "incomplete last batch",
    ):
        assert text in notes
    guide = "\n".join(convert(launch(PPO), profile="guide").notes)
    for text in (
        "sync_offset 1",
        "copies",
        "answer is the guide's guess",
        "training temperature",
        "no actor_rollout_ref.rollout key",
    ):
        assert text in guide


def test_the_head_names_the_script_and_no_folder() -> None:
    source = replace(launch(GRPO), path="/somewhere/deep/run_grpo.sh")
    text = report.yaml_text(*(lambda c: (c.values, report.head(c)))(convert(source)))
    assert "run_grpo.sh" in text and "/somewhere" not in text
    assert yamlfile.parse(text, "x")[0] == convert(source).values

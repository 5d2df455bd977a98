"""Keys of model, algorithm, trainer, cluster, monitor and log: a good value, a bad one with its path, and what is told as not active."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from rft.algorithm.args import ARGS, KINDS
from rft.algorithm.catalog import ALGORITHMS, LATER
from rft.algorithm.coming import COMING, KL_NAMES
from rft.config.active import listed
from rft.config.known import advice
from rft.config.load import load
from rft.config.plan import Facts, Plan
from rft.config.resolve import resolve
from rft.config.schema.algorithm import KlPenalty
from rft.errors import ConfigError

FILE = Path(__file__).parent / "data" / "good" / "short.yaml"


def plan(*overrides: str) -> Plan:
    return resolve(load(FILE, overrides), Facts(cpus=4, gpus=0))


def waiting(*overrides: str) -> dict[str, tuple[object, bool]]:
    return {n.key: (n.value, n.harmless) for n in plan(*overrides).not_active}


ACTIVE, REFUSED, IDLE = "active", "a run is refused", "a run warns"
KEYS = [  # key, good value, bad value, what a run does with the good one
    ("model.tokenizer_path", "tok", "[1]", ACTIVE),
    ("model.critic_model_path", "critic", "[1]", IDLE),
    ("model.external_lib", "my.module", "[1]", REFUSED),
    ("model.override_config", "{attention_dropout: 0.1}", "3", REFUSED),
    ("model.enable_prompt_truncation", "true", "maybe", ACTIVE),
    ("model.enable_prompt_truncation", "false", "maybe", ACTIVE),
    ("model.prompt_truncation_side", "Left", "up", ACTIVE),
    ("model.rope_scaling", "{rope_type: yarn, factor: 4}", "yarn", REFUSED),
    ("model.rope_theta", "1e6", "0", REFUSED),
    ("model.external_model.enable", "true", "maybe", REFUSED),
    ("model.external_model.model_name", "gpt", "[1]", REFUSED),
    ("algorithm.loss_scale_factor", "512", "0", ACTIVE),
    ("algorithm.compute_prox_logprobs", "true", "maybe", REFUSED),
    ("algorithm.sample_strategy", "default", "[1]", ACTIVE),
    ("algorithm.sample_strategy", "staleness_control", "[1]", ACTIVE),
    ("algorithm.sample_strategy", "mix", "[1]", REFUSED),
    ("algorithm.rollout_correction.rollout_is", "Token", "tokens", REFUSED),
    ("algorithm.rollout_correction.rollout_is_threshold", "3", "0", REFUSED),
    ("algorithm.rollout_correction.rollout_rs", "seq_mean_k1", "k1", REFUSED),
    ("algorithm.optimizer.num_cycles", "1.5", "0", ACTIVE),
    ("algorithm.optimizer.lr_scheduler_type", "WSD", "linear", ACTIVE),
    ("algorithm.optimizer.optimizer_type", "sgd", "lion", REFUSED),
    ("trainer.ppo_epochs", "2", "0", REFUSED),
    ("trainer.shuffle_minibatches", "true", "maybe", IDLE),
    ("trainer.data_seed", "7", "-1", IDLE),
    ("trainer.critic_warmup", "20", "-1", REFUSED),
    *((f"trainer.{name}", "true", "maybe", ACTIVE) for name in ("use_remove_padding", "balance_batch", "entropy_chunking")),
    *((f"trainer.{name}", "false", "maybe", IDLE) for name in ("use_remove_padding", "balance_batch", "entropy_chunking")),
    ("trainer.fix_actor_microbatch_loss_scale", "true", "1.5", ACTIVE),
    ("trainer.fix_actor_microbatch_loss_scale", "false", "1.5", IDLE),
    *(
        (f"trainer.{name}", "true", "maybe", IDLE)
        for name in (
            *("param_offload", "optimizer_offload", "grad_offload", "offload_policy", "enable_activation_offload"),
            *("use_torch_compile", "use_liger", "use_fused_kernels", "enable_preview", "entropy_checkpointing"),
        )
    ),
    ("trainer.fused_kernel_backend", "triton", "cuda", IDLE),
    ("trainer.ulysses_sequence_parallel_size", "2", "0", IDLE),
    ("trainer.fsdp_size", "2", "-2", IDLE),
    ("trainer.log_prob_micro_batch_size_per_gpu", "4", "0", IDLE),
    ("trainer.log_prob_max_token_len_per_gpu", "4096", "0", IDLE),
    ("trainer.save_strategy", "single_thread", "double", IDLE),
    ("trainer.checkpoint.save_contents", "[model, hf_model]", "[weights]", IDLE),
    ("trainer.checkpoint.load_contents", "[model]", "[weights]", REFUSED),
    ("trainer.critic.optimizer.lr", "2e-5", "0", IDLE),
    ("trainer.critic.optimizer.lr_warmup_steps", "5", "many", IDLE),
    ("trainer.critic.optimizer.lr_warmup_steps_ratio", "0.1", "2", IDLE),
    ("trainer.critic.optimizer.lr_scheduler_type", "cosine", "linear", IDLE),
    ("trainer.critic.optimizer.weight_decay", "0.1", "-1", IDLE),
    ("trainer.critic.micro_batch_size_per_gpu", "4", "0", IDLE),
    ("trainer.critic.max_token_len_per_gpu", "4096", "0", IDLE),
    ("trainer.critic.forward_micro_batch_size_per_gpu", "4", "0", IDLE),
    ("trainer.critic.forward_max_token_len_per_gpu", "4096", "0", IDLE),
    ("trainer.critic.use_dynamic_bsz", "false", "maybe", IDLE),
    ("trainer.critic.use_remove_padding", "false", "maybe", IDLE),
    ("trainer.critic.enable_gradient_checkpointing", "true", "maybe", IDLE),
    ("trainer.critic.param_offload", "true", "maybe", IDLE),
    ("trainer.critic.optimizer_offload", "true", "maybe", IDLE),
    ("trainer.critic.grad_clip", "0.5", "0", IDLE),
    ("trainer.critic.cliprange_value", "0.2", "0", IDLE),
    ("trainer.critic.ppo_epochs", "2", "0", IDLE),
    ("trainer.ref.param_offload", "true", "maybe", IDLE),
    ("trainer.ref.reshard_after_forward", "false", "maybe", IDLE),
    ("trainer.ref.log_prob_micro_batch_size_per_gpu", "16", "0", IDLE),
    ("trainer.ref.use_dynamic_bsz", "true", "maybe", IDLE),
    ("trainer.ref.max_token_len_per_gpu", "4096", "0", IDLE),
    ("trainer.profiler.steps", "[1, 5]", "[first]", IDLE),
    ("trainer.profiler.discrete", "true", "maybe", IDLE),
    ("trainer.profiler.all_ranks", "true", "maybe", IDLE),
    ("trainer.profiler.ranks", "[0]", "[first]", IDLE),
    ("cluster.actor_start_timeout", "60", "0", ACTIVE),
    ("cluster.ray_init.num_cpus", "4", "0", ACTIVE),
    ("monitor.log_eval_samples", "5", "-1", ACTIVE),
    ("monitor.eval_dump_dir", "dumps", "[1]", ACTIVE),
    ("monitor.detailed_stats", "true", "maybe", IDLE),
    ("monitor.enable_ray_timeline", "true", "maybe", IDLE),
    ("log.group_by_node", "true", "maybe", IDLE),
]


@pytest.mark.parametrize(("key", "good", "bad", "state"), KEYS, ids=[f"{k}={g}" for k, g, _, _ in KEYS])
def test_keys(key: str, good: str, bad: str, state: str) -> None:
    found = waiting(f"{key}={good}")
    if state == ACTIVE:
        assert not found
    else:
        told = [harmless for k, (_, harmless) in found.items() if k.startswith(key)]
        assert told == [state == IDLE], found
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
        plan(f"{key}={bad}")


def test_defaults_use_nothing_that_is_not_active() -> None:
    assert not plan().not_active


# ---------------------------------------------------------------- algorithms and their parts


@pytest.mark.parametrize("name", LATER)
def test_every_algorithm_is_accepted_and_the_plan_holds_what_exists(name: str) -> None:
    p = plan(f"algorithm.algorithm_type={name.upper()}")
    assert [(n.key, n.value, n.harmless) for n in p.not_active] == [("algorithm.algorithm_type", name, False)]
    a = p.learner.algorithm
    assert (a.algorithm_type, p.explorer.tasksets[0].num_runs) == ("grpo", LATER[name].repeat_times)
    assert all((kind, getattr(a, kind)) in ARGS for kind in ("advantage_fn", "policy_loss_fn", "kl_loss_fn", "entropy_loss_fn"))
    told = {d.key: d.value for d in p.derived}
    assert told["algorithm.policy_loss_fn"] == LATER[name].policy_loss_fn, "what the algorithm is made of, not what stands in"


@pytest.mark.parametrize(("kind", "part"), COMING, ids=lambda v: str(v))
def test_every_part_is_accepted(kind: str, part: str) -> None:
    key = f"algorithm.{kind}"
    assert waiting(f"{key}={part}") == {key: (part, False)}
    fields = COMING[kind, part].model_fields
    with pytest.raises(ConfigError, match=rf"algorithm\.{kind}_args\.nonsense: unknown key for .*\"{part}\""):
        plan(f"{key}={part}", f"{key}_args.nonsense=1")
    for name, field in fields.items():
        if isinstance(field.default, float):
            assert f"{key}_args.{name}" in waiting(f"{key}={part}", f"{key}_args.{name}={field.default}")


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (("algorithm_type=gspo", "policy_loss_fn_args.clip_range_low=2"), "policy_loss_fn_args.clip_range_low"),
        (("algorithm_type=ppo", "advantage_fn_args.lam=1.5"), "advantage_fn_args.lam"),
        (("advantage_fn_args.std_threshold=-1",), "advantage_fn_args.std_threshold"),
        (("policy_loss_fn_args.delta_sequence_masking=far",), "policy_loss_fn_args.delta_sequence_masking"),
        (("kl_penalty_fn=k1", "kl_penalty_fn_args.target_kl=0"), "kl_penalty_fn_args.target_kl"),
        (("sample_strategy=pf_ppo", "sample_strategy_args.reweight_method=max"), "sample_strategy_args.reweight_method"),
        (("policy_loss_fn=clip_cov", "policy_loss_fn_args.clip_cov_lb=9"), "policy_loss_fn_args"),
        (("kl_penalty_fn=full",), "kl_penalty_fn"),
        (("kl_loss_fn=full",), "kl_loss_fn"),
        (("algorithm_type=gspoo",), "algorithm_type"),
        (("sample_strategy=stale",), "sample_strategy"),
    ],
)
def test_wrong_arguments_are_refused_with_their_path(overrides: tuple[str, ...], key: str) -> None:
    with pytest.raises(ConfigError, match=rf"algorithm\.{key}: "):
        plan(*(f"algorithm.{o}" for o in overrides))


def test_arguments_that_are_not_active_on_parts_that_are() -> None:
    found = waiting(
        "algorithm.advantage_fn_args={std_cal_level: batch, rank_penalty: 0.2, epsilon: 1e-4}",
        "algorithm.policy_loss_fn_args={enable_sequence_masking: true, delta_sequence_masking: 0.2, clip_range: 0.3}",
        "algorithm.kl_loss_fn=k2",
        "algorithm.kl_loss_fn_args={adaptive: true, target_kl: 0.2, kl_coef: 0.01}",
    )
    assert found == {
        "algorithm.advantage_fn_args.std_cal_level": ("batch", False),
        "algorithm.advantage_fn_args.rank_penalty": (0.2, False),
        "algorithm.policy_loss_fn_args.enable_sequence_masking": (True, False),
        "algorithm.policy_loss_fn_args.delta_sequence_masking": (0.2, True),
        "algorithm.kl_loss_fn_args.adaptive": (True, False),
        "algorithm.kl_loss_fn_args.target_kl": (0.2, True),
    }
    assert not waiting("algorithm.advantage_fn_args={std_threshold: 0.1, std_cal_level: group}", "algorithm.kl_loss_fn=none")


def test_arguments_of_a_later_algorithm_reach_the_plan() -> None:
    found = waiting("algorithm.algorithm_type=gspo", "algorithm.policy_loss_fn_args.clip_range_high=5e-4")
    assert found["algorithm.policy_loss_fn_args.clip_range_high"] == (5e-4, False)
    assert plan("algorithm.algorithm_type=dapo").learner.algorithm.policy_loss_fn_args["clip_range_high"] == 0.28


def test_older_names_are_taken_with_a_warning() -> None:
    p = plan("algorithm.algorithm_type=grpo_verl", "algorithm.kl_loss_fn=mse", "algorithm.sample_strategy=warmup")
    assert not p.not_active and p.learner.algorithm.kl_loss_fn == "k2"
    assert sum("name of" in w for w in p.warnings) == 3
    assert waiting("algorithm.kl_penalty_fn=KL") == {"algorithm.kl_penalty_fn": ("k1", False)}


def test_a_group_of_one_is_fine_where_nothing_is_compared() -> None:
    assert not any("groups of one" in w or "group of one" in w for w in plan("algorithm.algorithm_type=ppo").warnings)
    assert any("group of one" in w for w in plan("algorithm.repeat_times=1").warnings)


def test_names_stand_once() -> None:
    assert get_args(KlPenalty) == ("none", *KL_NAMES)
    told = {key for key, _ in listed()}
    assert "algorithm.advantage_fn_args.rank_penalty of grpo" in told and "trainer.critic" in told
    assert not ALGORITHMS.keys() & LATER.keys() and {k for k, _ in COMING} <= KINDS.keys()


# ---------------------------------------------------------------- aliases, cross-field rules, what becomes active


def test_warmup_style_is_the_older_name() -> None:
    p = plan("algorithm.optimizer.warmup_style=cosine")
    assert p.learner.optim.lr_scheduler_type == "cosine" and any("older name" in w for w in p.warnings)
    with pytest.raises(ConfigError, match=r"algorithm\.optimizer\.warmup_style: is cosine, but lr_scheduler_type is wsd"):
        plan("algorithm.optimizer.warmup_style=cosine", "algorithm.optimizer.lr_scheduler_type=wsd")


def test_trainers_of_other_names() -> None:
    assert any("taken as fsdp2" in w for w in plan("trainer.trainer_strategy=fsdp").warnings)
    assert plan("trainer.trainer_type=verl", "trainer.trainer_strategy=FSDP2").learner == plan().learner
    for key, value in (("trainer.trainer_type", "tinker"), ("trainer.trainer_strategy", "megatron")):
        with pytest.raises(ConfigError, match=f"{key}.*is not offered"):
            plan(f"{key}={value}")
    for key in ("model.tinker", "model.fully_sharded_loras", "trainer.megatron.pipeline", "algorithm.enable_router_replay"):
        assert advice(key).startswith("not a key here")


def test_one_adapter_at_most() -> None:
    found = waiting("model.lora_configs=[{lora_rank: 8, target_modules: [q_proj]}]")
    assert found["model.lora_configs[0].lora_rank"] == (8, False)
    assert set(waiting("model.lora_configs=[{}]")), "an adapter with its defaults is one too"
    with pytest.raises(ConfigError, match=r"model\.lora_configs: .*at most 1|model\.lora_configs: .*1 entries"):
        plan("model.lora_configs=[{name: a}, {name: b}]")
    with pytest.raises(ConfigError, match=r"model\.lora_configs\[0\]\.lora_rank: .*at least 1"):
        plan("model.lora_configs=[{lora_rank: 0}]")
    assert not waiting("model.lora_configs=[]") and not waiting("model.lora_configs=null")


def test_values_of_an_active_key_reach_the_plan() -> None:
    p = plan("cluster.ray_init.num_cpus=3", "cluster.actor_start_timeout=50", "algorithm.loss_scale_factor=99")
    assert (p.cluster.num_cpus, p.cluster.actor_start_timeout_s, p.learner.loss_scale_factor) == (3, 50, 99)
    assert any("ray_address joins" in w for w in plan("cluster.ray_init.num_cpus=3", "cluster.ray_address=h:1").warnings)
    shown = plan("monitor.log_eval_samples=5")
    assert (shown.explorer.eval_samples, shown.monitor.num_samples, shown.monitor.dump_dir) == (5, 5, None)
    dumped = plan("monitor.log_eval_samples=5", "monitor.eval_dump_dir=d")
    assert (dumped.explorer.eval_samples, dumped.monitor.num_samples, dumped.monitor.dump_dir) == (None, 5, Path.cwd() / "d")
    with pytest.raises(ConfigError, match=r"trainer\.critic\.optimizer\.betas: each must be in"):
        plan("trainer.critic.optimizer.betas=[0.9, 1.0]")

"""Keys of model, algorithm, trainer, cluster, monitor and log: a good value, a bad one with its
path, and what is told as not active.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rft.config.foreign import advice
from rft.config.inert import listed
from rft.config.load import load
from rft.config.plan import Facts, Plan
from rft.config.resolve import resolve
from rft.errors import ConfigError, ConfigErrors

FILE = Path(__file__).parent / "data" / "good" / "short.yaml"


def plan(*overrides: str) -> Plan:
    return resolve(load(FILE, overrides), Facts(cpus=4, gpus=0))


ALWAYS = ("use_remove_padding", "balance_batch", "entropy_chunking", "entropy_checkpointing")
ACTIVE = "active"
REFUSED = "refused: it has no meaning"
IDLE = "a run warns that it has none"
KEYS = [  # key, good value, bad value, what a run does with the good one
    ("model.tokenizer_path", "tok", "[1]", ACTIVE),
    ("model.critic_model_path", "critic", "[1]", ACTIVE),
    ("model.external_lib", "my.module", "[1]", ACTIVE),
    ("model.override_config", "{attention_dropout: 0.1}", "3", ACTIVE),
    ("model.enable_prompt_truncation", "true", "maybe", ACTIVE),
    ("model.enable_prompt_truncation", "false", "maybe", ACTIVE),
    ("model.prompt_truncation_side", "Left", "up", ACTIVE),
    ("model.rope_scaling", "{rope_type: yarn, factor: 4}", "yarn", ACTIVE),
    ("model.rope_theta", "1e6", "0", ACTIVE),
    ("algorithm.loss_scale_factor", "512", "0", ACTIVE),
    ("algorithm.compute_prox_logprobs", "true", "maybe", ACTIVE),
    ("algorithm.sample_strategy", "default", "[1]", ACTIVE),
    ("algorithm.sample_strategy", "staleness_control", "[1]", ACTIVE),
    ("algorithm.sample_strategy", "group_best", "[1]", ACTIVE),  # mix: test_expert_rows.py
    ("algorithm.rollout_correction.rollout_is", "Token", "tokens", ACTIVE),
    ("algorithm.rollout_correction.rollout_is_threshold", "3", "0", ACTIVE),
    ("algorithm.optimizer.num_cycles", "1.5", "0", ACTIVE),
    ("algorithm.optimizer.lr_scheduler_type", "Linear", "exponential", ACTIVE),
    ("algorithm.optimizer.optimizer_type", "sgd", "lion", ACTIVE),
    ("trainer.ppo_epochs", "2", "0", ACTIVE),
    ("trainer.shuffle_minibatches", "true", "maybe", ACTIVE),
    ("trainer.data_seed", "7", "-1", ACTIVE),
    *((f"trainer.{name}", "true", "maybe", ACTIVE) for name in ALWAYS),
    *((f"trainer.{name}", "false", "maybe", ACTIVE) for name in ALWAYS),
    ("trainer.fix_actor_microbatch_loss_scale", "true", "1.5", ACTIVE),
    ("trainer.fix_actor_microbatch_loss_scale", "false", "1.5", IDLE),
    ("trainer.enable_preview", "true", "maybe", IDLE),
    ("trainer.use_fused_kernels", "true", "maybe", ACTIVE),
    *(
        (f"trainer.{name}", "true", "maybe", ACTIVE)
        for name in (
            "param_offload",
            "optimizer_offload",
            "grad_offload",
            "offload_policy",
            "use_liger",
            "use_torch_compile",
        )
    ),
    ("trainer.fused_kernel_backend", "triton", "cuda", ACTIVE),
    ("trainer.ulysses_sequence_parallel_size", "1", "0", ACTIVE),
    ("trainer.fsdp_size", "1", "-2", ACTIVE),
    ("trainer.log_prob_micro_batch_size_per_gpu", "4", "0", ACTIVE),
    ("trainer.log_prob_max_token_len_per_gpu", "4096", "0", ACTIVE),
    ("trainer.save_strategy", "single_thread", "double", IDLE),
    ("trainer.checkpoint.save_contents", "[model, hf_model]", "[weights]", ACTIVE),
    ("trainer.checkpoint.load_contents", "[model]", "[weights]", ACTIVE),
    ("trainer.critic.optimizer.lr", "2e-5", "0", ACTIVE),
    ("trainer.critic.optimizer.lr_warmup_steps", "5", "many", ACTIVE),
    ("trainer.critic.optimizer.lr_warmup_steps_ratio", "0.1", "2", ACTIVE),
    ("trainer.critic.optimizer.lr_scheduler_type", "cosine", "exponential", ACTIVE),
    ("trainer.critic.optimizer.weight_decay", "0.1", "-1", ACTIVE),
    ("trainer.critic.micro_batch_size_per_gpu", "4", "0", ACTIVE),
    ("trainer.critic.max_token_len_per_gpu", "4096", "0", ACTIVE),
    ("trainer.critic.forward_micro_batch_size_per_gpu", "4", "0", ACTIVE),
    ("trainer.critic.forward_max_token_len_per_gpu", "4096", "0", ACTIVE),
    ("trainer.critic.use_dynamic_bsz", "true", "maybe", ACTIVE),
    ("trainer.critic.use_remove_padding", "false", "maybe", ACTIVE),
    ("trainer.critic.enable_gradient_checkpointing", "true", "maybe", ACTIVE),
    ("trainer.critic.param_offload", "true", "maybe", ACTIVE),
    ("trainer.critic.optimizer_offload", "true", "maybe", ACTIVE),
    ("trainer.critic.grad_clip", "0.5", "0", ACTIVE),
    ("trainer.critic.cliprange_value", "0.2", "0", ACTIVE),
    ("trainer.critic.ppo_epochs", "2", "0", ACTIVE),
    ("trainer.ref.param_offload", "true", "maybe", ACTIVE),
    ("trainer.ref.reshard_after_forward", "false", "maybe", ACTIVE),
    ("trainer.ref.log_prob_micro_batch_size_per_gpu", "16", "0", ACTIVE),
    ("trainer.ref.use_dynamic_bsz", "true", "maybe", ACTIVE),
    ("trainer.ref.max_token_len_per_gpu", "4096", "0", ACTIVE),
    ("trainer.profiler.steps", "[1, 5]", "[first]", ACTIVE),
    ("trainer.profiler.discrete", "true", "maybe", ACTIVE),
    ("trainer.profiler.all_ranks", "true", "maybe", ACTIVE),
    ("trainer.profiler.ranks", "[0]", "[first]", ACTIVE),
    ("cluster.actor_start_timeout", "60", "0", ACTIVE),
    ("cluster.stall_timeout", "null", "0.5", ACTIVE),
    ("cluster.ray_init.num_cpus", "4", "0", ACTIVE),
    ("monitor.log_eval_samples", "5", "-1", ACTIVE),
    ("monitor.eval_dump_dir", "dumps", "[1]", ACTIVE),
    ("monitor.detailed_stats", "true", "maybe", ACTIVE),
    ("monitor.enable_ray_timeline", "true", "maybe", ACTIVE),
    ("log.group_by_node", "true", "maybe", ACTIVE),
]


@pytest.mark.parametrize(
    ("key", "good", "bad", "state"), KEYS, ids=[f"{k}={g}" for k, g, _, _ in KEYS]
)
def test_keys(key: str, good: str, bad: str, state: str) -> None:
    if state == REFUSED:
        with pytest.raises(ConfigError, match=rf"{key}: has no meaning here".replace(".", r"\.")):
            plan(f"{key}={good}")
    else:
        told = [
            w
            for w in plan(f"{key}={good}").warnings
            if w.startswith(key) and "has no effect: " in w
        ]
        assert state == ACTIVE or len(told) == 1
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
        plan(f"{key}={bad}")


# ---------------------------------------------------------------- algorithms and their parts


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (
            ("algorithm_type=gspo", "policy_loss_fn_args.clip_range_low=2"),
            "policy_loss_fn_args.clip_range_low",
        ),
        (("algorithm_type=ppo", "advantage_fn_args.lam=1.5"), "advantage_fn_args.lam"),
        (("advantage_fn_args.std_threshold=-1",), "advantage_fn_args.std_threshold"),
        (
            ("policy_loss_fn_args.delta_sequence_masking=far",),
            "policy_loss_fn_args.delta_sequence_masking",
        ),
        (("kl_penalty_fn=k1", "kl_penalty_fn_args.target_kl=0"), "kl_penalty_fn_args.target_kl"),
        (
            ("sample_strategy=pf_ppo", "sample_strategy_args.reweight_method=max"),
            "sample_strategy_args.reweight_method",
        ),
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


def test_arguments_without_meaning_on_parts_that_are_active() -> None:
    with pytest.raises(ConfigErrors) as caught:
        plan(
            "algorithm.advantage_fn_args={std_threshold: 0.1, duplicate_experiences: true, "
            "std_cal_level: batch, rank_penalty: 0.2}",
            "algorithm.kl_loss_fn=k2",
            "algorithm.kl_loss_fn_args={adaptive: true, target_kl: 0.2, kl_coef: 0.01}",
        )
    assert [e.key for e in caught.value.errors] == [
        "algorithm.advantage_fn_args.duplicate_experiences"
    ]
    told = plan("algorithm.algorithm_type=jsd", "algorithm.advantage_fn_args.chunk_size=8").warnings
    assert any(w.startswith("algorithm.advantage_fn_args.chunk_size 8 has no effect") for w in told)


def test_arguments_of_an_algorithm_reach_the_plan() -> None:
    a = plan(
        "algorithm.algorithm_type=gspo", "algorithm.policy_loss_fn_args.clip_range_high=5e-4"
    ).learner.algorithm
    assert a.policy_loss_fn_args["clip_range_high"] == 5e-4
    assert (
        plan("algorithm.algorithm_type=dapo").learner.algorithm.policy_loss_fn_args[
            "clip_range_high"
        ]
        == 0.28
    )
    a = plan(
        "algorithm.sample_strategy=pf_ppo", "algorithm.sample_strategy_args.weight_pow=3"
    ).learner.algorithm
    assert (a.sample_strategy, a.sample_strategy_args) == ("pf_ppo", {"weight_pow": 3})


@pytest.mark.parametrize("part", ["gigpo", "optimal_token_baseline", "grpo"])
def test_advantages_that_compare_tokens_need_whole_groups(part: str) -> None:
    given = [f"algorithm.advantage_fn={part}", "buffer.batch_size=3", "algorithm.repeat_times=4"]
    if part == "grpo":
        given.append("algorithm.advantage_fn_args.rank_penalty=0.1")
    assert (
        plan(*given).trainer.batch_groups == 3
        and plan(*given, "buffer.train_batch_size=12").trainer.batch_groups == 3
    )
    other = plan(*given, "buffer.train_batch_size=6")
    assert (other.trainer.batch_groups, other.trainer.batch_rows) == (3, None)
    assert any(
        "a step trains the 3 groups of buffer.batch_size instead" in w for w in other.warnings
    )


def test_rows_of_pairs_are_not_drawn_one_by_one() -> None:
    with pytest.raises(
        ConfigError,
        match=r"algorithm\.sample_strategy: draws single rows, but policy loss 'dpo' compares "
        r"pairs",
    ):
        plan("algorithm.policy_loss_fn=dpo", "algorithm.sample_strategy=pf_ppo")


@pytest.mark.parametrize(
    ("name", "says"), [("jsd", "teacher_logprobs"), ("gigpo", "env_state_hash_key")]
)
def test_what_a_workflow_has_to_write_is_told(name: str, says: str) -> None:
    (note,) = [n for n in plan(f"algorithm.algorithm_type={name}").notes if " reads " in n]
    assert re.search(says, note)


def test_a_loss_that_is_written_alone_brings_its_aggregation() -> None:
    def mode(*overrides: str) -> str:
        return plan(*(f"algorithm.{o}" for o in overrides)).learner.algorithm.loss_agg_mode

    assert (mode(), mode("algorithm_type=gspo"), mode("policy_loss_fn=gspo")) == (
        "token-mean",
        *["run-mean"] * 2,
    )
    assert mode("algorithm_type=dr_grpo", "policy_loss_fn=cispo") == "seq-mean-token-sum-norm"
    assert mode("policy_loss_fn=gspo", "loss_agg_mode=token-mean") == mode(
        "algorithm_type=sapo", "loss_agg_mode=token-mean"
    )
    told = plan("algorithm.policy_loss_fn=geo_mean", "algorithm.loss_agg_mode=token-mean").warnings
    assert any(
        "geo_mean is a mean over sequences or pairs; token-mean holds for KL and entropy terms only"
        in w
        for w in told
    )


def test_losses_and_policies_that_do_not_go_together() -> None:
    window = ("algorithm.compute_prox_logprobs=true", "synchronizer.sync_interval=2")
    for loss in ("m2po", "clip_cov", "kl_cov"):
        with pytest.raises(
            ConfigError,
            match=rf"algorithm\.policy_loss_fn: .*{loss} chooses tokens under the weights before",
        ):
            plan(f"algorithm.policy_loss_fn={loss}", *window)
    assert plan("algorithm.policy_loss_fn=gspo", *window).learner.algorithm.proximal_window
    told = plan("algorithm.policy_loss_fn=m2po", "algorithm.bypass_old_logprobs=false").warnings
    assert any("m2po leaves no token out" in w for w in told)
    with pytest.raises(
        ConfigError, match=r"algorithm\.rollout_correction: .*which sft does not read"
    ):
        plan("algorithm.policy_loss_fn=sft", "algorithm.rollout_correction.rollout_is=token")


def test_older_names_are_taken_with_a_warning() -> None:
    p = plan(
        "algorithm.algorithm_type=grpo_verl",
        "algorithm.kl_loss_fn=mse",
        "algorithm.sample_strategy=warmup",
    )
    assert p.learner.algorithm.kl_loss_fn == "k2"
    assert sum("name of" in w for w in p.warnings) == 3
    assert plan("algorithm.kl_penalty_fn=kl").learner.algorithm.kl_penalty_fn == "k1"


def test_a_group_of_one_is_fine_where_nothing_is_compared() -> None:
    assert not any(
        "groups of one" in w or "group of one" in w
        for w in plan("algorithm.algorithm_type=ppo").warnings
    )
    assert any("group of one" in w for w in plan("algorithm.repeat_times=1").warnings)


def test_names_stand_once() -> None:
    told = [key for key, _ in listed()]
    assert "algorithm.advantage_fn_args.duplicate_experiences of grpo" in told and len(told) == len(
        set(told)
    )


# ---------------------------------------------------------------- aliases, cross-field rules, what
# becomes active


def test_warmup_style_is_the_older_name() -> None:
    p = plan("algorithm.optimizer.warmup_style=cosine")
    assert p.learner.optim.lr_scheduler_type == "cosine" and any(
        "older name" in w for w in p.warnings
    )
    with pytest.raises(
        ConfigError,
        match=r"algorithm\.optimizer\.warmup_style: is cosine, but lr_scheduler_type is wsd",
    ):
        plan("algorithm.optimizer.warmup_style=cosine", "algorithm.optimizer.lr_scheduler_type=wsd")


@pytest.mark.extra
def test_trainers_of_other_names() -> None:
    assert any("taken as fsdp2" in w for w in plan("trainer.trainer_strategy=fsdp").warnings)
    assert (
        plan("trainer.trainer_type=verl", "trainer.trainer_strategy=FSDP2").learner
        == plan().learner
    )
    for key, value in (
        ("trainer.trainer_type", "tinker"),
        ("trainer.trainer_strategy", "megatron"),
    ):
        with pytest.raises(ConfigError, match=f"{key}.*is not offered"):
            plan(f"{key}={value}")
    assert advice("model.tinker").startswith("not a key here")
    assert advice("model.fully_sharded_loras").startswith(
        "has no effect: explorer.rollout_model.fully_sharded_loras is read"
    )


def test_one_adapter_at_most() -> None:
    with pytest.raises(
        ConfigError, match=r"model\.lora_configs: .*at most 1|model\.lora_configs: .*1 entries"
    ):
        plan("model.lora_configs=[{name: a}, {name: b}]")
    with pytest.raises(ConfigError, match=r"model\.lora_configs\[0\]\.lora_rank: .*at least 1"):
        plan("model.lora_configs=[{lora_rank: 0}]")
    for none in ("[]", "null"):
        assert plan(f"model.lora_configs={none}").learner.lora is None


def test_values_of_an_active_key_reach_the_plan() -> None:
    p = plan(
        "cluster.ray_init.num_cpus=3",
        "cluster.actor_start_timeout=50",
        "cluster.stall_timeout=7",
        "algorithm.loss_scale_factor=99",
    )
    assert p.cluster.stall_timeout_s == 7
    assert (p.cluster.num_cpus, p.cluster.actor_start_timeout_s, p.learner.loss_scale_factor) == (
        3,
        50,
        99,
    )
    assert any(
        "ray_address joins" in w
        for w in plan("cluster.ray_init.num_cpus=3", "cluster.ray_address=h:1").warnings
    )
    shown = plan("monitor.log_eval_samples=5")
    assert (shown.explorer.eval_samples, shown.monitor.num_samples, shown.monitor.dump_dir) == (
        5,
        5,
        None,
    )
    dumped = plan("monitor.log_eval_samples=5", "monitor.eval_dump_dir=d")
    assert (dumped.explorer.eval_samples, dumped.monitor.num_samples, dumped.monitor.dump_dir) == (
        None,
        5,
        Path.cwd() / "d",
    )
    with pytest.raises(ConfigError, match=r"trainer\.critic\.optimizer\.betas: each must be in"):
        plan("trainer.critic.optimizer.betas=[0.9, 1.0]")


def test_fixed_micro_batches_of_the_critic_divide_a_step() -> None:
    ppo = ("algorithm.algorithm_type=ppo", "trainer.critic.use_dynamic_bsz=false")
    rows = plan(*ppo, "trainer.critic.micro_batch_size_per_gpu=1").trainer.batch_groups
    assert rows is not None
    with pytest.raises(
        ConfigError, match=r"trainer\.critic\.micro_batch_size_per_gpu: is 1000, and 1000 x 1 rank"
    ):
        plan(*ppo, "trainer.critic.micro_batch_size_per_gpu=1000")
    assert plan(*ppo[1:], "trainer.critic.micro_batch_size_per_gpu=1000"), "there is no critic"

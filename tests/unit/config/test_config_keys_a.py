"""Keys of model, algorithm, trainer, cluster, monitor and log: a good value, a bad one with its
path.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rft.config.hints import key_hint
from rft.config.load import load
from rft.config.plan import Facts, Plan
from rft.config.resolve import resolve
from rft.errors import ConfigError

FILE = Path(__file__).parent / "data" / "good" / "short.yaml"


def plan(*overrides: str) -> Plan:
    return resolve(load(FILE, overrides), Facts(cpus=4, gpus=0))


ALWAYS = ("balance_batch", "entropy_chunking", "entropy_checkpointing")
KEYS = [  # key, good value, bad value
    ("model.tokenizer_path", "tok", "[1]"),
    ("model.critic_model_path", "critic", "[1]"),
    ("model.external_lib", "my.module", "[1]"),
    ("model.override_config", "{attention_dropout: 0.1}", "3"),
    ("model.enable_prompt_truncation", "true", "maybe"),
    ("model.enable_prompt_truncation", "false", "maybe"),
    ("model.prompt_truncation_side", "Left", "up"),
    ("model.rope_scaling", "{rope_type: yarn, factor: 4}", "yarn"),
    ("model.rope_theta", "1e6", "0"),
    ("model.image_processor_args.min_pixels", "64", "0"),
    ("model.image_processor_args.max_pixels", "100000", "0"),
    ("algorithm.loss_scale_factor", "512", "0"),
    ("algorithm.compute_prox_logprobs", "true", "maybe"),
    ("algorithm.sample_strategy", "default", "[1]"),
    ("algorithm.sample_strategy", "staleness_control", "[1]"),
    ("algorithm.sample_strategy", "group_best", "[1]"),  # mix: test_expert_rows.py
    ("algorithm.rollout_correction.rollout_is", "Token", "tokens"),
    ("algorithm.rollout_correction.rollout_is_threshold", "0.5_5.0", "0"),
    ("algorithm.optimizer.num_cycles", "1.5", "0"),
    ("algorithm.optimizer.lr_scheduler_type", "Linear", "exponential"),
    ("algorithm.optimizer.optimizer_type", "sgd", "lion"),
    ("trainer.ppo_epochs", "2", "0"),
    ("trainer.shuffle_minibatches", "true", "maybe"),
    ("trainer.data_seed", "7", "-1"),
    *((f"trainer.{name}", "true", "maybe") for name in ALWAYS),
    *((f"trainer.{name}", "false", "maybe") for name in ALWAYS),
    *(
        (f"trainer.{name}", "true", "maybe")
        for name in (
            "offload_policy",
            "use_liger",
            "use_torch_compile",
        )
    ),
    ("trainer.fused_kernel_backend", "torch", "cuda"),
    ("trainer.ulysses_sequence_parallel_size", "1", "0"),
    ("trainer.fsdp_size", "1", "-2"),
    ("trainer.log_prob_micro_batch_size_per_gpu", "4", "0"),
    ("trainer.log_prob_max_token_len_per_gpu", "4096", "0"),
    ("trainer.checkpoint.save_contents", "[model, hf_model]", "[weights]"),
    ("trainer.checkpoint.load_contents", "[model]", "[weights]"),
    ("trainer.critic.optimizer.lr", "2e-5", "0"),
    ("trainer.critic.optimizer.lr_warmup_steps", "5", "many"),
    ("trainer.critic.optimizer.lr_warmup_steps_ratio", "0.1", "2"),
    ("trainer.critic.optimizer.lr_scheduler_type", "cosine", "exponential"),
    ("trainer.critic.optimizer.weight_decay", "0.1", "-1"),
    ("trainer.critic.micro_batch_size_per_gpu", "4", "0"),
    ("trainer.critic.max_token_len_per_gpu", "4096", "0"),
    ("trainer.critic.forward_micro_batch_size_per_gpu", "4", "0"),
    ("trainer.critic.forward_max_token_len_per_gpu", "4096", "0"),
    ("trainer.critic.use_dynamic_bsz", "true", "maybe"),
    ("trainer.critic.row_layout", "padded", "maybe"),
    ("trainer.critic.enable_gradient_checkpointing", "true", "maybe"),
    ("trainer.critic.offload_policy", "true", "maybe"),
    ("trainer.critic.grad_clip", "0.5", "0"),
    ("trainer.critic.cliprange_value", "0.2", "0"),
    ("trainer.critic.ppo_epochs", "2", "0"),
    ("trainer.ref.param_offload", "true", "maybe"),
    ("trainer.ref.reshard_after_forward", "false", "maybe"),
    ("trainer.ref.log_prob_micro_batch_size_per_gpu", "16", "0"),
    ("trainer.ref.use_dynamic_bsz", "true", "maybe"),
    ("trainer.ref.max_token_len_per_gpu", "4096", "0"),
    ("trainer.profiler.steps", "[1, 5]", "[first]"),
    ("trainer.profiler.discrete", "true", "maybe"),
    ("trainer.profiler.all_ranks", "true", "maybe"),
    ("trainer.profiler.ranks", "[0]", "[first]"),
    ("cluster.actor_start_timeout", "60", "0"),
    ("cluster.stall_timeout", "null", "0.5"),
    ("cluster.ray_init.num_cpus", "4", "0"),
    ("monitor.log_eval_samples", "5", "-1"),
    ("monitor.eval_dump_dir", "dumps", "[1]"),
    ("monitor.detailed_stats", "true", "maybe"),
    ("monitor.enable_ray_timeline", "true", "maybe"),
    ("log.group_by_node", "true", "maybe"),
]


@pytest.mark.parametrize(("key", "good", "bad"), KEYS, ids=[f"{k}={g}" for k, g, _ in KEYS])
def test_keys(key: str, good: str, bad: str) -> None:
    plan(f"{key}={good}")
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


# ---------------------------------------------------------------- aliases, cross-field rules, what
# becomes active


@pytest.mark.extra
def test_keys_of_other_tools_have_hints() -> None:
    for key in ("trainer.trainer_type", "trainer.trainer_strategy"):
        with pytest.raises(ConfigError, match=f"{key}.*the one trainer is FSDP2"):
            plan(f"{key}=fsdp")
    assert key_hint("trainer.use_remove_padding") == (
        "not a key here: it is called trainer.row_layout"
    )
    assert key_hint("model.tinker").startswith("not a key here")
    assert key_hint("model.fully_sharded_loras").startswith(
        "has no meaning here: explorer.rollout_model.fully_sharded_loras is read"
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
    assert (
        shown.explorer.eval_samples,
        shown.monitor.log_eval_samples,
        shown.monitor.eval_dump_dir,
    ) == (
        5,
        5,
        None,
    )
    dumped = plan("monitor.log_eval_samples=5", "monitor.eval_dump_dir=d")
    assert (
        dumped.explorer.eval_samples,
        dumped.monitor.log_eval_samples,
        dumped.monitor.eval_dump_dir,
    ) == (
        None,
        5,
        str(Path.cwd() / "d"),
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

"""The small vectors, one rule at a time, and the forms other than the ordinary trainer."""

from __future__ import annotations

from typing import Any

import pytest

from rft.config import yamlfile
from rft.config.schema.source import dotted, leaves
from rft.errors import ConfigError
from rft.extras.migrate.convert.launch import Argument, Launch
from rft.extras.migrate.convert.verl import Conversion, convert

A = "actor_rollout_ref.actor"
R = "actor_rollout_ref.rollout"
E = "buffer.explorer_input.eval_tasksets[0]"
T = "buffer.explorer_input.tasksets[0]"
LOSS = "algorithm.policy_loss_fn_args"


def made(*arguments: str, program: Any = "main_ppo", **more: Any) -> Conversion:
    found = []
    for line, one in enumerate(arguments, 1):
        key, _, value = one.partition("=")
        plain = value if "${" in value else yamlfile.scalar(value)
        found.append(
            Argument(
                key.lstrip("+~"), plain, value, line, prefix=key[: len(key) - len(key.lstrip("+~"))]
            )
        )
    return convert(Launch(program, tuple(found), passed_through=False, path="run.sh"), **more)


def found(c: Conversion) -> dict[str, Any]:
    return {dotted(loc): value for loc, value in leaves(c.values, lists=False)}


def outcome(c: Conversion, key: str) -> tuple[str, str]:
    row = next(r for r in c.rows if r.argument.key == key)
    return row.outcome.kind, row.outcome.reason


@pytest.mark.parametrize(
    ("batch", "mini", "n", "expected"),
    [
        (1024, 256, 8, (256, 2048, 4)),
        (512, 512, 1, (512, 512, 1)),
        (1024, 128, 16, (128, 2048, 8)),
    ],
)
def test_batch_arithmetic(batch: int, mini: int, n: int, expected: tuple[int, int, int]) -> None:
    v = found(
        made(f"data.train_batch_size={batch}", f"{A}.ppo_mini_batch_size={mini}", f"{R}.n={n}")
    )
    assert (
        v["buffer.batch_size"],
        v["buffer.train_batch_size"],
        v["synchronizer.sync_interval"],
    ) == expected


@pytest.mark.parametrize(
    ("batch", "mini", "text"),
    [(1024, 300, "300 does not divide 1024"), (128, None, "larger than the batch")],
)
def test_batches_that_do_not_fit_are_errors(batch: int, mini: int | None, text: str) -> None:
    written = [] if mini is None else [f"{A}.ppo_mini_batch_size={mini}"]
    with pytest.raises(ConfigError, match=text):
        made(f"data.train_batch_size={batch}", *written)


def test_a_written_mini_batch_above_the_batch_is_the_batch() -> None:
    """256 of 512: one step of 256 prompts, whose gradient was divided by 512."""
    done = made("data.train_batch_size=256", f"{A}.ppo_mini_batch_size=512", f"{R}.n=4")
    v = found(done)
    assert v["buffer.batch_size"] == 256
    assert v["buffer.train_batch_size"] == 1024
    assert v["synchronizer.sync_interval"] == 1
    (question,) = [q for q in done.questions if "ppo_mini_batch_size" in q]
    assert "512 is larger than data.train_batch_size 256" in question
    assert "divided by 512, 0.5 of the one here" in question


SHARED = (
    "data.train_batch_size=256",
    f"{A}.ppo_mini_batch_size=64",
    f"{A}.ppo_micro_batch_size_per_gpu=8",
    "trainer.n_gpus_per_node=8",
)
NO_SPLIT = (
    "data.train_batch_size=580",
    f"{A}.ppo_mini_batch_size=580",
    f"{A}.ppo_micro_batch_size_per_gpu=116",
    f"{R}.n=1",
    "trainer.nnodes=1",
    "trainer.n_gpus_per_node=2",
    f"{R}.tensor_model_parallel_size=2",
    f"{A}.ulysses_sequence_parallel_size=2",
)


def test_a_launch_that_leaves_the_trainer_no_gpu_is_an_account_and_no_crash() -> None:
    c = made(*NO_SPLIT, engine_num=1)
    assert "none is left for the trainer: lower --engine-num" in "\n".join(c.warnings)
    assert "leave 0 for 1 trainer rank" in c.errors[0]


@pytest.mark.parametrize(
    "arguments",
    [NO_SPLIT, (*SHARED, "actor_rollout_ref.hybrid_engine=True")],
    ids=["too_few", "said"],
)
def test_engines_and_trainer_share_their_gpus_where_that_is_said_or_there_are_too_few(
    arguments: tuple[str, ...],
) -> None:
    c = made(*arguments)
    assert not c.errors and c.values["mode"] == "colocate" and c.gpus is not None and c.gpus.shared
    total = c.values["cluster"]["gpu_per_node"]
    assert c.gpus.trainer == total and c.gpus.rollout == total
    assert (
        made(*arguments, "trainer.total_epochs=2").values["explorer"]["rollout_model"]["engine_num"]
        == total // 2
    )


def test_any_launch_may_share_its_gpus() -> None:
    c = made(*SHARED, overrides=["mode=colocate"])
    assert not c.errors and c.gpus is not None and (c.gpus.shared, c.gpus.trainer) == (True, 8)
    assert made(*SHARED).values.get("mode") is None


def test_a_cluster_that_nobody_has_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="GPUs in all are more than"):
        made("trainer.nnodes=1000000000000000")


def test_asynchronous_recipe() -> None:
    c = made(
        "data.train_batch_size=0",
        "data.gen_batch_size=1",
        f"{A}.ppo_mini_batch_size=32",
        f"{R}.n=16",
        "async_training.trigger_parameter_sync_step=4",
        "async_training.require_batches=2",
        "async_training.staleness_threshold=0.5",
        "async_training.partial_rollout=True",
        "rollout.total_rollout_steps=51200",
        "rollout.test_freq=10",
        "rollout.nnodes=1",
        "rollout.n_gpus_per_node=2",
        "trainer.nnodes=1",
        "trainer.n_gpus_per_node=6",
        f"{R}.tensor_model_parallel_size=1",
        "async_training.use_rollout_log_probs=True",
        "async_training.checkpoint_engine.device_buffer_size_M=2048",
        "actor_rollout_ref.hybrid_engine=False",
        program="fully_async",
    )
    v = found(c)
    assert not c.refused
    assert v["synchronizer.sync_style"] == "fully_async" and "synchronizer.sync_offset" not in v
    assert (
        v["buffer.batch_size"],
        v["buffer.train_batch_size"],
        v["synchronizer.sync_interval"],
    ) == (32, 512, 8)
    assert v["buffer.total_tasks"] == 51200 and v["explorer.eval_interval"] == 80
    assert (
        v["synchronizer.staleness_threshold"] == 0.5 and v["synchronizer.partial_rollout"] is True
    )
    assert (
        v["algorithm.bypass_old_logprobs"] is True and v["synchronizer.nccl.bucket_size_mb"] == 2048
    )
    assert (
        v["cluster.node_num"],
        v["cluster.gpu_per_node"],
        v["explorer.rollout_model.engine_num"],
    ) == (1, 8, 2)
    assert c.gpus is not None and c.gpus.trainer == 6


@pytest.mark.parametrize(
    ("arguments", "fn", "coef"),
    [
        ((f"{A}.use_kl_loss=False", f"{A}.kl_loss_coef=0.1"), "none", None),
        ((f"{A}.use_kl_loss=True",), "low_var_kl", 0.001),
        ((f"{A}.use_kl_loss=True", f"{A}.kl_loss_type=mse"), "k2", 0.001),
        (
            (f"{A}.use_kl_loss=True", f"{A}.kl_loss_type=k3", f"{A}.kl_loss_coef=0.1"),
            "low_var_kl",
            0.1,
        ),
        ((f"{A}.use_kl_loss=True", f"{A}.kl_loss_type=kl"), "k1", 0.001),
    ],
)
@pytest.mark.parametrize("profile", ["exact", "guide"])
def test_kl_loss(arguments: tuple[str, ...], fn: str, coef: float | None, profile: Any) -> None:
    v = found(made(*arguments, profile=profile))
    assert v["algorithm.kl_loss_fn"] == fn and v.get("algorithm.kl_loss_fn_args.kl_coef") == coef


def test_kl_in_reward() -> None:
    v = found(
        made(
            "algorithm.use_kl_in_reward=True",
            "algorithm.kl_ctrl.type=adaptive",
            "algorithm.kl_ctrl.target_kl=0.2",
        )
    )
    assert v["algorithm.kl_penalty_fn"] == "k1"
    args = {k.rsplit(".", 1)[-1]: x for k, x in v.items() if "kl_penalty_fn_args" in k}
    assert args == {"kl_coef": 0.001, "adaptive": True, "target_kl": 0.2, "horizon": 10000}


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (("algorithm.use_kl_in_reward=True", "algorithm.kl_penalty=full"), "algorithm.kl_penalty"),
        ((f"{R}.name=sglang",), f"{R}.name"),
        ((f"{A}.strategy=megatron",), f"{A}.strategy"),
        (("trainer.device=npu",), "trainer.device"),
        (("algorithm.adv_estimator=mine",), "algorithm.adv_estimator"),
        ((f"{R}.prompt_length=77",), f"{R}.prompt_length"),
        ((f"{A}.optim.lr_decay_style=linear",), f"{A}.optim.lr_decay_style"),
        (("data.train_files=hdfs://x/train.parquet",), "data.train_files"),
    ],
)
def test_refused(arguments: tuple[str, ...], key: str) -> None:
    if "hdfs" in arguments[0]:
        with pytest.raises(ConfigError, match="HDFS"):
            made(*arguments)
        return
    assert [r.argument.key for r in made(*arguments).refused] == [key]


@pytest.mark.parametrize(
    ("arguments", "low", "high", "warned"),
    [
        ((f"{A}.clip_ratio=0.1",), 0.1, 0.1, True),
        ((f"{A}.clip_ratio_high=0.28",), 0.2, 0.28, False),
        (
            (f"{A}.clip_ratio=0.1", f"{A}.clip_ratio_low=0.15", f"{A}.clip_ratio_high=0.3"),
            0.15,
            0.3,
            False,
        ),
        ((), 0.2, 0.2, False),
    ],
)
def test_clip_range(arguments: tuple[str, ...], low: float, high: float, warned: bool) -> None:
    c = made(*arguments)
    v = found(c)
    assert (v[f"{LOSS}.clip_range_low"], v[f"{LOSS}.clip_range_high"]) == (low, high)
    assert any("clip_ratio" in w for w in c.warnings) is warned


@pytest.mark.parametrize(
    ("argument", "key", "value"),
    [
        ("trainer.resume_mode=disable", "continue_from_checkpoint", False),
        ("trainer.val_only=True", "mode", "bench"),
        ('trainer.logger=["console"]', "monitor.monitor_type", "none"),
        (
            'trainer.logger=["console","wandb","tensorboard"]',
            "monitor.monitor_type",
            ["wandb", "tensorboard"],
        ),
        (f"{R}.top_k=0", "model.top_k", -1),
        (f"{A}.ppo_micro_batch_size=64", "trainer.micro_batch_size_per_gpu", 8),
        ("trainer.save_freq=-1", "trainer.save_interval", 0),
        ("trainer.test_freq=-1", "explorer.eval_interval", 0),
        ("trainer.total_training_steps=100", "buffer.total_steps", 400),
        (f"{A}.optim.lr_warmup_steps=10", "algorithm.optimizer.lr_warmup_steps", 40),
        ("trainer.critic_warmup=5", "trainer.critic_warmup", 16),
        ("trainer.critic_warmup=1", "trainer.critic_warmup", 0),
        ("trainer.profile_steps=[2]", "trainer.profiler.steps", [5, 6, 7, 8]),
        ("trainer.default_local_dir=/ckpt/p/n", "checkpoint_root_dir", "/ckpt/p/n"),
        ("trainer.default_local_dir=/ckpt/verl_examples/gsm8k", "checkpoint_root_dir", "/ckpt"),
        (
            "trainer.rollout_data_dir=/dump",
            "data_processor.experience_pipeline.input_save_path",
            "/dump",
        ),
        ("trainer.remove_previous_ckpt_in_save=True", "trainer.max_checkpoints_to_keep", 1),
        (f"{R}.name=hf", "explorer.rollout_model.engine_type", "transformers"),
        (f"{R}.do_sample=False", "model.temperature", 0),
        ("actor_rollout_ref.model.use_remove_padding=False", "trainer.row_layout", "padded"),
        (f"{A}.fsdp_config.param_offload=True", "trainer.offload_policy", True),
        (f"{A}.optim.min_lr=1e-7", "algorithm.optimizer.min_lr_ratio", pytest.approx(0.1)),
        ("data.shuffle=False", f"{T}.data_selector.selector_type", "sequential"),
        ("data.train_max_samples=100", f"{T}.max_rows", 100),
        ("+data.seed=7", f"{T}.data_selector.seed", 7),
        ("data.response_key=gold", f"{T}.format.response_key", "gold"),
        (f"{A}.policy_loss.loss_mode=gspo", "algorithm.policy_loss_fn", "gspo"),
        (
            "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
            "model.override_config.attn_implementation",
            "sdpa",
        ),
        ("actor_rollout_ref.model.lora_rank=32", "model.lora_configs[0].lora_rank", 32),
        (
            f"{R}.engine_kwargs.vllm.swap_space=4",
            "explorer.rollout_model.extra_engine_args.swap_space",
            4,
        ),
        (
            "reward_model.reward_kwargs.overlong_buffer_cfg.len=512",
            f"{T}.reward_fn_args.cache_length",
            512,
        ),
        (
            "algorithm.rollout_correction.rollout_is=token",
            "algorithm.rollout_correction.rollout_is",
            "token",
        ),
        ("ray_init.timeline_json_file=/t.json", "monitor.enable_ray_timeline", True),
        ("trainer.nnodes=2", "synchronizer.sync_method", "checkpoint"),
    ],
)
def test_single_arguments(argument: str, key: str, value: Any) -> None:
    c = made(argument)
    assert not c.refused
    assert found(c)[key] == value


def test_dynamic_sampling() -> None:
    """veRL's groups of equal metric are dropped and replaced; what may be drawn per iteration is
    shared among its steps.
    """
    F = "algorithm.filter_groups"
    P = "data_processor.experience_pipeline.operators[0]"
    sizes = ("data.train_batch_size=512", "data.gen_batch_size=1536", f"{A}.ppo_mini_batch_size=32")
    v = found(
        c := made(f"{F}.enable=True", f"{F}.metric=acc", f"{F}.max_num_gen_batches=10", *sizes)
    )
    assert not c.refused and (v[f"{P}.name"], v[f"{P}.args.metric_key"]) == (
        "dapo_dynamic_sampling",
        "acc",
    )
    assert v["buffer.max_refill"] == (10 * 1536 - 512) // 16
    v = found(made(f"+{F}.enable=True", f"{F}.metric=seq_reward", f"{F}.max_num_gen_batches=0"))
    assert v[f"{P}.name"] == "reward_std_filter" and "buffer.max_refill" not in v
    c = made(f"{F}.enable=False", f"{F}.metric=acc")
    assert not c.refused and f"{P}.name" not in found(c)
    assert [r.argument.key for r in made(f"{F}.enable=True", f"{F}.speed=3").refused] == [
        f"{F}.enable",
        f"{F}.speed",
    ]


@pytest.mark.parametrize(
    ("estimator", "expected", "args"),
    [
        ("gae", ("ppo", "ppo"), {"gamma": 1.0, "lam": 1.0}),
        ("grpo", ("grpo", "grpo"), {"norm_by_std": True}),
        ("rloo", ("rloo", "rloo"), {}),
        ("reinforce_plus_plus", ("reinforceplusplus", "reinforceplusplus"), {"gamma": 1.0}),
        ("remax", ("remax", "remax"), {}),
        ("reinforce_plus_plus_baseline", ("reinforceplusplus", "reinforceplusplus_baseline"), {}),
    ],
)
def test_estimators(estimator: str, expected: tuple[str, str], args: dict[str, Any]) -> None:
    v = found(made(f"algorithm.adv_estimator={estimator}"))
    assert (v["algorithm.algorithm_type"], v["algorithm.advantage_fn"]) == expected
    assert {
        k.rsplit(".", 1)[-1]: x for k, x in v.items() if k.startswith("algorithm.advantage_fn_args")
    } == args


@pytest.mark.parametrize("loss", ["gspo", "sapo", "geo_mean"])
def test_losses_of_sequences_do_not_read_the_aggregation(loss: str) -> None:
    mode = f"{A}.policy_loss.loss_mode={loss}"
    assert "algorithm.loss_agg_mode" not in found(made(mode))
    c = made(mode, f"{A}.loss_agg_mode=token-mean")
    assert outcome(c, f"{A}.loss_agg_mode")[
        0
    ] == "ignored" and "algorithm.loss_agg_mode" not in found(c)
    assert (
        found(made(f"{A}.loss_agg_mode=seq-mean-token-sum"))["algorithm.loss_agg_mode"]
        == "seq-mean-token-sum"
    )


def test_evaluation_sampling() -> None:
    v = found(made())
    assert v[f"{E}.rollout_args.temperature"] == 0 and v[f"{E}.repeat_times"] == 1
    k = f"{R}.val_kwargs"
    v = found(made(f"{k}.do_sample=True", f"{k}.temperature=1.0", f"{k}.top_p=0.7", f"{k}.n=32"))
    assert {x: v[f"{E}.rollout_args.{x}"] for x in ("temperature", "top_p")} == {
        "temperature": 1.0,
        "top_p": 0.7,
    }
    assert v[f"{E}.repeat_times"] == 32


@pytest.mark.parametrize(
    ("mode", "temperature", "kind", "asks"),
    [
        ((), 0.8, "mapped", 1),
        ((f"{R}.mode=async",), 0.8, "mapped", 0),
        ((f"{R}.mode=sync",), 0, "ignored", 0),
    ],
)
def test_asynchronous_evaluation_samples_by_its_temperature_alone(
    mode: tuple[str, ...], temperature: float, kind: str, asks: int
) -> None:
    key = f"{R}.val_kwargs.temperature"
    c = made(f"{key}=0.8", *mode)
    assert found(c)[f"{E}.rollout_args.temperature"] == temperature and outcome(c, key)[0] == kind
    assert [q.partition(" ")[0] for q in c.questions] == [key] * asks


@pytest.mark.parametrize(
    ("more", "asks"),
    [
        ((), 1),
        ((f"{A}.use_kl_loss=True",), 0),
        (("algorithm.use_kl_in_reward=False",), 0),
        (("algorithm.kl_ctrl.kl_coef=0.0",), 0),
    ],
)
def test_a_kl_coefficient_of_early_verl_is_asked_about(more: tuple[str, ...], asks: int) -> None:
    c = made("algorithm.kl_ctrl.kl_coef=0.001", f"{A}.fsdp_config.grad_offload=True", *more)
    assert outcome(c, f"{A}.fsdp_config.grad_offload")[0] == "ignored"
    assert len([q for q in c.questions if "use_kl_in_reward=True" in q]) == asks


@pytest.mark.parametrize(
    ("arguments", "asks"),
    [
        (("algorithm.kl_ctrl.kl_coef=0.001", f"{A}.use_kl_loss=True"), 1),
        ((f"{A}.fsdp_config.grad_offload=False",), 1),
        ((), 0),
        ((f"{A}.fsdp_config.grad_offload=False", f"{A}.entropy_coeff=0"), 0),
        (("algorithm.use_kl_in_reward=False",), 0),
        (("algorithm.kl_ctrl.kl_coef=0.0", f"{A}.use_kl_loss=True"), 0),
    ],
)
def test_an_entropy_of_early_verl_is_asked_about(arguments: tuple[str, ...], asks: int) -> None:
    """TinyZero, Search-R1, code-r1 and Skywork-OR1: entropy_coeff is 0.001 in their
    ppo_trainer.yaml.
    """
    c = made(*arguments)
    asked = [q for q in c.questions if "entropy_coeff=0.001" in q]
    told = any("its defaults are taken" in q for q in asked)
    assert len(asked) == asks
    assert found(c)["algorithm.entropy_loss_fn_args.entropy_coef"] == (0.001 if told else 0)


def test_evaluation_does_not_take_over_the_sampling_of_training() -> None:
    v = found(made(f"{R}.top_p=0.9", f"{R}.top_k=50", f"{R}.val_kwargs.do_sample=True"))
    assert (v[f"{E}.rollout_args.top_p"], v[f"{E}.rollout_args.top_k"]) == (1.0, -1)


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        ("gspo", {"clip_range_low": 0.2, "clip_range_high": 0.2}),
        ("cispo", {"clip_range_low": 0.2, "clip_range_high": 0.2}),
        ("kl_cov", {"ppo_kl_coef": 0.1}),
        ("mine", {"clip_ratio_c": 3.0}),
    ],
)
def test_losses_have_the_numbers_of_verls_file_where_none_are_stated(
    loss: str, expected: dict[str, float]
) -> None:
    v = found(made(f"{A}.policy_loss.loss_mode={loss}"))
    assert {k.rsplit(".", 1)[-1]: x for k, x in v.items() if k.startswith(LOSS)} == expected


def test_a_critic_with_mini_batches_of_its_own_is_refused() -> None:
    key = "critic.ppo_mini_batch_size"
    assert outcome(made(*SHARED, f"{key}=64"), key)[0] == "derived"
    assert outcome(made(*SHARED, f"{key}=32"), key)[0] == "refused"
    assert outcome(made(*SHARED, f"{key}=32", "algorithm.adv_estimator=grpo"), key)[0] == "ignored"


def test_all_checkpoints_are_kept_as_in_verl() -> None:
    assert found(made())["trainer.max_checkpoints_to_keep"] == 0
    assert found(made(program="sft"))["trainer.max_checkpoints_to_keep"] == 0
    assert found(made("trainer.max_actor_ckpt_to_keep=5"))["trainer.max_checkpoints_to_keep"] == 5


def test_the_asynchronous_recipe_evaluates_as_its_rollouter_says() -> None:
    c = made(
        "async_training.trigger_parameter_sync_step=4",
        "rollout.test_freq=5",
        "trainer.test_freq=-1",
        program="fully_async",
    )
    assert (
        found(c)["explorer.eval_interval"] == 20 and outcome(c, "trainer.test_freq")[0] == "ignored"
    )


@pytest.mark.parametrize(("count", "interval"), [(10, 40), (-1, 0)])
def test_the_newer_asynchronous_recipe_evaluates_as_its_trainer_says(
    count: int, interval: int
) -> None:
    """veRL 1dda039b has no rollout.test_freq; both count synchronisations."""
    c = made(
        "async_training.trigger_parameter_sync_step=4",
        f"trainer.test_freq={count}",
        program="fully_async",
    )
    assert (
        found(c)["explorer.eval_interval"] == interval
        and outcome(c, "trainer.test_freq")[0] == "mapped"
    )


def test_the_asynchronous_recipe_warms_up_by_calls_of_its_trainer() -> None:
    """veRL's schedule moves once for the require_batches mini batches of a call, not once for a
    synchronisation.
    """
    c = made(
        "async_training.trigger_parameter_sync_step=4",
        "async_training.require_batches=2",
        f"{A}.optim.lr_warmup_steps=10",
        "critic.optim.lr_warmup_steps=5",
        "trainer.critic_warmup=4",
        "trainer.save_freq=3",
        program="fully_async",
    )
    v = found(c)
    assert (
        v["algorithm.optimizer.lr_warmup_steps"],
        v["trainer.critic.optimizer.lr_warmup_steps"],
    ) == (20, 10)
    assert (v["trainer.critic_warmup"], v["trainer.save_interval"]) == (6, 24)


@pytest.mark.parametrize(
    ("more", "bypass"),
    [
        ((), True),
        (("algorithm.rollout_correction.bypass_mode=False",), False),
        (
            (
                "async_training.use_rollout_log_probs=True",
                "async_training.compute_prox_log_prob=True",
            ),
            None,
        ),
    ],
)
def test_the_asynchronous_recipe_corrects_with_the_engines_log_probs(
    more: tuple[str, ...], bypass: bool | None
) -> None:
    c = made(
        *SHARED,
        "algorithm.rollout_correction.rollout_rs=token_k1",
        "algorithm.rollout_correction.rollout_rs_threshold=2.0",
        "rollout.total_rollout_steps=512",
        *more,
        program="fully_async",
    )
    assert found(c).get("algorithm.rollout_correction.bypass_mode") == bypass and not c.errors
    assert "algorithm.rollout_correction.bypass_mode" not in found(
        made(*SHARED, program="fully_async")
    )


def test_rewards() -> None:
    c = made("custom_reward_function.path=my/reward.py", "custom_reward_function.name=score")
    assert found(c)["buffer.explorer_input.default_reward_fn_type"] == "my/reward.py:score"
    assert (
        found(made("custom_reward_function.path=r.py"))[
            "buffer.explorer_input.default_reward_fn_type"
        ]
        == "r.py:compute_score"
    )


@pytest.mark.parametrize("manager", ["naive", "dapo", "prime", "batch"])
def test_reward_managers(manager: str) -> None:
    c = made(f"reward_model.reward_manager={manager}", "data.val_files=v.parquet")
    assert outcome(c, "reward_model.reward_manager")[0] == (
        "equal" if manager == "naive" else "mapped"
    )
    for taskset in (T, E):
        assert found(c).get(f"{taskset}.reward_fn_args.reward_manager") == (
            None if manager == "naive" else manager
        )
    assert (
        outcome(made("reward_model.reward_manager=swift"), "reward_model.reward_manager")[0]
        == "refused"
    )


def test_steps_win_over_epochs() -> None:
    c = made("trainer.total_epochs=3", "trainer.total_training_steps=10")
    assert outcome(c, "trainer.total_epochs")[
        0
    ] == "ignored" and "buffer.total_epochs" not in found(c)
    c = made("trainer.total_epochs=3", "trainer.total_training_steps=null")
    assert found(c)["buffer.total_epochs"] == 3


def test_unknown_argument_names_the_nearest() -> None:
    c = made(f"{A}.ppo_mini_batchsize=3")
    assert outcome(c, f"{A}.ppo_mini_batchsize") == (
        "refused",
        f"unknown argument; did you mean {A}.ppo_mini_batch_size?",
    )


def test_the_last_statement_holds() -> None:
    c = made(f"{R}.n=4", f"{R}.n=8")
    assert [r.outcome.kind for r in c.rows] == ["ignored", "mapped"]
    assert found(c)["algorithm.repeat_times"] == 8


def test_a_group_given_as_a_mapping() -> None:
    c = made(f"{A}.optim={{lr: 2e-6, weight_decay: 0.1}}")
    assert [r.outcome.kind for r in c.rows] == ["mapped"]
    v = found(c)
    assert v["algorithm.optimizer.lr"] == 2e-6 and v["algorithm.optimizer.weight_decay"] == 0.1


def test_a_group_that_is_no_mapping_is_refused() -> None:
    assert [
        r.argument.key
        for r in made(f"{A}.checkpoint=3", f"{A}.checkpoint.contents=[model]").refused
    ] == [f"{A}.checkpoint"]
    with pytest.raises(ConfigError, match="as a value and as a group"):
        made(
            "+actor_rollout_ref.model.override_config.a=1",
            "+actor_rollout_ref.model.override_config.a.b=1",
        )


def test_references_to_other_keys() -> None:
    c = made(
        "trainer.project_name=p",
        "trainer.experiment_name=${trainer.project_name}_1",
        "critic.optim.lr=${oc.select:a.b,3e-5}",
    )
    assert found(c)["name"] == "p_1" and found(c)["trainer.critic.optimizer.lr"] == 3e-5
    # as veRL's own file and Hydra's copies of it have it
    near = "${oc.select:.ppo_micro_batch_size,null}"
    c = made(
        "critic.ppo_micro_batch_size=16",
        f"critic.ppo_micro_batch_size_per_gpu={near}",
        "trainer.experiment_name=${..data.seed}",
        "data.seed=7",
        f"{A}.ppo_micro_batch_size_per_gpu={near}",
    )
    assert found(c)["trainer.critic.micro_batch_size_per_gpu"] == 16 and found(c)["name"] == "7"
    assert outcome(c, f"{A}.ppo_micro_batch_size_per_gpu")[0] == "ignored"


@pytest.mark.parametrize(
    ("key", "default", "other"),
    [
        ("trainer.v1.trainer_mode", "sync", "separate_async"),
        ("distillation.enabled", "False", "True"),
        ("critic.model.lora.rank", "0", "8"),
        (f"{A}.router_replay.mode", "disabled", "R3"),
        (f"{R}.nnodes", "0", "1"),
        ("skip.rollout.enable", "False", "True"),
        ("reward.reward_manager.source", "register", "importlib"),
        ("critic.optim.optimizer", "AdamW", "Muon"),
    ],
)
def test_what_a_whole_configuration_says_is_off_is_not_lost(
    key: str, default: str, other: str
) -> None:
    """A resolved YAML states every default of veRL's."""
    assert outcome(made(f"{key}={default}"), key) == (
        "ignored",
        "switched off, which changes nothing",
    )
    kind, reason = outcome(made(f"{key}={other}"), key)
    assert kind == "refused" and "unknown argument" not in reason


def test_options_of_the_command() -> None:
    c = made(engine_num=3, overrides=("algorithm.optimizer.lr=2e-6", "buffer.total_epochs=null"))
    v = found(c)
    assert v["explorer.rollout_model.engine_num"] == 3 and v["algorithm.optimizer.lr"] == 2e-6
    assert next(w.why for w in c.written if w.key == "algorithm.optimizer.lr") == "--set"
    with pytest.raises(ConfigError, match="unknown key"):
        made(overrides=("algorithm.optimzer.lr=1",))
    with pytest.raises(ConfigError, match="at least 1"):
        made(engine_num=0)
    workflow = ("buffer.explorer_input.default_workflow_type=my_tools",)
    assert not made(
        f"{R}.multi_turn.enable=True", f"{R}.multi_turn.max_turns=3", overrides=workflow
    ).refused
    turns = found(made(f"{R}.multi_turn.enable=True", f"{R}.multi_turn.max_assistant_turns=3"))
    assert turns["buffer.explorer_input.default_workflow_type"] == "tool_workflow"
    assert turns["buffer.explorer_input.tasksets[0].workflow_args.max_assistant_turns"] == 3


def test_numbers_that_are_none_name_their_line() -> None:
    with pytest.raises(
        ConfigError, match=r"data.train_batch_size: given 'many' \(line 2\); must be a whole number"
    ):
        made("trainer.nnodes=1", "data.train_batch_size=many")


def test_tasksets_of_one_folder_have_names_of_their_own() -> None:
    v = found(made("data.train_files=[/d/x/a.parquet, /d/x/b.parquet]", "data.val_files=null"))
    assert [v[f"buffer.explorer_input.tasksets[{i}].name"] for i in (0, 1)] == ["x", "x_b"]


def test_fine_tuning() -> None:
    c = made(
        "data.train_files=/d/gsm8k/train.parquet",
        "data.val_files=/d/gsm8k/test.parquet",
        "data.prompt_key=extra_info",
        "data.response_key=extra_info",
        "data.prompt_dict_keys=['question']",
        "+data.response_dict_keys=['answer']",
        "data.micro_batch_size_per_gpu=4",
        "data.train_batch_size=64",
        "model.partial_pretrain=org/model",
        "optim.lr=1e-4",
        "model.lora_rank=32",
        "model.lora_alpha=16",
        "model.target_modules=all-linear",
        "trainer.default_local_dir=/out",
        "trainer.project_name=p",
        "trainer.experiment_name=n",
        "trainer.total_epochs=2",
        "trainer.logger=['console','wandb']",
        "ulysses_sequence_parallel_size=2",
        "use_remove_padding=true",
        program="sft",
    )
    v = found(c)
    buffer = "buffer.trainer_input.experience_buffer"
    assert not c.refused
    assert (v["mode"], v["algorithm.algorithm_type"]) == ("train", "sft")
    assert (v[f"{buffer}.path"], v[f"{buffer}.split"], v[f"{buffer}.storage_type"]) == (
        "/d/gsm8k",
        "train",
        "file",
    )
    assert v[f"{buffer}.eval_split"] == "test"
    assert v[f"{buffer}.format.prompt_key"] == "extra_info.question"
    assert v["buffer.train_batch_size"] == 64 and v["buffer.total_epochs"] == 2
    assert (
        v["model.lora_configs[0].lora_rank"] == 32
        and v["algorithm.optimizer.lr_scheduler_type"] == "cosine"
    )
    assert "explorer.rollout_model.engine_num" not in v


def test_fine_tuning_on_chats_trains_every_answer() -> None:
    c = made("data.train_files=/d/chats/train.parquet", "data.multiturn.enable=true", program="sft")
    form = "buffer.trainer_input.experience_buffer.format"
    assert {k: v for k, v in found(c).items() if k.startswith(form)} == {
        f"{form}.prompt_type": "messages",
        f"{form}.messages_key": "messages",
        f"{form}.enable_concatenated_multi_turn": True,
    }
    assert not c.refused and not c.errors


def test_evaluation_becomes_a_command() -> None:
    c = made(
        "data.path=/d/out.parquet",
        "data.prompt_key=prompt",
        "data.response_key=responses",
        "custom_reward_function.path=r.py",
        "custom_reward_function.name=score",
        "data.nonsense=1",
        program="main_eval",
    )
    assert c.values == {} and c.command.startswith("rft bench --input /d/out.parquet")
    assert "--reward-fn r.py:score" in c.command and "--truth-key reward_model" in c.command
    assert [r.argument.key for r in c.refused] == ["data.nonsense"]


def test_resolved_yaml_leaves_out_what_is_our_default() -> None:
    c = made(
        "algorithm.adv_estimator=grpo",
        f"{A}.grad_clip=1.0",
        f"{A}.clip_ratio=0.2",
        f"{A}.clip_ratio_low=0.2",
        f"{A}.clip_ratio_high=0.2",
        f"{A}.ppo_micro_batch_size=null",
        f"{A}.fsdp_config.param_offload=False",
        f"{A}.optim.min_lr_ratio=0.0",
        f"{R}.temperature=1.0",
        "trainer.something_new=null",
        f"{R}.n=8",
        program="yaml",
    )
    assert not c.refused
    assert outcome(c, f"{A}.fsdp_config.param_offload")[0] == "equal"
    assert "trainer.offload_policy" not in found(c)
    assert found(c)["algorithm.optimizer.min_lr_ratio"] == 0.0
    assert {outcome(c, k)[0] for k in (f"{A}.ppo_micro_batch_size", "trainer.something_new")} == {
        "ignored"
    }

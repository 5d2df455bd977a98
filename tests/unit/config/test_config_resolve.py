"""RunConfig → Plan: derived values, inheritance, and that every key reaches the plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rft.config.load import load
from rft.config.plan import Facts, Plan
from rft.config.resolve import resolve
from rft.config.schema.walk import all_keys, field_at, literals
from rft.errors import ConfigError, ConfigErrors
from tests.helpers.rows import for_each

GOOD = Path(__file__).parent / "data" / "good"
CPU = Facts(cpus=4, gpus=0)
IN = "buffer.explorer_input"


def plan(*overrides: str, file: str = "short.yaml", facts: Facts = CPU, **more: Any) -> Plan:
    return resolve(load(GOOD / file, overrides), facts, **more)


def test_full_file() -> None:
    p = plan(file="full.yaml")
    warm, cool = p.explorer.tasksets
    assert (warm.sampling.temperature, warm.sampling.max_tokens, warm.num_runs, warm.weight) == (
        1.2,
        32,
        4,
        3,
    )
    assert (cool.sampling.temperature, cool.sampling.max_tokens, cool.selector) == (
        0.6,
        12,
        "shuffle",
    )
    (held_out,) = p.explorer.eval_tasksets
    assert (
        held_out.sampling.temperature,
        held_out.sampling.top_p,
        held_out.num_runs,
        held_out.is_eval,
    ) == (0, 0.9, 1, True)
    assert p.run_dir == Path.cwd() / "runs/demo/baseline/demo-GRPO"
    assert p.staleness_bound == 2 and p.sync.sync_method == "checkpoint"
    assert p.explorer.eval_interval == 4, "the next multiple of sync_interval"
    assert [e.name for e in p.engines] == ["engine-0", "engine-1"] and [
        e.seed for e in p.engines
    ] == [7, 8]
    assert p.trainer.batch_groups == 2 and p.trainer.batch_rows is None, "8 rows are 2 groups of 4"
    assert p.learner.algorithm.kl_loss_fn == "k2" and p.learner.algorithm.kl_loss_fn_args == {
        "kl_coef": 0.01
    }
    assert p.buffer.storage_type == "queue" and p.buffer.folder == p.run_dir / "buffer"
    assert p.monitor.tracker_args("wandb") == {"mode": "offline"}


def test_defaults_are_the_algorithms() -> None:
    p = plan()
    assert (
        p.learner.algorithm.advantage_fn == "grpo" and p.learner.algorithm.policy_loss_fn == "ppo"
    )
    assert p.explorer.tasksets[0].num_runs == 8
    assert plan("algorithm.algorithm_type=Dr_GRPO").learner.algorithm.advantage_fn_args == {
        "norm_by_std": False
    }


def test_single_arguments_are_merged_over_the_algorithms() -> None:
    a = plan(
        "algorithm.algorithm_type=dr_grpo", "algorithm.advantage_fn_args.epsilon=1e-4"
    ).learner.algorithm
    assert a.advantage_fn_args == {"norm_by_std": False, "epsilon": 1e-4}


def test_lengths() -> None:
    def lengths(*o: str) -> tuple[int, int | None, int]:
        p = plan("model.max_prompt_tokens=null", "model.max_response_tokens=null", *o)
        return (
            p.engines[0].max_model_len,
            p.engines[0].max_prompt_tokens,
            p.learner.max_response_tokens,
        )

    assert lengths("model.max_model_len=101") == (101, 50, 51)
    assert lengths("model.max_model_len=100", "model.max_prompt_tokens=30") == (100, 30, 70)
    assert lengths("model.max_model_len=100", "model.max_response_tokens=30") == (100, 70, 30)


def test_cpu_devices() -> None:
    p = plan()
    assert (p.engines[0].device, p.engines[0].dtype, p.engines[0].enforce_eager) == (
        "cpu",
        "float32",
        True,
    )
    assert (p.learner.device, p.learner.world_size, p.learner.cpu_threads) == ("cpu", 1, 4)
    assert plan("trainer.world_size=2").learner.cpu_threads == 2
    of_gpus = (
        "mode=colocate",
        "cluster.node_num=2",
        "cluster.gpu_per_node=2",
        "synchronizer.sync_method=checkpoint",
    )
    assert (nodes := plan(*of_gpus).learner).cpu_threads == 2 and nodes.world_size == 4, (
        "two ranks on each machine"
    )


def test_gpu_split_of_a_declared_cluster() -> None:
    p = plan("cluster.node_num=1", "cluster.gpu_per_node=8", "explorer.rollout_model.engine_num=2")
    assert (p.engines[0].device, p.engines[0].dtype, p.learner.world_size, p.learner.dtype) == (
        "cuda",
        "bfloat16",
        6,
        "bfloat16",
    )
    assert (p.cluster.gpus_per_engine, p.cluster.trainer_gpus, p.cluster.gpus) == (1, 6, 8)
    assert p.sync_runtime.engine_dtype == "bfloat16"


def test_gpus_found_on_the_machine() -> None:
    assert plan(facts=Facts(cpus=8, gpus=4)).learner.world_size == 3
    assert plan("trainer.device=cpu", facts=Facts(cpus=8, gpus=1)).engines[0].device == "cuda"


def test_steps() -> None:
    assert plan().total_steps == 2
    assert plan("buffer.total_steps=null").total_steps is None
    assert plan("trainer.total_steps=5", "buffer.total_steps=null").explorer.total_batches == 5
    assert plan("trainer.total_steps=1").explorer.total_batches == 1
    reduced = plan("trainer.total_steps=9")
    assert reduced.total_steps == 2 and any("never reached" in w for w in reduced.warnings)


def test_steps_from_epochs() -> None:
    asked = []

    def num_batches(tasksets: Any, batch_size: int, epochs: int) -> int:
        asked.append((len(tasksets), batch_size, epochs))
        return 10 * epochs

    p = plan("buffer.total_steps=null", "buffer.total_epochs=3", num_batches=num_batches)
    assert (
        p.total_steps,
        p.trainer.total_steps,
        p.learner.total_steps,
        p.explorer.total_batches,
    ) == (30, 30, 30, 30)
    assert asked == [(1, 4, 3)]
    capped = plan(
        "buffer.total_steps=null",
        "buffer.total_epochs=1",
        "trainer.total_steps=15",
        num_batches=num_batches,
    )
    assert capped.total_steps == 10 and any("never reached" in w for w in capped.warnings)
    assert {d.key: d.value for d in capped.derived}["buffer.total_steps"] == 10
    assert (
        plan(
            "buffer.total_steps=null", "trainer.total_steps=15", num_batches=num_batches
        ).total_steps
        == 15
    )

    def unreadable(*_: Any) -> int:
        raise ConfigError("cannot be read", key="taskset")

    # that alone: no steps were counted
    with pytest.raises(ConfigError, match=r"^taskset: cannot be read$"):
        plan("buffer.total_steps=null", num_batches=unreadable)


def test_steps_of_a_data_set() -> None:
    data = (
        "mode=train",
        "algorithm.algorithm_type=sft",
        "buffer.trainer_input.experience_buffer.path=rows.jsonl",
    )

    def total(*more: str) -> int | None:
        return plan(*data, "buffer.train_batch_size=2", *more, num_batches=lambda *_: 7).total_steps

    assert total("buffer.total_steps=40", "buffer.total_epochs=1") == 40, (
        "total_steps wins, as everywhere"
    )
    assert total("buffer.total_steps=null", "buffer.total_epochs=1", "trainer.total_steps=40") == 7
    assert total("buffer.total_steps=null") == 7


def test_train_batch_size_in_rows() -> None:
    whole = plan("buffer.train_batch_size=32")
    assert whole.trainer.batch_groups == 4 and whole.trainer.batch_rows is None
    half = plan("buffer.train_batch_size=16", "buffer.total_steps=10")
    assert (half.trainer.batch_groups, half.trainer.batch_rows, half.total_steps) == (None, 16, 20)
    assert (half.schedule.batch_units, half.schedule.step_units, half.staleness_bound) == (
        32,
        16,
        1,
    )
    assert plan("buffer.train_batch_size=0").trainer.batch_groups == 4
    double = plan("buffer.train_batch_size=64", "trainer.total_steps=3", "buffer.total_steps=null")
    assert double.explorer.total_batches == 6
    with pytest.raises(ConfigError, match="3 explore steps of 32 rows do not fill one train step"):
        plan("buffer.train_batch_size=320", "buffer.total_steps=3")


def test_groups_of_different_sizes_in_steps_of_rows_are_of_any_age() -> None:
    """The schedule counts on the smallest groups, so that a step never waits for a batch that waits
    for it.
    """
    rows = [
        f"{{name: {name}, path: rows.jsonl, repeat_times: {n}}}"
        for name, n in (("few", 4), ("many", 8))
    ]
    two = (
        f"{IN}.tasksets=[{', '.join(rows)}]",
        f"{IN}.default_workflow_type=simple_workflow",
        f"{IN}.taskset=null",
    )
    for own, bound in ((), None), (("synchronizer.max_staleness=3",), 3):
        found = plan(*two, *own, "buffer.train_batch_size=16")
        assert found.staleness_bound == bound and any(
            "without bound" in w for w in found.warnings
        ) == (not own)
    assert plan(*two).staleness_bound == 0, "whole groups"


def test_group_of_one_is_warned_about() -> None:
    assert any("group of one" in w for w in plan("algorithm.repeat_times=1").warnings)
    assert not plan().warnings


def test_paths_beside_the_file() -> None:
    assert (
        plan().explorer.tasksets[0].path == str(GOOD.absolute() / "rows.jsonl")
        or plan().explorer.tasksets[0].path == "rows.jsonl"
    )
    exists = replace(CPU, exists=lambda p: p == str(GOOD.absolute() / "rows.jsonl"))
    assert plan(facts=exists).explorer.tasksets[0].path == str(GOOD.absolute() / "rows.jsonl")
    assert (
        plan(f"{IN}.taskset.path=reasoning_gym://chain_sum").explorer.tasksets[0].path
        == "reasoning_gym://chain_sum"
    )
    # else the runs would be in a folder of this name
    with pytest.raises(ConfigErrors, match=r"checkpoint_root_dir: has a \$"):
        plan("checkpoint_root_dir=$HOME/runs")


def test_taskset_names_are_made_unique() -> None:
    p = plan(
        f"{IN}.taskset=null",
        f"{IN}.tasksets=[{{path: a/x.jsonl}}, {{path: b/x.jsonl}}]",
        f"{IN}.eval_tasksets=[{{path: a/x.jsonl}}]",
    )
    assert [t.name for t in (*p.explorer.tasksets, *p.explorer.eval_tasksets)] == [
        "x",
        "x_2",
        "x_eval",
    ]


def test_buffer_paths() -> None:
    key = "buffer.trainer_input.experience_buffer"
    assert (
        plan(f"{key}.path=postgres://u:p@h/db").buffer.ledger_url == "postgresql+psycopg://u:p@h/db"
    )
    assert str(plan(f"{key}.path=x.db").buffer.ledger_url) == f"sqlite:///{Path.cwd() / 'x.db'}"
    memory = plan(f"{key}.storage_type=queue", f"{key}.path=None")
    assert memory.buffer.storage_path == "none" and any("memory only" in w for w in memory.warnings)


def test_monitor_arguments() -> None:
    assert plan(
        "monitor.monitor_type=wandb", "monitor.monitor_args={mode: offline}"
    ).monitor.tracker_args("wandb") == {"mode": "offline"}
    with pytest.raises(ConfigError, match=r"monitor\.monitor_args: has the keys mode"):
        plan("monitor.monitor_type=[wandb, tensorboard]", "monitor.monitor_args={mode: offline}")


def test_unknown_part_is_left_to_the_second_stage_where_plugins_may_define_it() -> None:
    assert (
        plan("algorithm.policy_loss_fn=mine", "plugin_dirs=[x]").learner.algorithm.policy_loss_fn
        == "mine"
    )
    with pytest.raises(ConfigError, match="unknown policy loss 'mine'"):
        plan("algorithm.policy_loss_fn=mine")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("explorer.rollout_model.engine_type=scripted", "transformers and vllm, not with scripted"),
        ("trainer.ulysses_sequence_parallel_size=2", "which 2 ranks cannot share"),
    ],
)
def test_images_need_an_engine_and_rows_of_their_own(override: str, message: str) -> None:
    fits = (
        f"{IN}.taskset.format.image_key=images",
        "explorer.rollout_model.engine_type=transformers",
        "trainer.world_size=2",
    )
    assert plan(*fits).explorer.tasksets[0].format.image_key == "images"
    with pytest.raises(ConfigError, match=message):
        plan(*fits, override)


def test_same_input_same_plan() -> None:
    assert plan(file="full.yaml") == plan(file="full.yaml")


def test_error_given_values() -> None:
    with pytest.raises(ConfigErrors) as caught:
        plan(
            "trainer.fsdp_size=3",
            "synchronizer.max_staleness=0",
            "synchronizer.sync_interval=2",
        )
    assert {e.key: e.given for e in caught.value.errors} == {
        "trainer.fsdp_size": 3,
        "synchronizer.max_staleness": 0,
    }


# ---------------------------------------------------------------- every key: a bad value is
# refused, a good one changes the plan

# a value that differs from the file's; None: there is none, or it is refused for training
TEXTS: dict[str, str | None] = {
    "buffer.resume_rows": "keep",
    "explorer.serve.reward_range": "[0, 1]",
    "mode": None,
    "algorithm.algorithm_type": "dr_grpo",
    "algorithm.advantage_fn": "a.py:x",
    "algorithm.policy_loss_fn": "a.py:x",
    "algorithm.kl_loss_fn": "k3",
    "algorithm.kl_penalty_fn": "k3",
    "algorithm.entropy_loss_fn": "none",
    "algorithm.kl_penalty_fn_args": None,
    "algorithm.sample_strategy": "pf_ppo",
    "algorithm.sample_strategy_args": None,
    "algorithm.advantage_fn_args": "{epsilon: 0.5}",
    "algorithm.policy_loss_fn_args": "{clip_range: 0.5}",
    "algorithm.entropy_loss_fn_args": "{entropy_coef: 0.1}",
    "algorithm.kl_loss_fn_args": None,
    "model.logprobs": None,
    "trainer.fsdp_size": "1",
    "trainer.critic.row_layout": "padded",
    "trainer.checkpoint.save_contents": "[model]",
    "trainer.checkpoint.load_contents": "[model]",
    "trainer.critic.optimizer.betas": "[0.5, 0.6]",
    # see test_config_policies.py
    **dict.fromkeys(
        ("algorithm.rollout_correction.loss_type", "algorithm.rollout_correction.rollout_rs"), None
    ),
    **dict.fromkeys(("trainer.critic_warmup", "trainer.critic.use_dynamic_bsz"), None),
    "trainer.profiler.steps": "[1, 2]",
    **dict.fromkeys(
        (
            "trainer.profiler.ranks",
            "trainer.profiler.all_ranks",
            "trainer.ulysses_sequence_parallel_size",
        ),
        None,
    ),
    "trainer.ref.reshard_after_forward": "false",
    # see test_config_spread.py
    **dict.fromkeys(
        (
            "trainer.offload_policy",
            "trainer.enable_activation_offload",
            "trainer.ref.param_offload",
            "trainer.critic.offload_policy",
        ),
        None,
    ),
    "synchronizer.sync_style": None,
    "model.top_p": None,
    "model.top_k": None,
    "model.repetition_penalty": None,
    "model.min_response_tokens": None,
    "model.custom_chat_template": None,
    "explorer.name": None,
    "trainer.name": None,
    "trainer.micro_batch_size_per_gpu": None,
    "model.rope_scaling": "{rope_type: linear, factor: 2.0}",
    # these need a device, or use_dynamic_bsz: false: test_config_every_key.py
    **dict.fromkeys(
        f"trainer.{k}"
        for k in (
            "fused_kernel_backend",
            "log_prob_micro_batch_size_per_gpu",
            "ref.log_prob_micro_batch_size_per_gpu",
            "ref.use_dynamic_bsz",
        )
    ),
    "trainer.param_dtype": None,
    "explorer.rollout_model.device": None,
    "trainer.device": None,
    "model.max_model_len": "64",
    "explorer.rollout_model.tensor_parallel_size": "2",
    "buffer.total_epochs": "7",
    "buffer.explorer_input.taskset.format.prompt_type": "messages",
    "explorer.eval_interval": None,
    "explorer.eval_on_startup": None,
    "explorer.eval_at_end": None,
    "monitor.monitor_args": None,
    "buffer.explorer_input.default_workflow_type": "other",
    "buffer.explorer_input.default_eval_workflow_type": None,
    "buffer.explorer_input.default_reward_fn_type": "other",
    "cluster.node_num": None,
    "cluster.gpu_per_node": None,
    "plugin_dirs": "[x]",
    "algorithm.optimizer.betas": "[0.5, 0.6]",
    "synchronizer.max_staleness": "5",
    "buffer.train_batch_size": "16",
    "monitor.monitor_type": "wandb",
    "buffer.explorer_input.taskset.storage_type": "python",
    "trainer.use_dynamic_bsz": None,
    "deterministic": "true",
    "name": "other",
    "group": "g",
    "algorithm.loss_agg_mode": "seq-mean-token-sum",
    "explorer.rollout_model.dtype": "bfloat16",
    "explorer.rollout_model.max_num_batched_tokens": "512",
    "explorer.rollout_model.enforce_eager": "false",
    "trainer.total_steps": "1",
    **dict.fromkeys(
        (
            f"buffer.trainer_input.experience_buffer.replay_buffer.{name}"
            for name in ("priority_fn", "priority_fn_args", "reuse_cooldown_time", "max_uses")
        ),
        None,  # they need replay_buffer.enable, see test_config_every_key.py
    ),
    "buffer.total_tasks": None,  # these are tested in test_config_keys_b.py
    # what only means something beside other keys: test_config_every_key.py, test_config_tasksets.py
    **dict.fromkeys(
        f"data_processor.task_pipeline.{name}"
        for name in "operators config_path inputs target_fields order top_k output".split()
    ),
    **dict.fromkeys(
        f"data_processor.task_pipeline.priority_weights.{name}"
        for name in "difficulty diversity usage_frequency quality".split()
    ),
    **dict.fromkeys(
        f"buffer.explorer_input.taskset.data_selector.{name}" for name in ("feature_keys", "kwargs")
    ),
    "buffer.explorer_input.taskset.data_selector.selector_type": "random",
    "model.prompt_truncation_side": None,
    "data_processor.experience_pipeline.input_save_path": None,
    "explorer.over_rollout.ratio": None,
    "explorer.dynamic_timeout.ratio": None,  # see test_config_keys_b.py
    "explorer.rollout_model.base_port": None,  # read with enable_openai_api
    "explorer.rollout_model.api_key": None,
    **dict.fromkeys(
        (
            "explorer.max_inflight_batches",
            "synchronizer.require_batches",
            "synchronizer.staleness_threshold",
        )
    ),  # fully_async's
    # with sync_method nccl
    "synchronizer.nccl.bucketed_broadcast": None,
    "synchronizer.nccl.overlap_broadcast_and_load": None,
    "synchronizer.nccl.bucket_size_mb": None,
    # this and what says how a data set is read: test_config_every_key.py
    "trainer.eval_interval": None,
}
DATA_SET = tuple(
    f"buffer.trainer_input.experience_buffer.{name}"
    for name in ("split", "eval_split", "subset_name", "format", "data_selector", "filter_overlong")
)


def leaves() -> Iterator[str]:
    keys = all_keys()
    for key in keys:
        has_below = any(k.startswith((f"{key}.", f"{key}[]")) for k in keys)
        if not has_below and not any(
            part in key for part in ("[]", ".*", ".output.", "tasksets", "rollout_args")
        ):
            yield key


def another(key: str) -> str | None:
    if key in TEXTS or key.startswith(DATA_SET):
        return TEXTS.get(key)
    field = field_at(tuple(key.split(".")))
    assert field is not None
    old = field.default
    text = str(field.annotation)
    if names := [n for n in literals(field.annotation) if n != old]:
        return str(names[0])
    if "bool" in text:
        return str(not old).lower()
    if text.startswith("tuple[str"):
        return "[other]"
    if "dict" in text:
        return "{a: b}"
    if "int" in text:
        return str(
            (old or 8) * 2
            + (1 << 20 if key.endswith("bytes") else 0)
            + (2000 if key.endswith("per_gpu") else 0)
        )
    if "float" in text:
        return {
            "gpu_memory_utilization": "0.5",
            "min_lr_ratio": "0.5",
            "lr_warmup_steps_ratio": "0.5",
        }.get(key.rsplit(".", 1)[-1], str((old or 0.25) * 2))
    return "other"


@pytest.mark.e2e
@for_each("key", sorted(leaves()))
def test_every_key_refuses_a_bad_value_and_reaches_the_plan(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(f"{key}=[{{bad: [value]}}]")
    named = [e.key for e in getattr(caught.value, "errors", [caught.value])]
    assert any(n == key or n.startswith((f"{key}[", f"{key}.")) for n in named), named
    if (value := another(key)) is None:
        return
    need = [f"{IN}.eval_tasksets=[{{path: rows.jsonl}}]"]
    try:
        changed = plan(*need, f"{key}={value}")
    except ConfigError as e:
        own_mode = {
            "model.external_model.enable": "mode: bench",
            "buffer.trainer_input.replay_run": "is for mode: train",
            "buffer.explorer_input.taskset.format.prompt_type": "prompt_key: belongs to",
        }
        refused = "leave it out" in str(e) or f"{key}: belongs to" in str(e)
        assert refused or (key in own_mode and own_mode[key] in str(e)), e
        return
    told = any(key in warning and "no effect" in warning for warning in changed.warnings)
    assert told or _settings(plan(*need)) != _settings(changed)


def _settings(p: Plan) -> Plan:
    """The plan without what echoes the configuration."""
    return replace(
        p, derived=(), notes=(), warnings=(), tracked_run=replace(p.tracked_run, config={})
    )

"""Every key of the schema: a bad value is refused with the key's path, and another valid value
makes another Plan.

Values are made from the field's type and bounds, so a new key is tested by being there.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, get_args, get_origin

import pytest
from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rft.config.load import from_dict
from rft.config.plan import Facts, Plan
from rft.config.resolve import resolve
from rft.config.schema.root import RunConfig
from rft.config.schema.walk import literals, models
from rft.engine.settings import ExternalModelConfig, ExternalPolicyConfig
from rft.errors import ConfigError, ConfigErrors
from tests.helpers.rows import for_each

IN = "buffer.explorer_input"
REPLAY = "buffer.trainer_input.experience_buffer.replay_buffer"
DATA = "buffer.trainer_input.experience_buffer"
TASKSET = {"name": "given", "path": "rft.testing.tiny:copy_tasks"}
BASE: dict[str, Any] = {
    "checkpoint_root_dir": "/runs",
    "model": {"model_path": "m", "max_prompt_tokens": 64, "max_response_tokens": 32},
    "algorithm": {"repeat_times": 4},
    "buffer": {
        "batch_size": 6,
        "total_steps": 30,
        "explorer_input": {
            "default_workflow_type": "simple_workflow",
            "default_reward_fn_type": "exact_answer",
            "tasksets": [TASKSET],
            "eval_tasksets": [{"name": "given_eval", "path": "rft.testing.tiny:copy_tasks"}],
        },
    },
}
FACTS = Facts(
    cpus=4, gpus=0, exists=lambda path: False, read_text=lambda path: f"template of {path}"
)
ITEMS: dict[str, dict[str, Any]] = {  # what an entry of a list needs at least
    f"{IN}.tasksets": TASKSET,
    "data_processor.task_pipeline.output": {"path": "rows.jsonl"},
    f"{IN}.eval_tasksets": {"name": "given_eval", "path": "rft.testing.tiny:copy_tasks"},
    "explorer.auxiliary_models": {"model_path": "judge"},
    "data_processor.experience_pipeline.operators": {"name": "reward_filter"},
    "data_processor.task_pipeline.operators": {"name": "deduplicate"},
    "buffer.trainer_input.auxiliary_buffers.mine": {"path": "rows.jsonl"},
}
GPUS = {"cluster.gpu_per_node": 4}
TASKSETS = (f"{IN}.taskset", f"{IN}.tasksets[0]", f"{IN}.eval_tasksets[0]")
OFF_POLICY = (
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
)
AUX = "explorer.auxiliary_models[0]"
AUXILIARY = "buffer.trainer_input.auxiliary_buffers.mine"
SERVED = ("explorer.rollout_model", AUX)
BESIDE: dict[str, dict[str, Any]] = {  # what must be written with a key
    "trainer.use_dynamic_bsz": {"trainer.micro_batch_size_per_gpu": 1},
    f"{IN}.taskset.rollout_args.seed": {
        "algorithm.algorithm_type": "ppo",
        "algorithm.repeat_times": 1,
    },
    f"{IN}.tasksets[0].rollout_args.seed": {
        "algorithm.algorithm_type": "ppo",
        "algorithm.repeat_times": 1,
    },
    "cluster.node_num": {"synchronizer.sync_method": "checkpoint"},
    "algorithm.optimizer.momentum": {"algorithm.optimizer.optimizer_type": "sgd"},
    "trainer.critic.optimizer.momentum": {"trainer.critic.optimizer.optimizer_type": "sgd"},
    "explorer.over_rollout.ratio": {"buffer.on_short_batch": "train"},
    f"{AUX}.moving_average": {f"{AUX}.model_path": "m"},
    "explorer.max_inflight_batches": {"synchronizer.sync_style": "fully_async"},
    "synchronizer.staleness_threshold": {"synchronizer.sync_style": "fully_async"},
    "synchronizer.nccl.bucketed_broadcast": {"synchronizer.sync_method": "nccl"},
    "synchronizer.nccl.overlap_broadcast_and_load": {"synchronizer.sync_method": "nccl"},
    "synchronizer.nccl.bucket_size_mb": {"synchronizer.sync_method": "nccl"},
    "synchronizer.require_batches": {
        "synchronizer.sync_style": "fully_async",
        "synchronizer.sync_interval": 4,
    },
    "explorer.dynamic_timeout.ratio": {"explorer.dynamic_timeout.enable": True},
    "explorer.over_rollout.wait_after_min": {
        "buffer.on_short_batch": "train",
        "explorer.over_rollout.ratio": 0.5,
    },
    "algorithm.sample_strategy_args": {"algorithm.sample_strategy": "pf_ppo"},
    "algorithm.kl_loss_fn_args": {"algorithm.kl_loss_fn": "k2"},
    "algorithm.kl_penalty_fn_args": {"algorithm.kl_penalty_fn": "k2"},
    "algorithm.rollout_correction.rollout_rs": {
        "algorithm.rollout_correction.rollout_rs_threshold": 2.0
    },
    "algorithm.rollout_correction.loss_type": {"algorithm.rollout_correction.bypass_mode": True},
    "trainer.critic_warmup": {"algorithm.algorithm_type": "ppo"},
    "data_processor.experience_pipeline.input_save_path": {
        "data_processor.experience_pipeline.save_input": True
    },
    # what holds for all tasksets is switched off for training, where other values are refused;
    # evaluation inherits it
    "model.prompt_truncation_side": {"model.enable_prompt_truncation": False},
    **{
        f"{t}.data_selector.feature_keys": {
            f"{t}.data_selector.selector_type": "offline_easy2hard",
            f"{t}.data_selector.feature_keys": ["level"],
        }
        for t in TASKSETS
    },
    **{
        f"{t}.data_selector.kwargs": {
            f"{t}.data_selector.selector_type": "difficulty_based",
            f"{t}.data_selector.feature_keys": ["weak", "strong"],
        }
        for t in TASKSETS[:2]
    },
    "model.top_p": {f"{IN}.tasksets[0].rollout_args.top_p": 1.0},
    "model.top_k": {f"{IN}.tasksets[0].rollout_args.top_k": -1},
    "model.repetition_penalty": {f"{IN}.tasksets[0].rollout_args.repetition_penalty": 1.0},
    "model.min_response_tokens": {f"{IN}.tasksets[0].rollout_args.min_tokens": 0},
    "buffer.total_tasks": {"buffer.total_steps": None},
    **{
        f"{REPLAY}.{name}": {f"{REPLAY}.enable": True}
        for name in ("priority_fn", "priority_fn_args", "reuse_cooldown_time")
    },
    f"{REPLAY}.max_uses": {f"{REPLAY}.enable": True, f"{REPLAY}.reuse_cooldown_time": 1.0},
    "monitor.monitor_args": {"monitor.monitor_type": ["tensorboard"]},
    "trainer.device": GPUS,
    "trainer.param_dtype": GPUS,
    "trainer.ulysses_sequence_parallel_size": {"trainer.world_size": 2},
    "trainer.fsdp_size": {"trainer.world_size": 2},
    "trainer.profiler.ranks": {"trainer.world_size": 2},
    "trainer.profiler.all_ranks": {"trainer.world_size": 2},
    "trainer.enable_activation_offload": {"trainer.enable_gradient_checkpointing": True},
    "trainer.ref.param_offload": GPUS,
    "trainer.ref.use_dynamic_bsz": {"trainer.ref.log_prob_micro_batch_size_per_gpu": 4},
    "trainer.fused_kernel_backend": GPUS,
    "explorer.rollout_model.device": GPUS,
    "explorer.rollout_model.enforce_eager": GPUS,
    f"{AUX}.device": GPUS,
    f"{AUX}.enforce_eager": GPUS,
    **{
        f"{AUX}.external_model_config.{n}": {f"{AUX}.engine_type": "external"}
        for n in ExternalModelConfig.model_fields
        if n != "enable"
    },
}
DATA_SET = {
    "mode": "train",
    "algorithm.algorithm_type": "sft",
    f"{DATA}.storage_type": "file",
    f"{DATA}.path": "rows",
}
# another valid value, where one made from the type would be refused or means the same
VALUES: dict[str, Any] = {
    f"{DATA}.data_selector.selector_type": "shuffle",
    "algorithm.algorithm_type": "dr_grpo",
    "monitor.monitor_type": "tensorboard",
    "synchronizer.sync_method": "nccl",
    "model.rope_scaling": {"rope_type": "yarn", "factor": 4.0},
    "algorithm.advantage_fn_args": {"norm_by_std": False},
    "algorithm.policy_loss_fn_args": {"clip_range": 0.3},
    "algorithm.advantage_fn": "rloo",
    f"{REPLAY}.priority_fn": "decay_limit_randomization",
    f"{REPLAY}.priority_fn_args": {"decay": 1.0},
    "algorithm.policy_loss_fn": "gspo",
    "algorithm.kl_loss_fn": "k1",
    "algorithm.kl_penalty_fn": "k1",
    "algorithm.kl_loss_fn_args": {"kl_coef": 0.5},
    "algorithm.kl_penalty_fn_args": {"kl_coef": 0.5},
    "algorithm.sample_strategy": "group_best",
    "algorithm.sample_strategy_args": {"weight_pow": 3.0},
    "algorithm.entropy_loss_fn": "none",
    "algorithm.entropy_loss_fn_args": {"entropy_coef": 0.1},
    "explorer.env_vars": {"OTHER": "1"},
    "data_processor.experience_pipeline.operators[0].name": "reward_std_filter",
    "data_processor.experience_pipeline.operators[0].args": {"threshold": 0.5},
}
VALUES["explorer.serve.reward_range"] = [0.0, 1.0]
VALUES |= {f"{t}.data_selector.selector_type": "shuffle" for t in TASKSETS}
BESIDE |= {
    f"model.external_model.{n}": {
        "mode": "bench",
        **({"model.external_model.enable": True} if n != "enable" else {}),
    }
    for n in ExternalPolicyConfig.model_fields
}
SERVERS = ("model.external_model", *(f"{m}.external_model_config" for m in (AUX,)))
VALUES |= {f"{s}.{n}": {"other": "1"} for s in SERVERS for n in ("headers", "header_envs")}
VALUES |= {f"{t}.data_selector.kwargs": {"m": 8} for t in TASKSETS[:2]}
VALUES |= {
    "data_processor.task_pipeline.operators[0].name": "pass_rate_score",
    "data_processor.task_pipeline.operators[0].args": {"field": "question"},
    "data_processor.task_pipeline.output.path": "other.jsonl",
}
SAME_PLAN: dict[str, str] = {  # keys of which no other value is accepted, and why
    **{
        f"{IN}.{taskset}.rollout_args.{name}": "would bend the distribution that training needs; "
        "evaluation tasksets take it"
        for taskset in ("taskset", "tasksets[0]")
        for name in OFF_POLICY
    },
    f"{IN}.eval_tasksets[0].data_selector.kwargs": "the selectors that evaluation takes have no "
    "arguments",
    "data_processor.task_pipeline.config_path": "names a file, see test_config_tasksets.py",
    f"{DATA}.data_selector.feature_keys": "no order of rows that are trained on takes them",
    f"{DATA}.data_selector.kwargs": "no order of rows that are trained on takes them",
}


def fields(model: type[BaseModel] = RunConfig, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every key with its field; entries of lists as [0], of mappings of one's own as .mine."""
    for name, field in model.model_fields.items():
        yield prefix + name, field
        for inner, mark in models(field.annotation):
            below = prefix + name + {"": "", "[]": "[0]", ".*": ".mine"}[mark] + "."
            yield from ((k, f) for k, f in fields(inner, below))


FIELDS = dict(fields())
OF_A_DATA_SET = tuple(
    f"{DATA}.{name}"
    for name in ("split", "eval_split", "subset_name", "format", "data_selector", "filter_overlong")
)
BESIDE |= {key: DATA_SET for key in FIELDS if key.startswith(OF_A_DATA_SET)}
BESIDE |= {
    key: {**BESIDE.get(key, {}), key.replace("messages_key", "prompt_type"): "messages"}
    for key in FIELDS
    if key.endswith(".format.messages_key")
}
BESIDE["buffer.trainer_input.replay_run"] = {"mode": "train", "trainer.total_steps": 5}
BESIDE["trainer.eval_interval"] = {**DATA_SET, f"{DATA}.eval_split": "test"}


def written(key: str, value: Any = ...) -> dict[str, Any]:
    """The base with everything around `key`, and with `value` there."""
    values = copy.deepcopy(BASE)
    if key.startswith(f"{IN}.taskset") and not key.startswith(f"{IN}.tasksets"):
        del values["buffer"]["explorer_input"]["tasksets"]
        values["buffer"]["explorer_input"]["taskset"] = dict(TASKSET)
    if key.startswith("data_processor.task_pipeline."):  # which does nothing without files
        values["data_processor"] = {
            "task_pipeline": {"inputs": ["raw.jsonl"], "output": {"path": "rows.jsonl"}}
        }
    for beside, given in BESIDE.get(key, {}).items():
        _put(values, beside, given)
    _put(values, key, value)
    return values


def _put(values: dict[str, Any], key: str, value: Any) -> None:
    place: Any = values
    parts = key.split(".")
    for i, part in enumerate(parts[:-1]):
        name = part.removesuffix("[0]")
        listed = part.endswith("[0]")
        path = re.sub(r"\[0\]", "", ".".join(parts[: i + 1]))
        if listed:
            place = place.setdefault(name, [dict(ITEMS.get(path, {}))])[0]
        elif name == "mine":
            place = place.setdefault(name, dict(ITEMS.get(path, {})))
        else:
            place = place.setdefault(name, dict(ITEMS.get(path, {})))
    if value is not ...:
        place[parts[-1]] = value


def plan(values: dict[str, Any]) -> Plan:
    """What the values come to, without the copy of the configuration that trackers get and the
    words about derived values.

    Notes and warnings stay: a key that only exists for files of other tools says in one of them
    that it has no effect.
    """
    found = resolve(from_dict(copy.deepcopy(values)), FACTS)
    return replace(found, tracked_run=replace(found.tracked_run, config={}), derived=())


def kinds(annotation: Any) -> set[Any]:
    """The plain types in an annotation."""
    if get_args(annotation) and get_origin(annotation) not in (dict, tuple):
        return {k for part in get_args(annotation) for k in kinds(part)}
    return {get_origin(annotation) or annotation}


def bounds(field: FieldInfo) -> list[Any]:
    return [m for part in (field.metadata, *_inner(field.annotation)) for m in part]


def _inner(annotation: Any) -> Iterator[Any]:
    for part in get_args(annotation):
        if hasattr(part, "metadata"):
            yield part.metadata
        elif hasattr(part, "__metadata__"):
            yield [
                m
                for f in part.__metadata__
                for m in (f.metadata if isinstance(f, FieldInfo) else [f])
            ]
        yield from _inner(part)


def bad(field: FieldInfo) -> Any:
    """A value that the field does not take: outside its bounds if it has any, of a wrong type
    otherwise.
    """
    types = kinds(field.annotation)
    for m in bounds(field):
        if isinstance(m, Gt | Ge) and not isinstance(getattr(m, "gt", getattr(m, "ge", None)), str):
            return (m.gt if isinstance(m, Gt) else m.ge - 1) if types & {int, float} else {"bad": 1}
        if isinstance(m, Lt | Le):
            return m.lt if isinstance(m, Lt) else m.le + 1
    if set(literals(field.annotation)) - {""}:
        return "no-such-name"
    if (
        dict in types
        or tuple in types
        or any(isinstance(t, type) and issubclass(t, BaseModel) for t in types)
    ):
        return 3
    return {"bad": 1}


def others(field: FieldInfo) -> Iterator[Any]:
    """Valid values that are not the default, as far as the type tells."""
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    types = kinds(field.annotation)
    if names := [n for n in literals(field.annotation) if n not in (default, "")]:
        yield from names
        yield from ([n] for n in names)
    elif bool in types:
        yield from (v for v in (True, False) if v is not default)
    elif types & {int, float}:
        number = default if isinstance(default, int | float) else 1
        yield from (number + 1, number * 2, number / 2, 0.5, 1, 2, 3, 1000, 1 << 20)
    elif str in types:
        yield from ("other", "other.jsonl")
    elif tuple in types:
        yield from (["other"], [1], [0.5, 0.5])
    elif dict in types:
        yield {"other": 1}


def fits(field: FieldInfo, value: Any) -> bool:
    """Whether a number is inside the bounds; the type itself says the rest."""
    if isinstance(value, float) and float not in kinds(field.annotation):
        return False
    for m in bounds(field):
        if isinstance(m, MinLen | MaxLen) or not isinstance(value, int | float):
            continue
        low = getattr(m, "ge", getattr(m, "gt", None))
        high = getattr(m, "le", getattr(m, "lt", None))
        if (low is not None and (value < low or (value == low and isinstance(m, Gt)))) or (
            high is not None and (value > high or (value == high and isinstance(m, Lt)))
        ):
            return False
    return True


def refused_whole(error: ConfigError, key: str) -> bool:
    """Whether `error` refuses `key`, or a section around it, whatever the value."""
    return f"{key}.".startswith(f"{error.key}.") and "leave it out" in str(error)


@for_each("key", FIELDS)
def test_a_bad_value_is_refused_with_its_path(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(written(key, bad(FIELDS[key])))
    found = caught.value.errors if isinstance(caught.value, ConfigErrors) else [caught.value]
    named = any(e.key == key or e.key.startswith((f"{key}.", f"{key}[")) for e in found)
    assert named or any(refused_whole(e, key) for e in found), [str(e) for e in found]


@for_each("key", [k for k in FIELDS if k.startswith(f"{AUXILIARY}.")])
def test_a_buffer_that_nothing_reads_is_refused(key: str) -> None:
    """What sample_strategy mix makes of one: tests/integration/test_expert_rows.py."""
    with pytest.raises(ConfigError, match=rf"{re.escape(AUXILIARY)}.*leave it out"):
        plan(written(key))


@pytest.mark.e2e
@for_each(
    "key",
    [
        k
        for k, f in FIELDS.items()
        if not list(models(f.annotation))
        and k not in SAME_PLAN
        and not k.startswith(f"{AUXILIARY}.")
    ],
)
def test_another_value_makes_another_plan(key: str) -> None:
    before = plan(written(key))
    refused = []
    for value in (
        [VALUES[key]] if key in VALUES else [v for v in others(FIELDS[key]) if fits(FIELDS[key], v)]
    ):
        try:
            after = plan(written(key, value))
        except ConfigError as e:
            if any(
                refused_whole(x, key) for x in (e.errors if isinstance(e, ConfigErrors) else [e])
            ):
                return
            refused.append(f"{value!r}: {e}")
            continue
        if after != before:
            return
        refused.append(f"{value!r}: the same Plan")
    pytest.fail(
        f"no value of {key} makes another Plan: nobody reads it, or VALUES needs one.\n"
        + "\n".join(refused)
    )


@pytest.mark.parametrize("key", [k for k in SAME_PLAN if k.endswith(OFF_POLICY)])
def test_what_bends_the_distribution_is_refused_for_training(key: str) -> None:
    with pytest.raises(ConfigError, match="gradient would be wrong"):
        plan(
            written(
                key,
                {"top_k": 5, "min_tokens": 2, "repetition_penalty": 2.0}.get(
                    key.rpartition(".")[2], 0.5
                ),
            )
        )


def test_exceptions_are_keys() -> None:
    assert {*VALUES, *SAME_PLAN, *BESIDE} <= set(FIELDS)


def test_log_probs_are_kept_of_what_was_sampled() -> None:
    values = written("monitor.keep_trainer_logprobs", True)
    assert plan(values).learner.keep_trainer_logprobs
    for key, value in DATA_SET.items():
        _put(values, key, value)
    with pytest.raises(
        ConfigError, match=r"monitor\.keep_trainer_logprobs: .*rows of a data set are in none"
    ):
        plan(values)

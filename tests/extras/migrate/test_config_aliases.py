"""trainer.trainer_config.<veRL path> is another spelling of the native key."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from rft.config.load import from_dict
from rft.config.schema.root import RunConfig
from rft.config.schema.walk import all_keys, fields_at
from rft.errors import ConfigError, ConfigErrors
from rft.extras.migrate.compat.keys.verl_keys import by_path, rows
from rft.extras.migrate.compat.keys.verl_spellings import move_trainer_config
from rft.extras.migrate.convert.trinity import ConvertedFile, convert, convert_file

GOOD = Path(__file__).parents[3] / "tests/unit/config/data/good/short.yaml"
MODEL = {"model": {"model_path": "m", "max_prompt_tokens": 8, "max_response_tokens": 8}}


def file(given: dict[str, Any], **trainer: Any) -> ConvertedFile:
    return convert(deepcopy({**MODEL, "trainer": {"trainer_config": given, **trainer}}), {})


def config(given: dict[str, Any], **trainer: Any) -> RunConfig:
    return from_dict(file(given, **trainer).values)


def refused(given: dict[str, Any], **trainer: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        config(given, **trainer)
    return caught.value


@pytest.mark.parametrize(
    ("given", "key", "value"),
    [
        ({"actor_rollout_ref": {"actor": {"grad_clip": 0.5}}}, "trainer.grad_clip", 0.5),
        ({"actor": {"grad_clip": 0.5}}, "trainer.grad_clip", 0.5),
        ({"actor": {"optim": {"lr": 1e-5}}}, "algorithm.optimizer.lr", 1e-5),
        ({"critic": {"optim": {"lr": 1e-4}}}, "trainer.critic.optimizer.lr", 1e-4),
        ({"critic": {"model": {"path": "c"}}}, "model.critic_model_path", "c"),
        ({"trainer": {"critic_warmup": 3}}, "trainer.critic_warmup", 3),
        (
            {"model": {"enable_gradient_checkpointing": True}},
            "trainer.enable_gradient_checkpointing",
            True,
        ),
        ({"ref": {"fsdp_config": {"param_offload": True}}}, "trainer.ref.param_offload", True),
        (
            {"rollout": {"gpu_memory_utilization": 0.6}},
            "explorer.rollout_model.gpu_memory_utilization",
            0.6,
        ),
        ({"rollout": {"name": "hf"}}, "explorer.rollout_model.engine_type", "transformers"),
        ({"rollout": {"n": 8}}, "algorithm.repeat_times", 8),
        (
            {"rollout": {"engine_kwargs": {"vllm": {"x": 1}}}},
            "explorer.rollout_model.extra_engine_args",
            {"x": 1},
        ),
        (
            {"model": {"override_config": {"attention_dropout": 0.0}}},
            "model.override_config",
            {"attention_dropout": 0.0},
        ),
        ({"model": {"use_remove_padding": False}}, "trainer.row_layout", "padded"),
        ({"actor": {"fsdp_config": {"param_offload": True}}}, "trainer.offload_policy", True),
        ({"actor": {"kl_loss_type": "mse"}}, "algorithm.kl_loss_fn", "k2"),
        ({"actor": {"kl_loss_type": "k3"}}, "algorithm.kl_loss_fn", "low_var_kl"),
        (
            {"actor": {"clip_ratio_high": 0.28}},
            "algorithm.policy_loss_fn_args",
            {"clip_range_high": 0.28},
        ),
    ],
)
def test_moves_to_the_native_key(given: dict[str, Any], key: str, value: Any) -> None:
    found: Any = config(given)
    for part in key.split("."):
        found = getattr(found, part)
    assert found == value


def test_changes_and_errors_name_the_line(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    text = GOOD.read_text() + "trainer:\n  trainer_config:\n    actor:\n      grad_clip: 0.5\n"
    path.write_text(text)
    line = len(text.splitlines())
    (change,) = convert_file(path).renamed
    assert (change.key, change.text, change.line) == (
        "trainer.trainer_config.actor.grad_clip",
        "trainer.grad_clip",
        line,
    )
    path.write_text(text.replace("grad_clip: 0.5", "grad_clap: 0.5"))
    with pytest.raises(ConfigError, match=rf"grad_clap: unknown key.*\(line {line}\)"):
        convert_file(path)


def test_both_spellings() -> None:
    assert config({"actor": {"grad_clip": 0.5}}, grad_clip=0.5).trainer.grad_clip == 0.5
    e = refused({"actor": {"grad_clip": 0.5}}, grad_clip=0.7)
    assert (
        e.key == "trainer.trainer_config.actor.grad_clip"
        and "trainer.grad_clip is 0.7" in e.message
    )
    e = refused({"actor": {"grad_clip": 0.5}, "actor_rollout_ref": {"actor": {"grad_clip": 0.6}}})
    assert (
        "trainer.trainer_config.actor.grad_clip is 0.5" in e.message
        and "both mean trainer.grad_clip" in e.message
    )


@pytest.mark.parametrize(
    "given",
    [
        {"actor": {"ppo_mini_batch_size": 4}},
        {"actor_rollout_ref": {"actor": {"ppo_mini_batch_size": 4}}},
        {"critic": {"ppo_mini_batch_size": 4}},
        {"ppo_mini_batch_size": 4},
    ],
)
def test_ppo_mini_batch_size_is_left_out_with_its_reason(given: dict[str, Any]) -> None:
    """Trinity-RFT writes buffer.train_batch_size over it."""
    moved, dropped = move_trainer_config({"trainer": {"trainer_config": given}}, lambda at: "")
    ((place, why),) = dropped.items()
    assert not moved and place[-1] == "ppo_mini_batch_size" and "buffer.train_batch_size" in why


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"actor": {"grad_clipp": 1.0}}, "Did you mean actor_rollout_ref.actor.grad_clip?"),
        (
            {"actor": {"model": {"use_liger": True}}},
            "Did you mean actor_rollout_ref.model.use_liger?",
        ),
        ({"actor": {"use_kl_loss": True}}, "write the native key algorithm.kl_loss_fn"),
        (
            {"rollout": {"val_kwargs": {"n": 4}}},
            "write the native key buffer.explorer_input.eval_tasksets[i].repeat_times",
        ),
        (
            {"actor": {"strategy": "megatron", "megatron": {"tensor_model_parallel_size": 2}}},
            "Megatron is not offered",
        ),
        ({"actor": {"optim": {"lr_warmup_init": 0.1}}}, "is not offered: Megatron only"),
        ({"rollout": {"use_fire_sampling": True}}, "is not offered"),
        (
            {"rollout": {"name": "${oc.env:ENGINE}"}},
            "an interpolation cannot be read; write explorer.rollout_model.engine_type",
        ),
        ({"nonsense": 1}, "unknown key"),
        ({"actor": 3}, "unknown key"),
    ],
)
def test_what_has_no_plain_counterpart(given: dict[str, Any], message: str) -> None:
    e = refused(given)
    assert message in e.message and e.key.startswith("trainer.trainer_config.")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"algorithm": {"gamma": 0.9}},
            "algorithm.gamma: algorithm.advantage_fn_args.gamma is read",
        ),
        (
            {"data": {"train_files": "x"}},
            "data.train_files: buffer.explorer_input.tasksets[i].path is read",
        ),
        (
            {"trainer": {"max_critic_ckpt_to_keep": 5}},
            "max_critic_ckpt_to_keep: same count as the actor",
        ),
        ({"trainer": {"whatever": 5}}, "whatever: nothing reads it"),
        ({"actor_rollout_ref": {"hybrid_engine": True}}, "hybrid_engine: mode says"),
        (
            {"ref": {"fsdp_config": {"optimizer_offload": True}}},
            "optimizer_offload: the reference model has no optimizer",
        ),
        (
            {"ref": {"fsdp_config": {"offload_policy": True}}},
            "offload_policy: follows the actor",
        ),
        (
            {"critic": {"checkpoint": {"load_contents": ["model"]}}},
            "load_contents: actor and critic are one checkpoint",
        ),
        (
            {"critic": {"model": {"fsdp_config": {"reshard_after_forward": False}}}},
            "reshard_after_forward: follows",
        ),
        (
            {"ref": {"megatron": {"a": 1, "b": {"c": 2}}}},
            "trainer_config.ref.megatron: the one trainer is FSDP2",
        ),
    ],
)
def test_what_trinity_does_not_read_is_ignored_with_one_line(
    given: dict[str, Any], message: str
) -> None:
    (change,) = file(given).dropped
    assert message in f"{change.key}: {change.text}"


def test_what_trinity_reads_of_other_groups_is_moved() -> None:
    c = config({"trainer": {"max_actor_ckpt_to_keep": 5, "balance_batch": False}})
    assert (c.trainer.max_checkpoints_to_keep, c.trainer.balance_batch) == (5, False)
    c = config({"algorithm": {"rollout_correction": {"bypass_mode": False}}})
    assert (
        c.algorithm.rollout_correction is not None
        and not c.algorithm.rollout_correction.bypass_mode
    )


def test_a_whole_critic_of_older_files_is_read() -> None:
    """As examples of Trinity-RFT write it, with the keys that veRL's file fills in itself."""
    fsdp = {
        "param_offload": True,
        "optimizer_offload": False,
        "wrap_policy": {"min_num_params": 0},
        "fsdp_size": -1,
    }
    optim = {
        "lr": 1e-5,
        "lr_warmup_steps_ratio": 0.0,
        "min_lr_ratio": 0.1,
        "warmup_style": "cosine",
        "total_training_steps": -1,
    }
    model = {
        "external_lib": None,
        "override_config": {},
        "use_remove_padding": False,
        "fsdp_config": fsdp,
    }
    contents = ["model", "optimizer", "extra"]
    given = {
        "strategy": "fsdp",
        "optim": optim,
        "model": model,
        "shuffle": False,
        "checkpoint": {"contents": contents},
    }
    c = config({"critic": given, "actor": {"checkpoint": {"contents": contents}}})
    assert (
        c.trainer.critic.optimizer.lr_scheduler_type,
        c.trainer.critic.optimizer.min_lr_ratio,
    ) == ("cosine", 0.1)
    assert c.trainer.critic.offload_policy and list(c.trainer.checkpoint.save_contents) == contents


def test_megatron_is_one_error() -> None:
    section = {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 1,
        "override_transformer_config": {"a": 1},
    }
    both = {
        "actor": {"strategy": "megatron", "megatron": section},
        "critic": {"strategy": "megatron", "megatron": section},
    }
    assert len(refused(both).errors) == 1


def test_references_inside_follow_the_keys() -> None:
    c = config(
        {
            "critic": {
                "ppo_max_token_len_per_gpu": 64,
                "forward_max_token_len_per_gpu": "${trainer.trainer_config.critic.ppo_max_token_len_per_gpu}",
            }
        }
    )
    assert c.trainer.critic.forward_max_token_len_per_gpu == 64


def test_trainer_config_must_be_a_mapping() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.trainer_config: must be a mapping"):
        convert({**MODEL, "trainer": {"trainer_config": [1]}}, {})
    assert convert({**MODEL, "trainer": {"trainer_config": None}}, {}).values["trainer"] == {}


def test_all_that_is_wrong_is_told_at_once() -> None:
    e = refused({"actor": {"a": 1, "b": 2, "grad_clip": 1.0}})
    assert isinstance(e, ConfigErrors) and len(e.errors) == 2


def test_every_row_below_its_groups_is_decided() -> None:
    """Each veRL key of the groups is moved to an existing key, ignored, or refused with words of
    its own; none is unknown.
    """
    groups = [
        r
        for r in rows()
        if r.path.startswith(("actor_rollout_ref.", "critic.")) and by_path()[r.path] is r
    ]
    assert len(groups) > 130
    for row in groups:
        if "*" in row.path:
            continue
        given: Any = "0"
        for part in reversed(row.path.split(".")):
            given = {part: given}
        try:
            config(given)
        except ConfigError as e:
            assert "unknown key" not in e.message or fields_at(tuple(e.key.split("."))), (
                row.path,
                e.message,
            )
            assert "veRL's table has no" not in e.message, row.path


def test_simple_targets_exist() -> None:
    for row in rows():
        for target in row.targets:
            if (
                row.kind == "native"
                and "[" not in target
                and "_args." not in target
                and row.section <= 16
            ):
                base = target.split(".extra_engine_args.")[0]
                assert base in all_keys(), (row.name, target)

"""Every row of veRL's table of keys has a rule, and every target of a rule is a key of ours."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pydantic import AliasChoices

from rft.config.schema.source import dotted, leaves
from rft.config.schema.walk import all_keys, fields_at
from rft.extras.migrate.compat.keys.verl_keys import Row, rows
from rft.extras.migrate.convert import verl_eval, verl_sft
from rft.extras.migrate.convert.defaults import DEFAULTS
from rft.extras.migrate.convert.launch import Argument, Launch
from rft.extras.migrate.convert.rules import PATTERNS, RULES, rule_of
from rft.extras.migrate.convert.verl import Conversion, convert
from tests.helpers.rows import for_each

A = "actor_rollout_ref.actor"
R = "actor_rollout_ref.rollout"
ROWS = [r for r in rows() if r.section <= 19]
GROUPS = {  # rows that name a group or a pattern: a mapping of what stands below
    "actor_rollout_ref.actor.optim": {"lr": 3e-6},
    "actor_rollout_ref.actor.fsdp_config": {"param_offload": True},
    "actor_rollout_ref.actor.checkpoint": {"save_contents": ["model"]},
    "actor_rollout_ref.ref": {"fsdp_config": {"param_offload": True}},
    "actor_rollout_ref.rollout.engine_kwargs": {"vllm": {"swap_space": 4}},
    "actor_rollout_ref.rollout.engine_kwargs.vllm": {"swap_space": 4},
    "actor_rollout_ref.model.override_config": {"dropout": 0.1},
}
SAMPLES: dict[str, Any] = {  # values that differ from both programs' defaults
    "data.train_files": "/d/x/train.parquet",
    "data.val_files": "/d/x/test.parquet",
    "data.tokenizer": "org/tok",
    "data.truncation": "left",
    "data.shuffle": False,
    "data.reward_fn_key": "kind",
    "data.prompt_key": "question",
    "data.response_key": "gold",
    "data.custom_cls.path": "cls.py",
    "data.custom_cls.name": "Rows",
    "actor_rollout_ref.model.path": "org/m",
    "actor_rollout_ref.model.external_lib": "lib",
    "critic.model.path": "org/c",
    "actor_rollout_ref.model.fused_kernel_options.impl_backend": "triton",
    f"{A}.strategy": "fsdp2",
    f"{A}.loss_agg_mode": "seq-mean-token-sum",
    f"{A}.kl_loss_type": "mse",
    f"{A}.optim.warmup_style": "cosine",
    f"{A}.optim.optimizer": "adam",
    f"{A}.optim.lr_scheduler_type": "cosine",
    f"{A}.checkpoint.save_contents": ["model"],
    f"{A}.checkpoint.load_contents": ["model"],
    f"{A}.profiler.ranks": [0],
    f"{A}.data_loader_seed": 7,
    f"{R}.dtype": "float16",
    f"{R}.name": "vllm",
    f"{R}.load_format": "auto",
    f"{R}.multi_turn.tool_config_path": "t.yaml",
    f"{R}.multi_turn.enable_tokenization_sanity_check": True,
    "reward_model.model.path": "org/rm",
    "reward_model.sandbox_fusion.url": "http://box",
    "custom_reward_function.path": "r.py",
    "custom_reward_function.name": "score",
    "algorithm.adv_estimator": "gae",
    "algorithm.kl_penalty": "mse",
    "algorithm.kl_ctrl.type": "adaptive",
    "algorithm.gdpo_reward_keys": ["accuracy"],
    "algorithm.gdpo_reward_weights": [2.0],
    "algorithm.pf_ppo.reweight_method": "max_min",
    "trainer.profile_steps": [1],
    "trainer.project_name": "p",
    "trainer.experiment_name": "n",
    "trainer.logger": ["wandb"],
    "trainer.rollout_data_dir": "/r",
    "trainer.validation_data_dir": "/v",
    "trainer.default_local_dir": "/c",
    "trainer.resume_mode": "disable",
    "trainer.resume_from_path": "/c/step",
    "trainer.device": "cuda",
    "ray_init.timeline_json_file": "/t.json",
    "data.path": "/d/out.parquet",
    "optim.lr_scheduler": "wsd",
    "model.partial_pretrain": "org/m",
    "model.external_lib": "lib",
    "model.fsdp_config.model_dtype": "bf16",
    "model.target_modules": ["q_proj"],
    "data.train_batch_size": 512,
    f"{A}.ppo_mini_batch_size": 128,
    f"{A}.use_dynamic_bsz": True,
    "reward_model.reward_manager": "dapo",
    "algorithm.gamma": 0.9,
    "algorithm.lam": 0.9,
    f"{A}.clip_ratio_c": 4.0,
    f"{R}.gpu_memory_utilization": 0.7,
    f"{R}.top_p": 0.9,
    "trainer.nnodes": 2,
    "data.gen_batch_size": 1,
    f"{A}.optim.lr_decay_style": "cosine",
    "data.data_source_key": "source",
    "data.reward_model_key": "truth",
}
NEEDS: dict[str, dict[str, Any]] = {  # arguments without which a key has no effect
    f"{A}.kl_loss_": {f"{A}.use_kl_loss": True},
    "algorithm.kl_": {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.type": "adaptive"},
    "algorithm.pf_ppo": {"algorithm.use_pf_ppo": True},
    "algorithm.norm_adv": {"algorithm.adv_estimator": "grpo"},
    "algorithm.gdpo_": {"algorithm.gdpo_reward_keys": ["accuracy"]},
    f"{R}.val_kwargs": {f"{R}.val_kwargs.do_sample": True},
    "reward_model.": {"reward_model.enable": True},
    "custom_reward_function.name": {"custom_reward_function.path": "r.py"},
    "trainer.resume_from": {"trainer.resume_mode": "resume_path"},
    "model.lora": {"model.lora_rank": 8},
    "model.target": {"model.lora_rank": 8},
    "model.fsdp_config.offload": {"model.fsdp_config.cpu_offload": True},
    f"{R}.multi_turn": {f"{R}.multi_turn.enable": True},
}
PROGRAMS = {17: "main_eval", 18: "sft", 19: "fully_async"}


def made(row: Row, value: Any) -> Conversion:
    """The conversion of one argument with those that it needs."""
    more: dict[str, Any] = {}
    for beginning, others in NEEDS.items():
        if row.path.startswith(beginning):
            more |= {k: v for k, v in others.items() if k != row.path}
    if row.path == "data.max_prompt_length":
        more[f"{A}.ppo_max_token_len_per_gpu"] = 99999
    key = row.path.removesuffix(".*")
    arguments = [
        Argument(k, v, str(v), i) for i, (k, v) in enumerate((*more.items(), (key, value)), 1)
    ]
    workflow = (
        ("buffer.explorer_input.default_workflow_type=my_tools",) if "multi_turn" in key else ()
    )
    return convert(
        Launch(PROGRAMS.get(row.section, "main_ppo"), tuple(arguments), False, path="x.sh"),
        overrides=workflow,
    )  # type: ignore[arg-type]


def sample(row: Row) -> Any:
    if row.path in GROUPS:
        return GROUPS[row.path]
    if row.path.endswith(".*"):
        return {"n": 4}
    if row.path in SAMPLES:
        return SAMPLES[row.path]
    text = row.default.rpartition("; ")[2].partition(" (")[0]
    if text in ("True", "False", "on"):
        return text == "False"
    try:
        return (
            float(text) / 2
            if "." in text or "e" in text
            else (int(text) if row.path.endswith("ratio") else abs(int(text)) + 2)
        )
    except ValueError:
        return True if "enable" in row.path or "use_" in row.path or "offload" in row.path else 3


@pytest.mark.e2e
@for_each("row", ROWS, ids=lambda r: r.name.replace(" ", ""))
def test_row_is_accounted_for(row: Row) -> None:
    """Not unknown; a native row's target is written, a derived or ignored one has a reason."""
    if row.path == "data.train_batch_size" and row.section == 19:
        value: Any = 0
    else:
        value = sample(row)
    c = made(row, value)
    r = c.rows[-1]
    assert "unknown argument" not in r.outcome.reason
    if "(Megatron)" in row.name or row.kind != "native":
        assert r.outcome.reason or r.outcome.targets, r
        return
    assert r.outcome.kind in ("mapped", "equal"), r
    wanted = {_plain(t) for t in row.targets}
    if row.path == f"{A}.clip_ratio":  # taken at its word for both sides
        wanted = {
            "algorithm.policy_loss_fn_args.clip_range_low",
            "algorithm.policy_loss_fn_args.clip_range_high",
        }
    assert (
        wanted & {_plain(t) for t in r.outcome.targets}
        or row.path in GROUPS
        or row.path.endswith(".*")
    ), r
    if row.section != 17:
        there = {_plain(dotted(loc)) for loc, _ in leaves(c.values, lists=False)}
        said = {_plain(t) for t in r.outcome.targets}
        assert all(any(k == t or k.startswith((f"{t}.", f"{t}[")) for k in there) for t in said), (
            r,
            said - there,
        )


def _plain(key: str) -> str:
    return re.sub(r"\[\w+\]", "", key)


OPEN = tuple(
    f".{n}"
    for n in (
        "advantage_fn_args",
        "policy_loss_fn_args",
        "kl_loss_fn_args",
        "kl_penalty_fn_args",
        "entropy_loss_fn_args",
        "sample_strategy_args",
        "override_config",
        "extra_engine_args",
        "reward_fn_args",
        "workflow_args",
        "chat_template_args",
    )
)


def _known() -> set[str]:
    keys = {_plain(k).replace("[]", "") for k in all_keys()}
    for key in list(keys):
        field = fields_at(tuple(key.split(".")[:-1])).get(key.rsplit(".", 1)[-1])
        alias = field.validation_alias if field is not None else None
        if isinstance(alias, AliasChoices):
            keys |= {
                f"{key.rpartition('.')[0]}.{name}".lstrip(".")
                for name in alias.choices
                if isinstance(name, str)
            }
    return keys


def test_every_target_of_a_rule_is_a_key() -> None:
    rules = [*RULES.values(), *verl_sft.RULES.values(), *(r for _, r in PATTERNS)]
    targets = (
        {t for r in rules for t in r.targets}
        | {t for t, _, _ in DEFAULTS}
        | {t for row in ROWS for t in row.targets}
    )
    known = _known()
    missing = {
        t
        for t in targets
        if not t.startswith("rft bench")
        and _plain(t) not in known
        and not any(f"{name}." in f".{_plain(t)}." for name in OPEN)
    }
    assert not missing


def test_every_key_of_the_evaluation_is_an_option() -> None:
    known = {row.path for row in rows() if row.section == 17}
    assert set(verl_eval.OPTIONS) <= known


def test_patterns_do_not_hide_rows() -> None:
    """A row of the table that is native keeps its target although a pattern matches it too."""
    for row in rows():
        if (
            row.section <= 16
            and row.kind == "native"
            and "(Megatron)" not in row.name
            and "*" not in row.name
        ):
            rule = rule_of(row.path)
            assert rule is not None and any(
                t.startswith(w) for t in rule.targets for w in row.targets
            ), row.name


APPENDIX_B = {
    "data.seed": 1,
    "data.dataloader_num_workers": 8,
    "data.train_max_samples": 5,
    "data.val_max_samples": 5,
    "data.apply_chat_template_kwargs": {"enable_thinking": False},
    "actor_rollout_ref.nccl_timeout": 600,
    "actor_rollout_ref.model.lora_rank": 8,
    "actor_rollout_ref.model.lora_alpha": 16,
    "actor_rollout_ref.model.target_modules": "all-linear",
    "actor_rollout_ref.model.exclude_modules": None,
    "actor_rollout_ref.model.custom_chat_template": "{{ x }}",
    f"{A}.policy_loss.loss_mode": "vanilla",
    f"{A}.policy_loss.clip_cov_ratio": 0.1,
    f"{A}.policy_loss.kl_cov_ratio": 0.1,
    f"{A}.policy_loss.ppo_kl_coef": 0.1,
    f"{A}.loss_scale_factor": 100,
    f"{A}.tau_pos": 1.0,
    f"{A}.tau_neg": 1.05,
    f"{A}.calculate_entropy": True,
    f"{A}.use_rollout_log_probs": True,
    f"{A}.optim.lr_scheduler_type": "cosine",
    f"{A}.optim.betas": [0.9, 0.95],
    f"{A}.optim.optimizer": "AdamW",
    f"{A}.fsdp_config.model_dtype": "fp32",
    f"{R}.mode": "async",
    f"{R}.calculate_log_probs": True,
    f"{R}.multi_turn.max_assistant_turns": None,
    f"{R}.multi_turn.max_user_turns": None,
    f"{R}.multi_turn.max_parallel_calls": 1,
    f"{R}.multi_turn.max_tool_response_length": 256,
    f"{R}.multi_turn.format": "hermes",
    f"{R}.data_parallel_size": 1,
    f"{R}.enable_prefix_caching": True,
    f"{R}.repetition_penalty": 1.0,
    "critic.enable": True,
    "reward_model.reward_kwargs.overlong_buffer_cfg.enable": True,
    "reward_model.reward_kwargs.overlong_buffer_cfg.len": 4,
    "reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor": 1.0,
    "reward_model.reward_kwargs.overlong_buffer_cfg.log": True,
    "reward_model.reward_kwargs.max_resp_len": 512,
    "reward_model.sandbox_fusion.memory_limit_mb": 1024,
    "algorithm.rollout_correction.rollout_is": "token",
    "algorithm.rollout_correction.rollout_is_threshold": 2.0,
    "algorithm.rollout_correction.rollout_rs": None,
    "algorithm.rollout_correction.bypass_mode": False,
    "trainer.esi_redundant_time": 0,
    "trainer.use_legacy_worker_impl": "auto",
    "rollout.n": 4,
    "rollout.total_epochs": 10,
    "async_training.use_trainer_do_validate": False,
    "async_training.parallel_validate_and_rollout": False,
}


@for_each("key", APPENDIX_B)
def test_keys_that_launch_scripts_use_beside_the_table(key: str) -> None:
    c = convert(
        Launch(
            "main_ppo",
            (Argument(key, APPENDIX_B[key], str(APPENDIX_B[key]), 1),),
            False,
            path="x.sh",
        )
    )
    if not key.startswith("async_training"):
        assert not c.errors
    assert c.rows[0].outcome.kind != "refused", c.rows[0]

"""One rule per veRL key of the ordinary and the asynchronous trainer: what becomes of it here, and
why.

Keys that are not named here follow their row of the table: a native key goes to its target as it
is, one that is not taken over is ignored or refused with the row's remark.  Depends on no shell.
Invariant: a key is looked up in one order (exact name, row, pattern), so it has one rule.
"""

from __future__ import annotations

import fnmatch

from rft.extras.migrate.compat.keys import verl_keys as table
from rft.extras.migrate.convert import actions as do
from rft.extras.migrate.convert import play_actions as play
from rft.extras.migrate.convert.draft import EVAL, TRAIN
from rft.extras.migrate.convert.names import (
    ACTOR,
    CRITIC,
    ENGINE,
    MODEL,
    ONE_MEGATRON,
    ONLY_MEGATRON,
    OPTIM,
    REF,
    RM,
    ROLLOUT,
    aggregates,
    loss_reads,
    megatron,
)
from rft.extras.migrate.convert.rule import (
    Rule,
    always,
    among,
    below,
    choice,
    derived,
    each_set,
    ignored,
    only_if,
    refused,
    scaled,
    switch,
    to,
    via,
    write,
)

_TRACE = "profiling and tracing change no result; trainer.profiler is the native one"
_INTERNAL = "veRL-internal"
_NSIGHT = "Nsight Systems through Ray; trainer.profiler is the native one"

RULES: dict[str, Rule] = {
    # ------------------------------------------------------------------ data
    "data.train_files": via("one taskset per file", f"{TRAIN}[i].path", f"{TRAIN}[i].split"),
    "data.val_files": via("one taskset per file", f"{EVAL}[i].path", f"{EVAL}[i].split"),
    "data.prompt_key": each_set("format.prompt_key"),
    "data.response_key": each_set("format.response_key"),
    "data.reward_fn_key": each_set("format.reward_fn_key"),
    "data.apply_chat_template_kwargs": each_set("format.chat_template_args"),
    "data.shuffle": via("", f"{TRAIN}[i].data_selector.selector_type"),
    "data.validation_shuffle": to(
        f"{EVAL}[i].data_selector.selector_type",
        by=lambda v: "shuffle" if v is True else "sequential",
    ),
    "data.seed": to(f"{TRAIN}[i].data_selector.seed"),
    "data.filter_overlong_prompts": do.filter_prompts,
    "data.truncation": do.truncation,
    "data.trust_remote_code": do.trust,
    "data.train_max_samples": do.max_samples(TRAIN),
    "data.val_max_samples": do.max_samples(EVAL),
    "data.image_key": play.images,
    f"{ACTOR}.freeze_vision_tower": play.vision,
    "data.custom_cls.path": do.reader,
    "data.custom_cls.name": do.reader,
    # ------------------------------------------------------------------ model
    "actor_rollout_ref.hybrid_engine": do.hybrid,
    f"{MODEL}.path": do.path("model.model_path"),
    f"{MODEL}.trust_remote_code": do.trust,
    f"{MODEL}.lora_rank": do.lora_rank,
    f"{MODEL}.lora_alpha": do.lora_key("lora_alpha"),
    f"{MODEL}.lora_adapter_path": do.lora_key("path"),
    f"{MODEL}.lora.merge": do.lora_key("merge"),
    f"{MODEL}.target_modules": do.lora_key("target_modules"),
    f"{MODEL}.exclude_modules": do.lora_key("exclude_modules"),
    # ------------------------------------------------------------------ actor
    f"{ACTOR}.strategy": do.strategy,
    f"{MODEL}.use_remove_padding": to("trainer.row_layout", by=table.LAYOUT.get),
    f"{ACTOR}.ppo_mini_batch_size": via("prompts of an optimizer step", "buffer.batch_size"),
    f"{ACTOR}.ppo_micro_batch_size": do.micro(
        ACTOR, f"{ACTOR}.ppo_micro_batch_size_per_gpu", "trainer.micro_batch_size_per_gpu"
    ),
    f"{ACTOR}.clip_ratio": do.clip,
    f"{ACTOR}.clip_ratio_low": via("", "algorithm.policy_loss_fn_args.clip_range_low"),
    f"{ACTOR}.clip_ratio_high": via("", "algorithm.policy_loss_fn_args.clip_range_high"),
    f"{ACTOR}.kl_loss_type": do.kl_name("kl_loss_fn", f"{ACTOR}.use_kl_loss"),
    f"{ACTOR}.kl_loss_coef": do.kl_arg("algorithm.kl_loss_fn_args.kl_coef", f"{ACTOR}.use_kl_loss"),
    f"{ACTOR}.clip_ratio_c": only_if(
        lambda d: loss_reads(d, "clip_ratio_c"),
        "this loss does not read it",
        to("algorithm.policy_loss_fn_args.clip_ratio_c"),
    ),
    f"{ACTOR}.policy_loss.loss_mode": do.loss_mode,
    f"{ACTOR}.loss_agg_mode": only_if(
        aggregates,
        "this loss is seq-mean-token-mean there, whatever is written; so it is here",
        to("algorithm.loss_agg_mode"),
    ),
    f"{ACTOR}.policy_loss.kl_cov_ratio": do.loss_arg("kl_cov"),
    f"{ACTOR}.policy_loss.ppo_kl_coef": do.loss_arg("kl_cov"),
    f"{ACTOR}.policy_loss.dro_beta": do.loss_arg("dro"),
    f"{ACTOR}.tau_pos": do.loss_arg("sapo"),
    f"{ACTOR}.tau_neg": do.loss_arg("sapo"),
    **{
        f"{section}.use_rollout_log_probs": only_if(
            lambda d: not d.flag("async_training.compute_prox_log_prob"),
            "old log-probs are the trainer's: compute_prox_log_prob is on",
            to("algorithm.bypass_old_logprobs"),
        )
        for section in (ACTOR, "async_training")
    },
    # ------------------------------------------------------------------ optimizer
    f"{ACTOR}.optim.lr_warmup_steps": scaled(f"{OPTIM}.lr_warmup_steps", never=-1, updates=True),
    f"{ACTOR}.optim.warmup_style": do.scheduler(OPTIM),
    f"{ACTOR}.optim.lr_scheduler_type": do.scheduler(OPTIM),
    f"{ACTOR}.optim.lr_decay_style": do.scheduler(OPTIM),
    f"{ACTOR}.optim.optimizer": choice(
        f"{OPTIM}.optimizer_type",
        {"adam": "adamw", "adamw": "adamw"},
        "of veRL's optimizers AdamW is known; algorithm.optimizer.optimizer_type lists others",
    ),
    f"{ACTOR}.optim.clip_grad": to("trainer.grad_clip"),
    f"{ACTOR}.optim.min_lr": do.min_lr,
    f"{ACTOR}.optim.lr_decay_steps": only_if(
        lambda d: not megatron(d), ONE_MEGATRON, refused(ONLY_MEGATRON)
    ),
    # ------------------------------------------------------------------ sharding
    f"{ACTOR}.fsdp_config.fsdp_size": do.fsdp_size,
    f"{ACTOR}.profiler.ranks": do.profiled_ranks,
    f"{ACTOR}.fsdp_config.model_dtype": do.model_dtype,
    f"{ACTOR}.fsdp_config.dtype": do.compute_dtype,
    f"{ACTOR}.fsdp_config.mixed_precision.param_dtype": do.compute_dtype,
    f"{ACTOR}.fsdp_config.mixed_precision.reduce_dtype": do.reduce_dtype,
    # ------------------------------------------------------------------ reference model
    f"{REF}.strategy": do.strategy,
    f"{REF}.log_prob_micro_batch_size": do.micro(
        REF,
        f"{REF}.log_prob_micro_batch_size_per_gpu",
        "trainer.ref.log_prob_micro_batch_size_per_gpu",
    ),
    f"{REF}.model.path": do.alike(
        f"{MODEL}.path", "model.model_path", "the reference model is the one that is trained"
    ),
    # ------------------------------------------------------------------ rollout
    f"{ROLLOUT}.name": do.engine,
    f"{ROLLOUT}.n": via("", "algorithm.repeat_times"),
    f"{ROLLOUT}.temperature": do.temperature,
    f"{ROLLOUT}.top_k": to("model.top_k", by=lambda v: -1 if v in (0, None) else v),
    f"{ROLLOUT}.do_sample": do.do_sample,
    f"{ROLLOUT}.prompt_length": do.alike("data.max_prompt_length", "model.max_prompt_tokens"),
    f"{ROLLOUT}.response_length": do.alike("data.max_response_length", "model.max_response_tokens"),
    f"{ROLLOUT}.log_prob_micro_batch_size": do.micro(
        ROLLOUT,
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu",
        "trainer.log_prob_micro_batch_size_per_gpu",
    ),
    f"{ROLLOUT}.mode": among(
        ("async", "sync"),
        always("generation is always asynchronous"),
        "generation is asynchronous; write async or sync",
    ),
    f"{ROLLOUT}.calculate_log_probs": always("the engine's log-probs are always returned"),
    f"{ROLLOUT}.multi_turn.enable": play.multi_turn,
    f"{ROLLOUT}.multi_turn.enable_tokenization_sanity_check": do.sanity,
    f"{ROLLOUT}.multi_turn.tokenization_sanity_check_mode": do.sanity,
    f"{ROLLOUT}.val_kwargs.do_sample": derived(
        "evaluation samples, or is greedy",
        f"{EVAL}[i].rollout_args.temperature",
        f"{EVAL}[i].repeat_times",
    ),
    **{
        f"{ROLLOUT}.val_kwargs.{n}": play.evaluated(n)
        for n in ("temperature", "top_p", "top_k", "n")
    },
    f"{ROLLOUT}.agent.default_agent_loop": play.agent_loop,
    # ------------------------------------------------------------------ critic
    "critic.strategy": do.strategy,
    "critic.model.use_remove_padding": do.critic(to(f"{CRITIC}.row_layout", by=table.LAYOUT.get)),
    "critic.ppo_micro_batch_size": do.critic(
        do.micro(
            "critic", "critic.ppo_micro_batch_size_per_gpu", f"{CRITIC}.micro_batch_size_per_gpu"
        )
    ),
    "critic.model.path": do.critic(do.path("model.critic_model_path")),
    "critic.optim.lr_warmup_steps": do.critic(
        scaled(f"{CRITIC}.optimizer.lr_warmup_steps", never=-1, updates=True)
    ),
    "critic.optim.min_lr_ratio": do.critic(to(f"{CRITIC}.optimizer.min_lr_ratio")),
    "critic.optim.betas": do.critic(to(f"{CRITIC}.optimizer.betas")),
    "critic.optim.warmup_style": do.critic(do.scheduler(f"{CRITIC}.optimizer")),
    "critic.optim.lr_scheduler_type": do.critic(do.scheduler(f"{CRITIC}.optimizer")),
    **{
        f"critic.{name}": do.critic(
            do.alike(f"{ACTOR}.{name}", target, "actor and critic learn from the same mini-batches")
        )
        for name, target in (
            ("ppo_mini_batch_size", "buffer.batch_size"),
            ("shuffle", "trainer.shuffle_minibatches"),
            ("loss_agg_mode", "algorithm.loss_agg_mode"),
        )
    },
    # ------------------------------------------------------------------ rewards
    f"{RM}.enable": play.rm_enable,
    f"{RM}.model.path": play.rm(do.path("explorer.auxiliary_models[i].model_path")),
    f"{RM}.reward_manager": play.manager,
    f"{RM}.use_reward_loop": always("rewards are always computed as soon as a run ends"),
    f"{RM}.rollout.name": play.rm(play.rm_engine),
    f"{RM}.rollout.tensor_model_parallel_size": play.rm(
        via("", "explorer.auxiliary_models[i].tensor_parallel_size")
    ),
    **{
        f"{RM}.rollout.{length}": play.rm(
            derived("prompt_length + response_length", "explorer.auxiliary_models[i].max_model_len")
        )
        for length in ("prompt_length", "response_length")
    },
    **{
        f"{RM}.rollout.{name}": play.rm(to(f"explorer.auxiliary_models[i].{name}"))
        for name in (
            "gpu_memory_utilization",
            "max_num_seqs",
            "enforce_eager",
            "enable_prefix_caching",
            "enable_chunked_prefill",
        )
    },
    f"{RM}.launch_reward_fn_async": always("rewards are always computed beside generation"),
    f"{RM}.sandbox_fusion.url": each_set("reward_fn_args.sandbox_url"),
    f"{RM}.sandbox_fusion.max_concurrent": each_set("reward_fn_args.sandbox_max_concurrent"),
    f"{RM}.sandbox_fusion.memory_limit_mb": each_set("reward_fn_args.sandbox_memory_mb"),
    **{
        f"{RM}.reward_kwargs.overlong_buffer_cfg.{name}": each_set(f"reward_fn_args.{target}")
        for name, target in (
            ("enable", "enable_overlong_penalty"),
            ("len", "cache_length"),
            ("penalty_factor", "penalty_factor"),
        )
    },
    f"{RM}.reward_kwargs.max_resp_len": do.alike(
        "data.max_response_length", "model.max_response_tokens", "the penalty is measured from that"
    ),
    **{
        f"{RM}.{name}": play.rm(
            derived("GPUs of its own, else of the run's", "explorer.auxiliary_models[i].engine_num")
        )
        for name in ("enable_resource_pool", "nnodes", "n_gpus_per_node")
    },
    "custom_reward_function.path": via("", "buffer.explorer_input.default_reward_fn_type"),
    # ------------------------------------------------------------------ algorithm
    "algorithm.adv_estimator": do.estimator,
    "algorithm.gamma": do.advantage_arg("gamma", "gae", "reinforce_plus_plus"),
    "algorithm.lam": do.advantage_arg("lam", "gae"),
    "algorithm.norm_adv_by_std_in_grpo": do.advantage_arg(
        "norm_by_std", "grpo", "grpo_vectorized", "grpo_passk", "gdpo"
    ),
    **dict.fromkeys(
        ("algorithm.gdpo_reward_keys", "algorithm.gdpo_reward_weights"), play.reward_parts
    ),
    "algorithm.kl_penalty": do.kl_name("kl_penalty_fn", "algorithm.use_kl_in_reward"),
    "algorithm.kl_ctrl.type": do.kl_arg(
        "algorithm.kl_penalty_fn_args.adaptive", "algorithm.use_kl_in_reward"
    ),
    "algorithm.kl_ctrl.kl_coef": do.kl_arg(
        "algorithm.kl_penalty_fn_args.kl_coef", "algorithm.use_kl_in_reward"
    ),
    "algorithm.kl_ctrl.horizon": do.kl_arg(
        "algorithm.kl_penalty_fn_args.horizon", "algorithm.use_kl_in_reward", adaptive=True
    ),
    "algorithm.kl_ctrl.target_kl": do.kl_arg(
        "algorithm.kl_penalty_fn_args.target_kl", "algorithm.use_kl_in_reward", adaptive=True
    ),
    "algorithm.rollout_correction.rollout_rs": play.rejection,
    "algorithm.rollout_correction.rollout_rs_threshold": play.rejection_bounds,
    "algorithm.rollout_correction.rollout_rs_threshold_lower": play.rejection_bounds,
    "algorithm.use_pf_ppo": switch(
        "algorithm.use_pf_ppo",
        "switched off",
        to("algorithm.sample_strategy", by=lambda v: "pf_ppo"),
    ),
    **{
        f"algorithm.pf_ppo.{name}": switch(
            "algorithm.use_pf_ppo",
            "use_pf_ppo is off",
            to(f"algorithm.sample_strategy_args.{name}"),
        )
        for name in ("reweight_method", "weight_pow")
    },
    # ------------------------------------------------------------------ trainer
    "trainer.total_epochs": only_if(
        lambda d: (
            not (
                d.stated("trainer.total_training_steps") or d.stated("rollout.total_rollout_steps")
            )
        ),
        "total_training_steps or total_rollout_steps is given, and counts alone",
        Rule(
            lambda d, a: write(d, a, ("buffer.total_epochs",), d.whole(a.key)),
            ("buffer.total_epochs",),
        ),
    ),
    "trainer.total_training_steps": scaled("buffer.total_steps"),
    "trainer.profile_steps": do.profile,
    "trainer.project_name": via("", "project"),
    "trainer.experiment_name": via("", "name"),
    "trainer.logger": do.logger,
    "trainer.rollout_data_dir": do.rollout_dir,
    "trainer.nnodes": via("all nodes", "cluster.node_num"),
    "trainer.n_gpus_per_node": via("", "cluster.gpu_per_node"),
    "trainer.save_freq": scaled("trainer.save_interval", never=0),
    "trainer.test_freq": only_if(
        lambda d: not d.stated("rollout.test_freq"),
        "rollout.test_freq is given and wins",
        scaled("explorer.eval_interval", never=0),
    ),
    "trainer.val_only": do.val_only,
    "trainer.critic_warmup": do.critic_warmup,
    "trainer.default_local_dir": via("without a trailing /project/name", "checkpoint_root_dir"),
    "trainer.resume_mode": do.resume,
    "trainer.resume_from_path": do.resume_path,
    "trainer.remove_previous_ckpt_in_save": do.keep_last,
    "trainer.device": choice(
        "trainer.device",
        {"cuda": "cuda", "cpu": "cpu"},
        "{} devices are not offered; use cuda or cpu",
    ),
    "ray_init.timeline_json_file": to("monitor.enable_ray_timeline", by=bool),
    # ------------------------------------------------------------------ the asynchronous recipe
    "rollout.n": via("", "algorithm.repeat_times"),
    "rollout.test_freq": do.async_test,
    "async_training.trigger_parameter_sync_step": via(
        "local updates x require_batches", "synchronizer.sync_interval"
    ),
    "async_training.parallel_validate_and_rollout": to("explorer.eval_in_background"),
    # ------------------------------------------------------------------ options
    "--config-name": do.config_name,
    "--config-path": ignored("where veRL's own configuration lies"),
    "--config-dir": ignored("where veRL's own configuration lies"),
}

RULES[f"{ROLLOUT}.multi_turn.tool_config_path"] = only_if(
    play.turns, "one turn: multi_turn.enable is off", play.tool_file
)
RULES |= {
    f"{ROLLOUT}.multi_turn.{name}": only_if(
        play.turns, "one turn: multi_turn.enable is off", each_set(f"workflow_args.{name}")
    )
    for name in (
        "max_turns",
        "max_assistant_turns",
        "max_user_turns",
        "max_parallel_calls",
        "max_tool_response_length",
        "tool_response_truncate_side",
        "format",
    )
}
for _row in table.by_name().values():
    if _row.kind == "native" and _row.name not in RULES:
        if _row.name.startswith("critic."):
            RULES[_row.name] = do.critic(to(_row.targets[0]))
        elif _row.name.startswith(f"{RM}."):
            RULES[_row.name] = play.rm(to(*_row.targets))

PATTERNS: tuple[tuple[str, Rule], ...] = (
    (f"{MODEL}.override_config.*", below("model", after=MODEL)),
    (f"{ROLLOUT}.engine_kwargs.vllm.*", below(f"{ENGINE}.extra_engine_args")),
    (f"{ROLLOUT}.engine_kwargs.sglang*", ignored("SGLang is not the engine")),
    (f"{ROLLOUT}.engine_kwargs.trtllm*", ignored("TensorRT-LLM is not the engine")),
    (f"{ACTOR}.policy_loss.clip_cov_*", do.loss_arg("clip_cov")),
    (f"{ACTOR}.megatron.param_offload", to("trainer.offload_policy")),
    (
        "*.megatron.override_transformer_config*",
        only_if(lambda d: not megatron(d), ONE_MEGATRON, refused(ONLY_MEGATRON)),
    ),
    ("*.megatron.*", ignored("how Megatron lays out and offloads its work; FSDP2 shards instead")),
    (
        "*.optim.override_optimizer_config*",
        only_if(
            lambda d: not megatron(d),
            ONE_MEGATRON,
            refused("the optimizer has no further arguments"),
        ),
    ),
    (
        f"{ROLLOUT}.checkpoint_engine.*",
        ignored("how veRL sends weights; see synchronizer.sync_method"),
    ),
    ("trainer.dump_high_diff*", ignored(_TRACE)),
    (
        f"{RM}.reward_kwargs.*",
        refused(
            "arguments of a reward manager of yours; write them in reward_fn_args of the tasksets"
        ),
    ),
    (f"{RM}.rollout.*", ignored("the engine of the reward model decides that")),
    (
        "algorithm.rollout_correction.*",
        below("algorithm.rollout_correction", after="algorithm.rollout_correction"),
    ),
    (
        "data.apply_chat_template_kwargs.*",
        below(
            *(f"{s}[i].format.chat_template_args" for s in (TRAIN, EVAL)),
            after="data.apply_chat_template_kwargs",
        ),
    ),
    ("algorithm.filter_groups.*", play.filter_groups),
    (
        "custom_reward_function.reward_kwargs.*",
        below(*(f"{s}[i].reward_fn_args" for s in (TRAIN, EVAL))),
    ),
    ("trainer.*nsight_options.*", ignored(_NSIGHT)),
    ("*.profiler.*", ignored(_TRACE)),
    ("trainer.npu_profile.*", ignored(_TRACE)),
    ("global_profiler.*", ignored(_TRACE)),
    ("*.trace.*", ignored(_TRACE)),
    ("*_target_", ignored(_INTERNAL)),
    ("hydra.*", ignored("where Hydra puts its own files")),
    ("transfer_queue.*", ignored(_INTERNAL)),
    ("prometheus.*", ignored(_TRACE)),
    ("*.prometheus.*", ignored(_TRACE)),
    ("evaluation.*", ignored("not a veRL key")),
    ("ray_kwargs.ray_init.*", ignored("Ray is started by the program")),
    (
        f"{RM}.model.fsdp_config.*",
        ignored("the reward model runs behind a serving engine, which schedules by itself"),
    ),
    (f"{REF}.fsdp_config.*", ignored("follows the actor")),
    (
        "*.fsdp_config.grad_offload",
        ignored("of veRL up to 0.2; changes no result"),
    ),
    *(
        (p, ignored("of another engine, or of what is off"))
        for p in (
            f"{MODEL}.lora.*",
            "*.mtp.*",
            "*.qat.*",
            "*.turbo_config.*",
            "critic.model.lora.*",
            "distillation.*",
            "trainer.v1.*",
            "skip.*",
        )
    ),
)

ASYNC = frozenset({*table.MAIN, 19})
KNOWN = sorted({*RULES, *table.ALIASES, *(n for n in table.by_name(ASYNC) if "*" not in n)})


def rule_of(key: str) -> Rule | None:
    """The rule of a veRL key; None if nobody knows it."""
    if key in RULES:
        return RULES[key]
    row = table.by_name(ASYNC).get(key)
    if row is None:
        return next((rule for pattern, rule in PATTERNS if fnmatch.fnmatchcase(key, pattern)), None)
    return of_row(row)


def of_row(row: table.Row) -> Rule:
    """What a row of the table says of its key."""
    if row.kind == "native":
        return to(*row.targets)
    if row.kind == "refused":
        return refused(row.note, table.default(row.path, frozenset({row.section})))
    return derived(row.note, *row.targets) if row.targets else ignored(row.note)

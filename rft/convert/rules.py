"""One rule per veRL key of the ordinary and the asynchronous trainer: what becomes of it here, and why.

Keys that are not named here follow their row of the table: a native key goes to its target as it is, one that is not taken over is
ignored with the row's remark.  Knows no shell.  Invariant: a key is looked up in one order (exact name, pattern, row), so it has one rule.
"""

from __future__ import annotations

import fnmatch

from rft.convert import actions as do
from rft.convert import table
from rft.convert.draft import EVAL, TRAIN, Outcome
from rft.convert.names import (
    ACTOR,
    CRITIC,
    ENGINE,
    FORMAT,
    LORA,
    MODEL,
    NO_CRITIC,
    ONLY_MEGATRON,
    OPTIM,
    PASSED,
    REF,
    RM,
    RM_SERVED,
    ROLLOUT,
    by_tokens,
)
from rft.convert.rule import Rule, always, derived, ignored, only_if, refused, scaled, to, via, write
from rft.convert.sizes import has_critic

_TRACE = "profiling and tracing change no result; trainer.profiler is the native one"
_INTERNAL = "veRL-internal"
_NSIGHT = "Nsight Systems through Ray; trainer.profiler is the native one"
_TIS = "the old name; write algorithm.rollout_correction.rollout_is=token and .rollout_is_threshold=CAP"
_SCHEDULED = "the program sets it from the length of the run, here too"

RULES: dict[str, Rule] = {
    # ------------------------------------------------------------------ data
    "data.train_files": via("one taskset per file", f"{TRAIN}[i].path", f"{TRAIN}[i].split"),
    "data.val_files": via("one taskset per file", f"{EVAL}[i].path", f"{EVAL}[i].split"),
    "data.prompt_key": do.columns("prompt_key"),
    "data.response_key": do.columns("response_key"),
    "data.reward_fn_key": do.columns("reward_fn_key"),
    "data.apply_chat_template_kwargs": do.columns("chat_template_args"),
    "data.train_batch_size": derived("B / m steps between two synchronisations", "synchronizer.sync_interval"),
    "data.val_batch_size": ignored("deprecated; the engine schedules evaluation by itself"),
    "data.return_raw_chat": ignored("always so: workflows receive messages"),
    "data.return_full_prompt": ignored("always so: the prompt is kept as text"),
    "data.shuffle": via("", f"{TRAIN}[i].data_selector.selector_type"),
    "data.validation_shuffle": to(f"{EVAL}[i].data_selector.selector_type", by=lambda v: "shuffle" if v is True else "sequential"),
    "data.seed": to(f"{TRAIN}[i].data_selector.seed"),
    "data.filter_overlong_prompts": Rule(do.filter_prompts, (*(f"{s}[i].filter_overlong_prompts" for s in (TRAIN, EVAL)),), native=True),
    "data.truncation": Rule(do.truncation, ("model.prompt_truncation_side",), native=True),
    "data.trust_remote_code": Rule(do.trust, ("model.trust_remote_code",), native=True),
    "data.train_max_samples": do.max_samples(TRAIN),
    "data.val_max_samples": do.max_samples(EVAL),
    "data.dataloader_num_workers": ignored("the reader is our own"),
    "data.image_key": ignored("texts only; a taskset with images is refused when it is read"),
    "data.custom_cls.path": to(*(f"{s}[i].reader_path" for s in (TRAIN, EVAL))),
    "data.custom_cls.name": to(*(f"{s}[i].reader_name" for s in (TRAIN, EVAL))),
    "data.gen_batch_size": derived("single tasks are streamed; a step closes when its groups are there"),
    # ------------------------------------------------------------------ model
    "actor_rollout_ref.hybrid_engine": Rule(do.hybrid),
    "actor_rollout_ref.nccl_timeout": ignored("synchronizer.sync_timeout is the time that is waited for weights"),
    f"{MODEL}.path": do.path("model.model_path"),
    f"{MODEL}.trust_remote_code": Rule(do.trust, ("model.trust_remote_code",), native=True),
    f"{MODEL}.external_libs": to("model.external_lib"),
    f"{MODEL}.override_config.model_config": refused(ONLY_MEGATRON),
    f"{MODEL}.override_config.moe_config": refused(ONLY_MEGATRON),
    f"{MODEL}.override_config.moe_config.freeze_moe_router": refused(ONLY_MEGATRON),
    f"{MODEL}.custom_chat_template": to("model.custom_chat_template"),
    f"{MODEL}.lora_rank": Rule(do.lora_rank, (f"{LORA}.lora_rank",), native=True),
    f"{MODEL}.lora_alpha": do.lora_key("lora_alpha"),
    f"{MODEL}.target_modules": do.lora_key("target_modules"),
    f"{MODEL}.exclude_modules": do.lora_key("exclude_modules"),
    f"{MODEL}.tokenizer_path": to("model.tokenizer_path"),
    # ------------------------------------------------------------------ actor
    f"{ACTOR}.strategy": Rule(do.strategy, ("trainer.trainer_strategy",), native=True),
    f"{ACTOR}.ppo_mini_batch_size": via("prompts of an optimizer step", "buffer.batch_size"),
    f"{ACTOR}.ppo_micro_batch_size": do.micro(ACTOR, f"{ACTOR}.ppo_micro_batch_size_per_gpu", "trainer.micro_batch_size_per_gpu"),
    f"{ACTOR}.clip_ratio": Rule(do.clip, ("algorithm.policy_loss_fn_args.clip_range_low",), native=True),
    f"{ACTOR}.clip_ratio_low": do.clipped("low"),
    f"{ACTOR}.clip_ratio_high": do.clipped("high"),
    f"{ACTOR}.use_kl_loss": derived("none when off, else kl_loss_type", "algorithm.kl_loss_fn"),
    f"{ACTOR}.kl_loss_type": do.kl_name("kl_loss_fn", f"{ACTOR}.use_kl_loss"),
    f"{ACTOR}.kl_loss_coef": do.kl_arg("algorithm.kl_loss_fn_args.kl_coef", f"{ACTOR}.use_kl_loss"),
    f"{ACTOR}.policy_loss.loss_mode": Rule(do.loss_mode, ("algorithm.policy_loss_fn",), native=True),
    f"{ACTOR}.loss_agg_mode": only_if(
        by_tokens, "this loss is seq-mean-token-mean there, whatever is written; so it is here", to("algorithm.loss_agg_mode")
    ),
    f"{ACTOR}.policy_loss.kl_cov_ratio": do.loss_arg("kl_cov"),
    f"{ACTOR}.policy_loss.ppo_kl_coef": do.loss_arg("kl_cov"),
    f"{ACTOR}.tau_pos": do.loss_arg("sapo"),
    f"{ACTOR}.tau_neg": do.loss_arg("sapo"),
    f"{ACTOR}.loss_scale_factor": to("algorithm.loss_scale_factor"),
    f"{ACTOR}.calculate_entropy": ignored("a metric only"),
    f"{ACTOR}.use_rollout_log_probs": to("algorithm.bypass_old_logprobs"),
    f"{ACTOR}.freeze_vision_tower": ignored("texts only"),
    f"{ACTOR}.rollout_n": derived("is rollout.n", "algorithm.repeat_times"),
    f"{ACTOR}.tis_imp_ratio_cap": refused(_TIS, -1),
    # ------------------------------------------------------------------ optimizer
    f"{ACTOR}.optim.lr_warmup_steps": scaled(f"{OPTIM}.lr_warmup_steps", never=-1),
    f"{ACTOR}.optim.warmup_style": Rule(do.scheduler, (f"{OPTIM}.lr_scheduler_type",), native=True),
    f"{ACTOR}.optim.lr_scheduler_type": Rule(do.scheduler, (f"{OPTIM}.lr_scheduler_type",), native=True),
    f"{ACTOR}.optim.lr_decay_style": Rule(do.scheduler, (f"{OPTIM}.lr_scheduler_type",)),
    f"{ACTOR}.optim.total_training_steps": derived(_SCHEDULED, "buffer.total_steps"),
    f"{ACTOR}.optim.betas": to(f"{OPTIM}.betas"),
    f"{ACTOR}.optim.optimizer": Rule(do.optimizer, (f"{OPTIM}.optimizer_type",), native=True),
    f"{ACTOR}.optim.optimizer_impl": refused("the optimizer is torch's AdamW", "torch.optim"),
    f"{ACTOR}.optim.override_optimizer_config": refused("the optimizer has no further arguments"),
    f"{ACTOR}.optim.clip_grad": to("trainer.grad_clip"),
    f"{ACTOR}.optim.min_lr": Rule(do.min_lr, (f"{OPTIM}.min_lr_ratio",)),
    f"{ACTOR}.optim.lr_warmup_init": refused(ONLY_MEGATRON, 0, 0.0),
    f"{ACTOR}.optim.lr_decay_steps": refused(ONLY_MEGATRON),
    f"{ACTOR}.optim.weight_decay_incr_style": refused(ONLY_MEGATRON, "constant"),
    f"{ACTOR}.optim.lr_wsd_decay_style": ignored("shape of a schedule that is not used"),
    f"{ACTOR}.optim.lr_wsd_decay_steps": refused(ONLY_MEGATRON),
    f"{ACTOR}.optim.use_checkpoint_opt_param_scheduler": ignored("the scheduler is always stored with the checkpoint"),
    f"{ACTOR}.optim.zero_indexed_step": ignored("the warm-up's form is written explicitly"),
    # ------------------------------------------------------------------ sharding
    f"{ACTOR}.fsdp_config.wrap_policy": derived("FSDP2 shards each decoder layer"),
    f"{ACTOR}.fsdp_config.wrap_policy.transformer_layer_cls_to_wrap": derived("FSDP2 shards each decoder layer"),
    f"{ACTOR}.fsdp_config.model_dtype": Rule(do.model_dtype, ("trainer.param_dtype",), native=True),
    f"{ACTOR}.fsdp_config.dtype": Rule(do.compute_dtype, ("trainer.param_dtype",), native=True),
    f"{ACTOR}.fsdp_config.mixed_precision.param_dtype": Rule(do.compute_dtype, ("trainer.param_dtype",), native=True),
    f"{ACTOR}.fsdp_config.mixed_precision.reduce_dtype": Rule(do.reduce_dtype, ("trainer.reduce_dtype",), native=True),
    f"{ACTOR}.checkpoint.contents": to("trainer.checkpoint.save_contents"),
    # ------------------------------------------------------------------ reference model
    f"{REF}.strategy": Rule(do.same_strategy, ("trainer.trainer_strategy",)),
    f"{REF}.log_prob_micro_batch_size": do.micro(
        REF, f"{REF}.log_prob_micro_batch_size_per_gpu", "trainer.ref.log_prob_micro_batch_size_per_gpu"
    ),
    f"{REF}.ulysses_sequence_parallel_size": derived("is the actor's", "trainer.ulysses_sequence_parallel_size"),
    **{
        f"{REF}.{name}": ignored("follows the actor")
        for name in ("use_torch_compile", "entropy_from_logits_with_chunking", "entropy_checkpointing", "rollout_n", "model.path")
    },
    f"{REF}.fsdp_config.wrap_policy.transformer_layer_cls_to_wrap": derived("FSDP2 shards each decoder layer"),
    # ------------------------------------------------------------------ rollout
    f"{ROLLOUT}.name": Rule(do.engine, (f"{ENGINE}.engine_type",)),
    f"{ROLLOUT}.n": via("", "algorithm.repeat_times"),
    f"{ROLLOUT}.temperature": Rule(do.temperature, ("model.temperature",), native=True),
    f"{ROLLOUT}.top_k": to("model.top_k", by=do.positive_k),
    f"{ROLLOUT}.do_sample": Rule(do.do_sample, ("model.temperature",)),
    f"{ROLLOUT}.use_fire_sampling": refused("FIRE sampling is not offered by the engine"),
    f"{ROLLOUT}.prompt_length": do.length("data.max_prompt_length", "model.max_prompt_tokens"),
    f"{ROLLOUT}.response_length": do.length("data.max_response_length", "model.max_response_tokens"),
    f"{ROLLOUT}.free_cache_engine": ignored("only for GPUs shared with the trainer; here the engine keeps its own"),
    f"{ROLLOUT}.load_format": ignored("the engine starts from model.model_path and takes over the trainer's weights"),
    f"{ROLLOUT}.log_prob_micro_batch_size": do.micro(
        ROLLOUT, f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu", "trainer.log_prob_micro_batch_size_per_gpu"
    ),
    f"{ROLLOUT}.log_prob_use_dynamic_bsz": derived("is the actor's", "trainer.use_dynamic_bsz"),
    f"{ROLLOUT}.mode": always(
        "generation is always asynchronous", "async", "sync", otherwise="generation is asynchronous; write async or sync"
    ),
    f"{ROLLOUT}.calculate_log_probs": always("the engine's log-probs are always returned"),
    f"{ROLLOUT}.data_parallel_size": to(f"{ENGINE}.data_parallel_size"),
    f"{ROLLOUT}.enable_prefix_caching": to(f"{ENGINE}.enable_prefix_caching"),
    f"{ROLLOUT}.repetition_penalty": to("model.repetition_penalty"),
    f"{ROLLOUT}.max_num_batched_tokens": to(f"{ENGINE}.max_num_batched_tokens"),
    f"{ROLLOUT}.layered_summon": ignored("weights are sent layer by layer anyway"),
    f"{ROLLOUT}.multi_stage_wake_up": ignored("only for GPUs shared with the trainer"),
    f"{ROLLOUT}.pipeline_model_parallel_size": refused("use tensor_model_parallel_size", 1),
    f"{ROLLOUT}.expert_parallel_size": refused("expert parallel is not offered: use tensor_model_parallel_size", 1),
    f"{ROLLOUT}.enable_rollout_routing_replay": refused("MoE router replay is not offered"),
    f"{ROLLOUT}.over_sample_rate": refused("over-sampling is not part of a conversion; see explorer.over_rollout", 0, 0.0),
    f"{ROLLOUT}.engine_kwargs.vllm.disable_mm_preprocessor_cache": ignored("texts only"),
    f"{ROLLOUT}.multi_turn.enable": Rule(do.multi_turn, ("buffer.explorer_input.default_workflow_type",)),
    f"{ROLLOUT}.multi_turn.completion_callback": refused("write a workflow instead"),
    f"{ROLLOUT}.multi_turn.use_inference_chat_template": ignored("training uses the tokens that the engine returned"),
    f"{ROLLOUT}.multi_turn.enable_tokenization_sanity_check": Rule(do.sanity, (f"{ENGINE}.tokenization_check",), native=True),
    f"{ROLLOUT}.multi_turn.tokenization_sanity_check_mode": Rule(do.sanity, (f"{ENGINE}.tokenization_check",), native=True),
    f"{ROLLOUT}.val_kwargs.do_sample": derived(
        "off: evaluation is greedy", f"{EVAL}[i].rollout_args.temperature", f"{EVAL}[i].repeat_times"
    ),
    **{f"{ROLLOUT}.val_kwargs.{n}": do.evaluated(n) for n in ("temperature", "top_p", "top_k", "n")},
    f"{ROLLOUT}.agent.custom_async_server.path": refused("veRL's extension point; ours is the workflow"),
    f"{ROLLOUT}.agent.custom_async_server.name": refused("veRL's extension point; ours is the workflow"),
    f"{ROLLOUT}.agent.num_workers": ignored("runs are coroutines of one process: explorer.max_concurrent_runs"),
    f"{ROLLOUT}.agent.default_agent_loop": always(
        "asks once", "single_turn_agent", otherwise="name a workflow with --set buffer.explorer_input.default_workflow_type=NAME"
    ),
    # ------------------------------------------------------------------ critic
    "critic.enable": derived("from the advantage estimator", "algorithm.advantage_fn"),
    "critic.strategy": Rule(do.same_strategy, ("trainer.trainer_strategy",)),
    "critic.ppo_mini_batch_size": derived("is the actor's", "buffer.batch_size"),
    "critic.ppo_micro_batch_size": only_if(
        has_critic, NO_CRITIC, do.micro("critic", "critic.ppo_micro_batch_size_per_gpu", f"{CRITIC}.micro_batch_size_per_gpu")
    ),
    "critic.ppo_micro_batch_size_per_gpu": do.critic(f"{CRITIC}.micro_batch_size_per_gpu", guide=True),
    "critic.model.path": only_if(has_critic, NO_CRITIC, do.path("model.critic_model_path")),
    "critic.model.use_remove_padding": do.critic(f"{CRITIC}.use_remove_padding", guide=True),
    "critic.model.enable_gradient_checkpointing": do.critic(f"{CRITIC}.enable_gradient_checkpointing", guide=True),
    "critic.model.fsdp_config.param_offload": do.critic(f"{CRITIC}.param_offload", guide=True),
    "critic.model.fsdp_config.optimizer_offload": do.critic(f"{CRITIC}.optimizer_offload", guide=True),
    "critic.model.tokenizer_path": ignored("actor and critic read the same tokens"),
    "critic.optim.lr": do.critic(f"{CRITIC}.optimizer.lr", guide=True),
    "critic.optim.lr_warmup_steps_ratio": do.critic(f"{CRITIC}.optimizer.lr_warmup_steps_ratio", guide=True),
    "critic.optim.lr_warmup_steps": only_if(has_critic, NO_CRITIC, scaled(f"{CRITIC}.optimizer.lr_warmup_steps", never=-1)),
    "critic.optim.min_lr_ratio": do.critic(f"{CRITIC}.optimizer.min_lr_ratio"),
    "critic.optim.betas": do.critic(f"{CRITIC}.optimizer.betas"),
    "critic.optim.warmup_style": only_if(
        has_critic, NO_CRITIC, Rule(do.scheduler, (f"{CRITIC}.optimizer.lr_scheduler_type",), native=True)
    ),
    "critic.optim.lr_scheduler_type": only_if(
        has_critic, NO_CRITIC, Rule(do.scheduler, (f"{CRITIC}.optimizer.lr_scheduler_type",), native=True)
    ),
    "critic.optim.total_training_steps": derived(_SCHEDULED, "buffer.total_steps"),
    "critic.shuffle": derived("is the actor's", "trainer.shuffle_minibatches"),
    "critic.loss_agg_mode": derived("is the actor's", "algorithm.loss_agg_mode"),
    "critic.ulysses_sequence_parallel_size": derived("is the actor's", "trainer.ulysses_sequence_parallel_size"),
    "critic.checkpoint.save_contents": derived("actor and critic are one checkpoint", "trainer.checkpoint.save_contents"),
    "critic.rollout_n": derived("is rollout.n", "algorithm.repeat_times"),
    # ------------------------------------------------------------------ rewards
    f"{RM}.enable": Rule(do.rm_enable, ("explorer.auxiliary_models",)),
    f"{RM}.model.path": do.rm(do.path("explorer.auxiliary_models[i].model_path")),
    f"{RM}.model.input_tokenizer": ignored("messages are rendered with the reward model's own template"),
    f"{RM}.model.trust_remote_code": do.rm(to("explorer.auxiliary_models[i].trust_remote_code")),
    f"{RM}.max_length": do.rm(to("explorer.auxiliary_models[i].max_model_len")),
    **{
        f"{RM}.{name}": ignored(RM_SERVED)
        for name in ("micro_batch_size", "ulysses_sequence_parallel_size", "num_workers", "enable_resource_pool",
                     "n_gpus_per_node", "nnodes", "model.tokenizer_path")
    },
    f"{RM}.reward_manager": Rule(do.manager, do.MANAGER_TARGETS, native=True),
    f"{RM}.launch_reward_fn_async": always("rewards are always computed beside generation"),
    f"{RM}.sandbox_fusion.url": do.reward_arg("sandbox_url"),
    f"{RM}.sandbox_fusion.max_concurrent": do.reward_arg("sandbox_max_concurrent"),
    f"{RM}.sandbox_fusion.memory_limit_mb": do.reward_arg("sandbox_memory_mb"),
    **{
        f"{RM}.{group}.{name}": do.reward_arg(target)
        for group in ("overlong_buffer", "reward_kwargs.overlong_buffer_cfg")
        for name, target in (
            ("enable", "enable_overlong_penalty"), ("len", "cache_length"), ("penalty_factor", "penalty_factor")
        )
    },
    f"{RM}.overlong_buffer.log": ignored("the parts of a reward are always logged"),
    f"{RM}.reward_kwargs.overlong_buffer_cfg.log": ignored("the parts of a reward are always logged"),
    f"{RM}.reward_kwargs.max_resp_len": Rule(do.max_resp, ("model.max_response_tokens",)),
    "custom_reward_function.path": via("", "buffer.explorer_input.default_reward_fn_type"),
    "custom_reward_function.name": derived("second half of file.py:function", "buffer.explorer_input.default_reward_fn_type"),
    # ------------------------------------------------------------------ algorithm
    "algorithm.adv_estimator": Rule(do.estimator, ("algorithm.algorithm_type", "algorithm.advantage_fn"), native=True),
    "algorithm.gamma": do.advantage_arg("gamma", "gae", "reinforce_plus_plus"),
    "algorithm.lam": do.advantage_arg("lam", "gae"),
    "algorithm.norm_adv_by_std_in_grpo": do.advantage_arg("norm_by_std", "grpo", "grpo_vectorized", "grpo_passk"),
    "algorithm.use_kl_in_reward": derived("none when off, else kl_penalty", "algorithm.kl_penalty_fn"),
    "algorithm.kl_penalty": do.kl_name("kl_penalty_fn", "algorithm.use_kl_in_reward"),
    "algorithm.kl_ctrl.type": do.kl_arg("algorithm.kl_penalty_fn_args.adaptive", "algorithm.use_kl_in_reward"),
    "algorithm.kl_ctrl.kl_coef": do.kl_arg("algorithm.kl_penalty_fn_args.kl_coef", "algorithm.use_kl_in_reward"),
    "algorithm.kl_ctrl.horizon": do.kl_arg("algorithm.kl_penalty_fn_args.horizon", "algorithm.use_kl_in_reward", adaptive=True),
    "algorithm.kl_ctrl.target_kl": do.kl_arg("algorithm.kl_penalty_fn_args.target_kl", "algorithm.use_kl_in_reward", adaptive=True),
    "algorithm.rollout_is": refused(_TIS),
    "algorithm.rollout_is_threshold": refused(_TIS),
    "algorithm.use_pf_ppo": Rule(
        lambda d, a: write(d, a, ("algorithm.sample_strategy",), "pf_ppo") if d.flag(a.key) else Outcome("ignored", "switched off"),
        ("algorithm.sample_strategy",), native=True,
    ),
    **{
        f"algorithm.pf_ppo.{name}": only_if(
            lambda d: d.flag("algorithm.use_pf_ppo"), "use_pf_ppo is off", to(f"algorithm.sample_strategy_args.{name}")
        )
        for name in ("reweight_method", "weight_pow")
    },
    # ------------------------------------------------------------------ trainer
    "trainer.total_epochs": Rule(
        lambda d, a: (
            Outcome("ignored", "total_training_steps is given and wins")
            if d.stated("trainer.total_training_steps") or d.stated("rollout.total_rollout_steps")
            else write(d, a, ("buffer.total_epochs",), d.whole(a.key))
        ),
        ("buffer.total_epochs",), native=True,
    ),
    "trainer.total_training_steps": scaled("buffer.total_steps"),
    "trainer.profile_steps": Rule(do.profile, ("trainer.profiler.steps",), native=True),
    "trainer.project_name": via("", "project"),
    "trainer.experiment_name": via("", "name"),
    "trainer.logger": Rule(do.logger, ("monitor.monitor_type",), native=True),
    "trainer.rollout_data_dir": Rule(
        do.rollout_dir,
        tuple(f"data_processor.experience_pipeline.{n}" for n in ("save_input", "input_save_path")), native=True,
    ),
    "trainer.nnodes": via("all nodes", "cluster.node_num"),
    "trainer.n_gpus_per_node": via("", "cluster.gpu_per_node"),
    "trainer.save_freq": scaled("trainer.save_interval", never=0),
    "trainer.test_freq": scaled("explorer.eval_interval", never=0),
    "trainer.val_only": Rule(do.val_only, ("mode",)),
    "trainer.critic_warmup": Rule(do.critic_warmup, ("trainer.critic_warmup",), native=True),
    "trainer.default_hdfs_dir": ignored("no HDFS: mount it and name it in checkpoint_root_dir"),
    "trainer.default_local_dir": via("without a trailing /project/name", "checkpoint_root_dir"),
    "trainer.resume_mode": Rule(do.resume, ("continue_from_checkpoint", "resume_from_path")),
    "trainer.resume_from_path": Rule(do.resume_path, ("resume_from_path",), native=True),
    "trainer.remove_previous_ckpt_in_save": Rule(do.keep, ("trainer.max_checkpoints_to_keep",)),
    "trainer.max_actor_ckpt_to_keep": Rule(do.keep, ("trainer.max_checkpoints_to_keep",), native=True),
    "trainer.max_critic_ckpt_to_keep": Rule(do.critic_keep, ("trainer.max_checkpoints_to_keep",)),
    "trainer.device": Rule(
        lambda d, a: (
            write(d, a, ("trainer.device",), a.value) if a.value in ("cuda", "cpu")
            else Outcome("refused", f"{a.value} devices are not offered; use cuda or cpu")
        ),
        ("trainer.device",), native=True,
    ),
    "trainer.esi_redundant_time": ignored("cloud-specific"),
    "trainer.use_legacy_worker_impl": ignored(_INTERNAL),
    "ray_init.timeline_json_file": to("monitor.enable_ray_timeline", by=bool),
    "ray_kwargs.ray_init.num_cpus": to("cluster.ray_init.num_cpus"),
    "ray_kwargs.timeline_json_file": to("monitor.enable_ray_timeline", by=bool),
    # ------------------------------------------------------------------ the asynchronous recipe
    "rollout.nnodes": derived("engines x tensor_parallel_size", f"{ENGINE}.engine_num", "cluster.node_num"),
    "rollout.n_gpus_per_node": derived("engines x tensor_parallel_size", f"{ENGINE}.engine_num", "cluster.gpu_per_node"),
    "rollout.n": via("", "algorithm.repeat_times"),
    "rollout.total_epochs": ignored("the number of samples ends the run"),
    "rollout.total_rollout_steps": to("buffer.total_tasks"),
    "rollout.test_freq": Rule(do.async_test, ("explorer.eval_interval",), native=True),
    "async_training.trigger_parameter_sync_step": via("local updates x require_batches", "synchronizer.sync_interval"),
    "async_training.use_trainer_do_validate": ignored("evaluation runs in the explorer"),
    "async_training.parallel_validate_and_rollout": to("explorer.eval_in_background"),
    # ------------------------------------------------------------------ options
    "--config-name": Rule(do.config_name),
    "--config-path": ignored("where veRL's own configuration lies"),
    "--config-dir": ignored("where veRL's own configuration lies"),
}  # fmt: skip

_GUIDE = (  # written below trainer.trainer_config in the guide's examples
    f"{MODEL}.use_remove_padding",
    f"{MODEL}.enable_gradient_checkpointing",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu",
    f"{ACTOR}.fsdp_config.param_offload",
    f"{ACTOR}.fsdp_config.optimizer_offload",
    f"{REF}.fsdp_config.param_offload",
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu",
)
RULES |= {key: to(*table.by_name()[key].targets, guide=f"{PASSED}.{key}") for key in _GUIDE}
RULES |= {
    key: only_if(do.multi, "one turn: multi_turn.enable is off", to(*(f"{sets}[i].workflow_args.{last}" for sets in (TRAIN, EVAL))))
    for last in (
        "max_turns", "tool_config_path", "max_assistant_turns", "max_user_turns", "max_parallel_calls", "max_tool_response_length",
        "tool_response_truncate_side", "format",
    )
    for key in (f"{ROLLOUT}.multi_turn.{last}",)
}  # fmt: skip
RULES |= {
    e.name: do.critic(e.targets[0])
    for e in table.by_name().values()
    if e.name.startswith("critic.") and e.kind == "native" and e.name not in RULES
}

PATTERNS: tuple[tuple[str, Rule], ...] = (
    (f"{MODEL}.override_config.*", Rule(
        lambda d, a: write(d, a, (f"model.{a.key.removeprefix(f'{MODEL}.')}",), a.value), native=True)),
    (f"{ROLLOUT}.engine_kwargs.vllm.*", Rule(
        lambda d, a: write(d, a, (f"{ENGINE}.extra_engine_args.{a.key.rsplit('.', 1)[-1]}",), a.value), native=True)),
    (f"{ROLLOUT}.engine_kwargs.sglang*", ignored("SGLang is not the engine")),
    (f"{ROLLOUT}.engine_kwargs.trtllm*", ignored("TensorRT-LLM is not the engine")),
    (f"{ACTOR}.policy_loss.clip_cov_*", do.loss_arg("clip_cov")),
    (f"{ACTOR}.megatron.param_offload", to("trainer.param_offload")),
    (f"{ACTOR}.megatron.optimizer_offload", to("trainer.optimizer_offload")),
    ("*.megatron.override_transformer_config*", refused(ONLY_MEGATRON)),
    ("*.megatron.*", ignored("how Megatron lays out and offloads its work; FSDP2 shards instead")),
    ("*.optim.override_optimizer_config*", refused("the optimizer has no further arguments")),
    ("algorithm.rollout_correction.*", Rule(
        lambda d, a: write(d, a, (a.key,), a.value), ("algorithm.rollout_correction",), native=True)),
    ("data.apply_chat_template_kwargs.*", Rule(
        lambda d, a: write(d, a, tuple(f"{f}.chat_template_args.{a.key.split('.', 2)[2]}" for f in FORMAT), a.value), native=True)),
    ("algorithm.filter_groups.*", Rule(do.filter_groups, do.FILTER_TARGETS)),
    ("custom_reward_function.reward_kwargs.*", Rule(
        lambda d, a: write(d, a, tuple(f"{s}[i].reward_fn_args.{a.key.rsplit('.', 1)[-1]}" for s in (TRAIN, EVAL)), a.value),
        native=True)),
    ("trainer.*nsight_options.*", ignored(_NSIGHT)),
    ("*.profiler.*", ignored(_TRACE)), ("global_profiler.*", ignored(_TRACE)), ("*.trace.*", ignored(_TRACE)),
    ("*._target_", ignored(_INTERNAL)), ("*_target_", ignored(_INTERNAL)), ("hydra.*", ignored("where Hydra puts its own files")),
    ("transfer_queue.*", ignored(_INTERNAL)), ("prometheus.*", ignored(_TRACE)), ("*.prometheus.*", ignored(_TRACE)),
    ("evaluation.*", ignored("not a veRL key")),
    (f"{RM}.model.fsdp_config.*", ignored(RM_SERVED)),
    ("ray_kwargs.ray_init.*", ignored("Ray is started by the program")),
    (f"{REF}.fsdp_config.*", ignored("follows the actor")),
)  # fmt: skip

ASYNC = frozenset({*table.MAIN, 19})
KNOWN = sorted({*RULES, *(n for n in table.by_name(ASYNC) if "*" not in n)})


def rule_of(key: str) -> Rule | None:
    """The rule of a veRL key; None if nobody knows it."""
    if key in RULES:
        return RULES[key]
    entry = table.by_name(ASYNC).get(key)
    for pattern, rule in PATTERNS:
        if fnmatch.fnmatchcase(key, pattern) and not (entry is not None and pattern.startswith(("*", f"{REF}.", f"{RM}."))):
            return rule
    if entry is None:
        return None
    if entry.kind == "native":
        return to(*entry.targets)
    return (derived if entry.kind == "derived" else ignored)(entry.note or "not taken over")

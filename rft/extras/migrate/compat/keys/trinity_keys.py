"""Keys of Trinity-RFT, of any version, that are called differently here or have no meaning here.

Patterns are dotted keys, in which `*` stands for any text.  Invariant: a key that Trinity-RFT
accepts is a key of the schema, is renamed, is dropped with its reason, or is refused with what to do
(`not_offered`).
"""

from __future__ import annotations

_INTERNAL = "is filled in by the program itself"
_ROWS = (
    "follows from the algorithm and from buffer.batch_size, buffer.total_epochs and "
    "buffer.total_steps"
)
_ONE_PROCESS = "runs are coroutines of one process; explorer.max_concurrent_runs bounds them"
_GENERATED_ONLY = (
    "the log-prob of every generated token is always kept, and experiences have room for no other"
)
_READ_ONCE = (
    "rows are read once, at the start, and unreadable ones are named; explorer.max_retry_times is "
    "for runs"
)
_READS = "reading rows is retried by itself: a group that is acknowledged is there"
_FOR_TASKS = "is for tasks; rows that are trained on have none"
_FOR_DATA = "is for rows to train on: buffer.trainer_input.experience_buffer.format"
_OF_DATA = "batch_size schema_type tokenizer_path ray_namespace total_epochs total_steps"
_TASKSETS = (
    "buffer.explorer_input.taskset",
    "buffer.explorer_input.*tasksets[[]*]",
)
_BUFFERS = (
    "buffer.trainer_input.experience_buffer",
    "buffer.trainer_input.auxiliary_buffers.*",
)


def _each(sections: str | tuple[str, ...], names: str, reason: str) -> dict[str, str]:
    if isinstance(sections, str):
        sections = (sections,)
    return {f"{section}.{name}": reason for section in sections for name in names.split()}


DROPPED: dict[str, str] = {
    "ignore_validator_suggestions": "what is only a suggestion never stops a run",
    "checkpoint_job_dir": "the run lives in <checkpoint_root_dir>/<project>/<group>/<name>",
    "service": "Data-Juicer's operators run in this process, with the extra data-juicer",
    **_each(
        "algorithm.policy_loss_fn_args",
        "use_dynamic_bsz ppo_mini_batch_size ppo_micro_batch_size_per_gpu ngpus_trainer "
        "train_batch_size_usual train_batch_size_expert",
        "rows are counted by themselves",
    ),
    **_each(
        "algorithm.policy_loss_fn_args",
        "sft_loss_agg_mode grpo_loss_agg_mode use_token_level_loss_in_sft",
        "algorithm.loss_agg_mode holds for all rows",
    ),
    "algorithm.advantage_fn_args.chunk_size": "all tokens are computed at once: they are single "
    "numbers",
    "buffer.explorer_output": "experiences go to the experience buffer",
    **_each("buffer", "cache_dir pad_token_id", _INTERNAL),
    **_each("buffer", "max_retry_times max_retry_interval", _READS),
    "buffer.tokenizer_path": "the model's own is taken; model.tokenizer_path names another",
    **_each(_TASKSETS, f"index is_eval {_OF_DATA}", _ROWS),
    **_each(_TASKSETS, "max_retry_times max_retry_interval", _READ_ONCE),
    **_each(_TASKSETS, "enable_progress_bar", "files are opened, not read through"),
    **_each(_TASKSETS, "rollout_args.logprobs", _GENERATED_ONLY),
    **_each(
        _TASKSETS,
        "format.chosen_key format.rejected_key format.enable_concatenated_multi_turn",
        _FOR_DATA,
    ),
    "buffer.explorer_input.eval_tasksets[[]*].weight": "an evaluation plays all rows of each of "
    "its tasksets",
    "data_processor.task_pipeline.output.[!p]*": "is read from the taskset that has this path",
    **_each(_BUFFERS, f"index is_eval {_OF_DATA}", _ROWS),
    **_each(_BUFFERS, "enable_progress_bar", "nothing is read beforehand"),
    **_each(_BUFFERS, "format.preset format.workflow_key format.reward_fn_key", _FOR_TASKS),
    **_each(
        "cluster",
        "auxiliary_model_gpu_num explorer_gpu_num rollout_gpu_num total_gpu_num trainer_gpu_num "
        "trainer_gpu_num_per_node trainer_node_num",
        "devices are counted and placed by themselves; rft check prints who sits where",
    ),
    **_each(
        "explorer.*",
        "bundle_indices checkpoint_job_dir cuda_visible_devices engine_id gpu_per_engine nnodes "
        "node_rank ray_actor_name ray_namespace sync_method enable_lora "
        "enable_runtime_lora_updating lora_kwargs lora_modules enable_return_routed_experts",
        _INTERNAL,
    ),
    **_each(
        "explorer.rollout_model",
        "model_path logprobs temperature top_k top_p rope_scaling rope_theta",
        "is written once, under model",
    ),
    **_each("explorer.*", "enable_auto_tool_choice", "tool_call_parser alone says so"),
    **_each("explorer.*", "enable_multimodal", "format.image_key of a taskset alone says so"),
    **_each("explorer.*", "enable_history", "every model call of a run is kept"),
    **_each("explorer.*", "use_v1", "vLLM V0 no longer exists"),
    "explorer.*.weight_sync_buffer_size": "belongs to SGLang",
    **_each(
        "explorer.auxiliary_models[[]*]",
        "logprobs temperature top_k top_p max_response_tokens min_response_tokens "
        "repetition_penalty ignore_eos",
        "sampling is set by the caller",
    ),
    "explorer.auxiliary_models[[]*].enable_prompt_truncation": "a prompt that is too long is "
    "refused",
    **_each(
        "explorer.auxiliary_models[[]*]",
        "fully_sharded_loras max_cpu_loras",
        "its weights have no adapter",
    ),
    "explorer.api_port": "ports are chosen by themselves",
    **_each(
        "explorer",
        "runner_num runner_per_model runner_prepare_concurrency runner_prepare_max_retries "
        "max_repeat_times_per_runner concurrent_mode",
        _ONE_PROCESS,
    ),
    "explorer.service_status_check_interval": "new weights are served when they are verified; "
    "nothing looks for them",
    "log.save_dir": "logs stand in the run's folder",
    "model.logprobs": _GENERATED_ONLY,
    "model.fully_sharded_loras": "explorer.rollout_model.fully_sharded_loras is read",
    "model.max_cpu_loras": "explorer.rollout_model.max_cpu_loras is read",
    "model.lora_configs[[]*].lora_dtype": "adapters are kept in float32, computed in "
    "trainer.param_dtype",
    "model.lora_configs[[]*].is_dummy": "without path the adapter is a new one",
    "monitor.cache_dir": "metrics stand in the run's folder",
    **_each("synchronizer", "explorer_world_size ray_namespace", _INTERNAL),
    "synchronizer.group_name": "the name is chosen automatically",
    "synchronizer.wait_for_checkpoint": "a version is used when it is complete",
    "trainer.name": "a run has one trainer; logs call it trainer and its rank",
    "trainer.save_strategy": "every rank writes its own file, all at the same time",
    "trainer.fix_actor_microbatch_loss_scale": "losses are always divided by the totals of the "
    "whole step",
    "trainer.enable_preview": "rft buffer shows the rows of any step, and samples of every "
    "evaluation are logged",
    **_each("trainer", "megatron trainer_type trainer_strategy", "the one trainer is FSDP2"),
    **_each("trainer", "optimizer_offload grad_offload", "param_offload is read"),
    "trainer.trust_remote_code": "model.trust_remote_code is read",
}
"""Keys that convert leaves out: why."""

_EXPERIENCES = "buffer.trainer_input.experience_buffer"
MOVED = {
    "algorithm.optimizer.clip_grad": "trainer.grad_clip",
    "trainer.actor_grad_clip": "trainer.grad_clip",
    "buffer.explorer_input.system_prompt": "buffer.explorer_input.taskset.format.system_prompt",
    f"{_EXPERIENCES}.use_priority_queue": f"{_EXPERIENCES}.replay_buffer.enable",
    f"{_EXPERIENCES}.reuse_cooldown_time": f"{_EXPERIENCES}.replay_buffer.reuse_cooldown_time",
    f"{_EXPERIENCES}.replay_buffer_kwargs.priority_fn": f"{_EXPERIENCES}.replay_buffer.priority_fn",
    f"{_EXPERIENCES}.replay_buffer_kwargs": f"{_EXPERIENCES}.replay_buffer.priority_fn_args",
    "explorer.rollout_model.chat_template": "model.custom_chat_template",
    **{
        f"explorer.rollout_model.{name}": f"model.{name}"
        for name in (
            "max_model_len max_prompt_tokens max_response_tokens min_response_tokens "
            "enable_prompt_truncation enable_thinking repetition_penalty trust_remote_code"
        ).split()
    },
    "model.chat_template_path": "model.custom_chat_template",
    "trainer.param_offload": "trainer.offload_policy",
    "trainer.use_remove_padding": "trainer.row_layout",
    "algorithm.enable_router_replay": "explorer.rollout_model.router_replay",
    "algorithm.policy_loss_fn_args.loss_agg_mode": "algorithm.loss_agg_mode",
    "synchronizer.bucket_size_mb": "synchronizer.nccl.bucket_size_mb",
    "synchronizer.bucketed_broadcast": "synchronizer.nccl.bucketed_broadcast",
    "synchronizer.overlap_broadcast_and_load": "synchronizer.nccl.overlap_broadcast_and_load",
}
"""Keys that stand elsewhere here."""

RENAMED = {
    "*.optimizer.warmup_style": "lr_scheduler_type",
    "buffer.explorer_input.*.max_samples": "max_rows",
    "buffer.explorer_input.*.task_selector": "data_selector",
}
"""Keys whose last part is another here."""

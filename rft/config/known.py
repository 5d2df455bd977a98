"""Keys that people of this family know and that are not in the schema: what to do about each.

Patterns are dotted keys, `*` stands for one part or list index.  Invariant: no pattern matches a key of the schema.
"""

from __future__ import annotations

import fnmatch
import re

_LIST = "buffer.explorer_input.*tasksets[[]*]"
_ENGINE = "explorer.rollout_model"

LATER: dict[str, str] = {
    "stages": "run the stages one after another; the next one's model.model_path is the previous one's Hugging Face folder",
    "extends": "put all keys into one file, or give the differing ones as key=value",
    "data_processor*": "operators on experiences come with the buffer's next version",
    "algorithm.sample_strategy*": "the trainer reads whole accepted groups, oldest first",
    "algorithm.kl_penalty_fn_args": "use algorithm.kl_loss_fn",
    "algorithm.rollout_correction": "leave it out; training is on-policy with sync_offset 0",
    "algorithm.optimizer.warmup_style": "write algorithm.optimizer.lr_scheduler_type",
    "model.critic_model_path": "there is no critic; grpo needs none",
    "model.lora_configs": "the whole model is trained",
    "model.fully_sharded_loras": "leave it out",
    "model.max_cpu_loras": "leave it out",
    "model.rope_scaling": "put it into the model's config.json",
    "model.rope_theta": "put it into the model's config.json",
    "model.external_model*": "use a local model",
    "model.enable_prompt_truncation": "leave it out; a prompt that is too long ends as a failed run with that reason",
    "buffer.explorer_input.*taskset*.max_retry_*": "use explorer.max_retry_times",
    "buffer.explorer_input.*taskset*.format.*": "leave it out",
    "buffer.explorer_input.*taskset*.enable_progress_bar": "leave it out",
    "buffer.trainer_input.auxiliary_buffers": "leave it out",
    "buffer.trainer_input.experience_buffer.*": "leave it out",
    "explorer.auxiliary_models": "judges and teachers come later; use a rule-based reward",
    "explorer.over_rollout*": "leave it out",
    "explorer.dynamic_timeout*": "use explorer.max_timeout",
    "explorer.bench_on_latest_checkpoint": "leave it out",
    "explorer.max_inflight_batches": "use synchronizer.sync_offset",
    "explorer.env_vars": "set them in the shell that starts the run",
    "explorer.*port": "leave it out",
    "explorer.listen_address": "leave it out",
    "explorer.service_status_check_interval": "leave it out",
    "explorer.min_running_model_num": "leave it out",
    "explorer.db_url": "leave it out",
    f"{_ENGINE}.data_parallel_size": "raise engine_num instead",
    f"{_ENGINE}.pipeline_parallel_size": "use tensor_parallel_size",
    f"{_ENGINE}.enable_openai_api": "workflows call ctx.chat",
    f"{_ENGINE}.enable_history": "leave it out; every model call of a run is recorded",
    f"{_ENGINE}.max_model_len": "set model.max_model_len",
    f"{_ENGINE}.max_*_tokens": "set it under model",
    f"{_ENGINE}.min_response_tokens": "set it under model",
    f"{_ENGINE}.repetition_penalty": "set it under model",
    f"{_ENGINE}.enable_thinking": "set model.enable_thinking",
    f"{_ENGINE}.chat_template": "set model.custom_chat_template",
    f"{_ENGINE}.trust_remote_code": "set model.trust_remote_code",
    f"{_ENGINE}.*_parser": "leave it out",
    f"{_ENGINE}.enable_auto_tool_choice": "leave it out",
    f"{_ENGINE}.ignore_eos": "leave it out",
    f"{_ENGINE}.enable_chunked_prefill": "the engine decides",
    f"{_ENGINE}.enable_log_requests": "leave it out",
    "trainer.ulysses_sequence_parallel_size": "leave it out",
    "trainer.critic*": "there is no critic; grpo needs none",
    "trainer.ref*": "leave it out",
    "trainer.param_offload": "leave it out",
    "trainer.optimizer_offload": "leave it out",
    "trainer.grad_offload": "leave it out",
    "trainer.offload_policy": "leave it out",
    "trainer.enable_preview": "leave it out; samples of every evaluation are logged",
    "trainer.log_prob_micro_batch_size_per_gpu": "the token budget holds for log-probs too",
    "trainer.fix_actor_microbatch_loss_scale": "leave it out; cutting a batch differently never changes the gradient",
    "trainer.save_strategy": "leave it out",
    "trainer.trainer_config*": "write the native key under trainer or algorithm.optimizer",
    "synchronizer.explorer_sync_interval": "use synchronizer.sync_interval",
    "synchronizer.trainer_sync_interval": "use synchronizer.sync_interval",
    "monitor.detailed_stats": "leave it out",
    "monitor.enable_ray_timeline": "leave it out",
    "log.group_by_node": "leave it out",
}

INSTEAD: dict[str, str] = {
    "model.tinker*": "Tinker is not offered: training runs on your own machines with the FSDP2 trainer; remove it",
    "trainer.megatron*": "Megatron is not offered: use trainer.trainer_strategy: fsdp2",
    "trainer.trainer_type": "there is one trainer (FSDP2); remove it",
    "service*": "the Data-Juicer service is not offered: prepare the data beforehand and name the file in a taskset's path",
    "algorithm.enable_router_replay": "MoE router replay is not offered; remove it",
    f"{_ENGINE}.enable_expert_parallel": "expert parallel is not offered: use tensor_parallel_size",
    f"{_ENGINE}.enable_multimodal": "multimodal inputs are not offered: use text",
    f"{_ENGINE}.weight_sync_buffer_size": "belongs to SGLang, which is not offered: use engine_type: vllm",
    f"{_ENGINE}.use_v1": "vLLM has one engine now; remove it",
    "buffer.explorer_input.*taskset*.format.image_key": "multimodal inputs are not offered: use text",
    "buffer.explorer_input.*taskset*.format.video_key": "multimodal inputs are not offered: use text",
    "explorer.runner_per_model": "runs are coroutines of one process: use explorer.max_concurrent_runs",
    "explorer.runner_num": "runs are coroutines of one process: use explorer.max_concurrent_runs",
    "explorer.runner_*": "runs are coroutines of one process; remove it",
    "explorer.concurrent_mode": "runs are coroutines of one process; remove it",
    "explorer.max_repeat_times_per_runner": "runs are coroutines of one process; remove it",
    "trainer.use_remove_padding": "batches are always packed without padding; remove it",
    "trainer.balance_batch": "rows are always dealt to ranks by tokens; remove it",
    "trainer.critic_warmup": "there is no critic; remove it",
    "trainer.trainer_config_path": "write the native keys under trainer",
    "trainer.trust_remote_code": "set model.trust_remote_code",
    "synchronizer.group_name": "it is chosen by itself; remove it",
    "synchronizer.wait_for_checkpoint": "it has no effect; remove it",
    "ignore_validator_suggestions": "it has no effect; remove it",
    "ray_namespace": "it is chosen by itself; remove it",
    "checkpoint_job_dir": "the run lives in <checkpoint_root_dir>/<project>/<group>/<name>; set those",
}

VALUES: dict[str, dict[str, str]] = {
    "mode": {
        **dict.fromkeys(("explore", "train", "bench"), "comes later; use both"),
        "serve": "accepted later; use both",
        "colocate": "comes later; engine and trainer on one machine without GPUs already take turns with mode: both",
    },
    "algorithm.optimizer.optimizer_type": {"sgd": "comes later; use adamw"},
    "algorithm.kl_penalty_fn": {
        **dict.fromkeys(
            ("k1", "k2", "k3", "abs", "low_var_kl", "corrected_k3"), "KL inside the reward comes later; use kl_loss_fn"
        ),
        "full": "needs the whole vocabulary's log-probs of two models; use kl_loss_fn: low_var_kl",
    },
    "explorer.rollout_model.engine_type": {
        **dict.fromkeys(
            ("sglang", "trtllm", "trt-llm", "tensorrt"), "is not offered; use vllm, or transformers where vLLM cannot run"
        ),
        "tinker": "is not offered; use vllm",
        "external": "comes later; use vllm",
        "openai": "comes later; use vllm",
    },
    "explorer.rollout_model.device": {"npu": "NPU devices are not offered; use cuda or cpu", "mps": "is not offered; use cpu"},
    "trainer.device": {"npu": "NPU devices are not offered; use cuda or cpu", "mps": "is not offered; use cpu"},
    "trainer.trainer_strategy": {"fsdp": "the trainer is FSDP2; use fsdp2", "megatron": "Megatron is not offered; use fsdp2"},
    "synchronizer.sync_method": {"nccl": "comes later; use memory on one machine, checkpoint on several"},
    "synchronizer.sync_style": dict.fromkeys(
        ("explorer_driven", "trainer_driven", "dynamic_by_explorer", "dynamic_by_trainer", "fully_async"),
        "comes later; use fixed with a sync_offset",
    ),
    "buffer.explorer_input.*tasksets[[]*].storage_type": {"sql": "comes later; write the rows to a jsonl or parquet file"},
    "buffer.explorer_input.taskset.storage_type": {"sql": "comes later; write the rows to a jsonl or parquet file"},
}


def advice(key: str) -> str:
    """What to do about a key that is not in the schema; "" for one that nobody knows."""
    for pattern, text in INSTEAD.items():
        if fnmatch.fnmatchcase(key, pattern):
            return f"not a key here: {text}"
    for pattern, text in LATER.items():
        if fnmatch.fnmatchcase(key, pattern) and _named(key):
            return f"known, not supported yet: {text}"
    return ""


def value_advice(key: str, value: object) -> str:
    """What to do about a value of an enum that comes later or is not offered; "" otherwise."""
    for pattern, values in VALUES.items():
        if fnmatch.fnmatchcase(key, pattern) and str(value).strip().lower() in values:
            return values[str(value).strip().lower()]
    return ""


_OPEN = {  # patterns above that end in `.*` hold for these names only; others are typing errors
    "format": "reply_prefix chosen_key rejected_key enable_concatenated_multi_turn chat_template enable_thinking preset".split(),
    "experience_buffer": "replay_buffer max_retry_times max_retry_interval split subset_name format enable_progress_bar "
    "data_selector".split(),
}


def _named(key: str) -> bool:
    *above, last = re.sub(r"\[\d+\]", "", key).split(".")
    return not above or above[-1] not in _OPEN or last in _OPEN[above[-1]]

"""Keys and values of Trinity-RFT and veRL that are not offered: what to do about each.

Invariant: no pattern matches a key of the schema, no value is one of its choices.
"""

from __future__ import annotations

from rft.config.foreign import ForeignKeys

_ENGINE = "explorer.rollout_model"

INSTEAD: dict[str, str] = {
    "model.tinker*": "Tinker is not offered: training runs on your own machines with the FSDP2 "
    "trainer; remove it",
    "model.lora_configs[[]*].lora_dropout": "engines sample without dropout, so there is none in "
    "training; remove it",
    "model.lora_configs[[]*].use_rslora": "write lora_alpha x sqrt(lora_rank) as lora_alpha; an "
    "adapter in path brings its own",
    "explorer.*.enable_expert_parallel": "expert parallel is not offered: use tensor_parallel_size",
    "explorer.*.enable_multimodal": "multimodal inputs are not offered: use text",
    "buffer.*.format.image_key": "multimodal inputs are not offered: use text",
    "buffer.*.format.video_key": "multimodal inputs are not offered: use text",
    "trainer.trainer_config_path": "write the native keys under trainer",
}

_OF_OTHERS = (
    "TRL's or OpenRLHF's; docs/migration.md says what it is called here, and `rft new "
    "config NAME` writes a file to begin with"
)
FILES: dict[str, str] = {
    "actor_rollout_ref": "veRL's; `rft convert verl FILE -o mine.yaml` makes a configuration of "
    "its files and launch scripts",
    **dict.fromkeys(
        ("model_name_or_path", "num_generations", "per_device_train_batch_size"), _OF_OTHERS
    ),
    **dict.fromkeys(("pretrain", "prompt_data", "n_samples_per_prompt"), _OF_OTHERS),
}
_DEVICES = {"npu": "NPU devices are not offered; use cuda or cpu", "mps": "is not offered; use cpu"}
_ENGINE_TYPES = {
    **dict.fromkeys(
        ("sglang", "trtllm", "trt-llm", "tensorrt"),
        "is not offered; use vllm, or transformers where vLLM cannot run",
    ),
    "tinker": "is not offered; use vllm",
}

VALUES: dict[str, dict[str, str]] = {
    f"{_ENGINE}.engine_type": _ENGINE_TYPES,
    "explorer.auxiliary_models[[]*].engine_type": _ENGINE_TYPES,
    f"{_ENGINE}.device": _DEVICES,
    "explorer.auxiliary_models[[]*].device": _DEVICES,
    "trainer.device": _DEVICES,
    "model.lora_configs[[]*].lora_dtype": dict.fromkeys(
        ("bfloat16", "float16", "bf16", "fp16"),
        "is not offered: adapters are kept in float32, computed in trainer.param_dtype; use auto",
    ),
    "trainer.trainer_type": {"tinker": "Tinker is not offered; leave it out"},
    "trainer.trainer_strategy": {"megatron": "Megatron is not offered; use fsdp2"},
}


class NotOffered(ForeignKeys):
    instead = INSTEAD
    files = FILES
    values = VALUES

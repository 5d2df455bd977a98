"""Keys and values of other tools that are not offered here, and what to do about each.

Invariant: no pattern matches a key of the schema, no value is one of its choices.
"""

from __future__ import annotations

import fnmatch

from rft.extras.migrate.compat.keys.trinity_keys import DROPPED, MOVED, RENAMED

_ENGINE = "explorer.rollout_model"
_CONVERT = "`rft convert trinity FILE -o mine.yaml`"
_OWN_STREAMS = (
    "experiences come from the explorer and go to the experience buffer; use "
    "buffer.trainer_input.auxiliary_buffers for others"
)

INSTEAD: dict[str, str] = {
    "algorithm.advantage_fn_args.duplicate_experiences": "dropped groups are not made "
    "up for: the buffer has one max_uses for all of its rows, and rows are never copied",
    "model.tinker*": "Tinker is not offered: training runs on your own machines with the FSDP2 "
    "trainer; remove it",
    "model.lora_configs[[]*].lora_dropout": "engines sample without dropout, so there is none in "
    "training; remove it",
    "model.lora_configs[[]*].use_rslora": "write lora_alpha x sqrt(lora_rank) as lora_alpha; an "
    "adapter in path brings its own",
    "explorer.*.enable_expert_parallel": "expert parallel is not offered: use tensor_parallel_size",
    f"{_ENGINE}.external_model_config": "the policy is a local model, whose tokens and weights are "
    "known; name a server in explorer.auxiliary_models",
    "explorer.db_url": "answers and rewards are in the experience buffer's ledger: "
    "buffer.trainer_input.experience_buffer.path",
    "buffer.*.format.video_key": "videos are not offered: use images or text",
    "buffer.*.reply_prefix": "an answer is only what the model writes; ask for that "
    "beginning in the prompt, or end a workflow's prompt_tokens with it",
    "data_processor.experience_pipeline.inputs": _OWN_STREAMS,
    "data_processor.experience_pipeline.output": _OWN_STREAMS,
    "buffer.trainer_input.sft_warmup_*": "write the warm-up as the first of `stages`: mode train, "
    "algorithm_type sft, its data as experience_buffer; rows that are mixed in are "
    "auxiliary_buffers",
    "trainer.trainer_config_path": f"{_CONVERT} writes what that file says as native keys",
}

_OTHER_TOOLS = (
    "TRL's or OpenRLHF's; docs/howto/from-verl.md says what it is called here, and `rft new "
    "config NAME` writes a file to begin with"
)
FILES: dict[str, str] = {  # top-level keys of another tool's files
    "actor_rollout_ref": "veRL's; `rft convert verl FILE -o mine.yaml` makes a configuration of "
    "its files and launch scripts",
    **dict.fromkeys(
        ("model_name_or_path", "num_generations", "per_device_train_batch_size"), _OTHER_TOOLS
    ),
    **dict.fromkeys(("pretrain", "prompt_data", "n_samples_per_prompt"), _OTHER_TOOLS),
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
        "is not offered: adapters are kept in float32, computed in trainer.param_dtype; leave it "
        "out",
    ),
    "trainer.trainer_type": {"tinker": "Tinker is not offered; leave it out"},
    "trainer.trainer_strategy": {"megatron": "Megatron is not offered; leave it out"},
}


def key_hint(key: str) -> str:
    """What to do about a key of another tool; "" for a key that is in no table."""
    hints = {
        **{pattern: f"not a key here: {text}" for pattern, text in (INSTEAD | FILES).items()},
        "trainer.trainer_config": f"not a key here: veRL's keys; {_CONVERT} writes the native ones",
        **{key: f"not a key here: it is called {new}" for key, new in MOVED.items()},
        **{pattern: f"not a key here: it is called {new}" for pattern, new in RENAMED.items()},
        **{
            pattern: f"has no meaning here: {reason}; {_CONVERT} leaves it out"
            for pattern, reason in DROPPED.items()
        },
    }
    return next((hints[p] for p in hints if fnmatch.fnmatchcase(key, p)), "")


def value_hint(key: str, value: object) -> str:
    """What to do about a value of another tool; "" for a value that is in no table."""
    name = str(value).strip().lower()
    hints = (VALUES[p].get(name, "") for p in VALUES if fnmatch.fnmatchcase(key, p))
    return next(filter(None, hints), "")

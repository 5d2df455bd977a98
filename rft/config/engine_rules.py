"""Refuses arguments of the policy's engine under which a weight sync cannot be verified or experts
cannot be replayed.

Invariant: each refusal names what to write instead.
"""

from __future__ import annotations

from rft.config.context import Context

_ENGINE = "explorer.rollout_model"
_REPLAY = f"{_ENGINE}.router_replay"
# argument of vLLM: values under which an engine computes with the weights that are published
_PLAIN = {
    "quantization": (None,),
    "load_format": (None, "auto", "hf", "safetensors", "dummy"),
    "kv_cache_dtype": (None, "auto", "float16", "bfloat16", "float32"),
    "enable_expert_parallel": (None, False),
    "enable_eplb": (None, False),
    "worker_extension_cls": (None,),
    "logprobs_mode": (None, "processed_logprobs"),
}
_INSTEAD = {
    "quantization": "the engine would compute with other weights than are published.  Leave it out "
    "and write dtype: bfloat16; a smaller "
    "engine comes from tensor_parallel_size, or from a LoRA adapter (model.lora_configs)",
    "load_format": "published weights are loaded by the names of safetensors.  Write auto",
    "kv_cache_dtype": "log-probs would come from other keys and values than the trainer's.  Write "
    "auto",
    "enable_expert_parallel": "experts that are dealt over workers cannot be compared with what "
    "was published.  Write false, and cut them "
    "with tensor_parallel_size",
    "enable_eplb": "copies of experts that move cannot be compared with what was published.  Write "
    "false",
    "worker_extension_cls": "it is what loads published weights.  Leave it out, or name your own "
    "engine as engine_type",
    "logprobs_mode": "training needs log-probs of the processed distribution.  Leave it out",
}


def check_engine(ctx: Context) -> None:
    """Adds errors for vLLM arguments that break verification, and for router_replay on engines that
    do not return routed experts.
    """
    e = ctx.config.explorer.rollout_model
    if e.engine_type == "vllm":
        for name, plain in _PLAIN.items():
            given = e.extra_engine_args.get(name)
            if given not in plain:
                ctx.error(
                    f"{_ENGINE}.extra_engine_args.{name}",
                    f"is {given!r}: {_INSTEAD[name]}",
                    given=given,
                )
    if not e.router_replay:
        return
    if e.engine_type not in ("vllm", "transformers"):
        ctx.error(
            _REPLAY,
            f"engine_type {e.engine_type} does not tell which experts it chose; write vllm, "
            f"transformers, or off",
        )
    if e.pipeline_parallel_size > 1:
        ctx.error(
            _REPLAY,
            "vLLM does not tell the experts of several pipeline stages; write "
            "pipeline_parallel_size: 1, or off",
        )
    if e.engine_type == "vllm" and not e.enable_prefix_caching:
        ctx.error(
            _REPLAY,
            "vLLM tells experts with prefix caching only; write enable_prefix_caching: true, or "
            "off",
        )
    if ctx.config.trainer.use_torch_compile:
        ctx.error(
            _REPLAY,
            "experts are not replayed in compiled layers; write trainer.use_torch_compile: false, "
            "or off",
        )

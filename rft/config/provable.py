"""What a weight sync can prove of the policy's engines, told before anything starts; and whether
experts can be replayed.

Knows the configuration, the plan and a model's config.json.  Invariant: what is refused here names
what to write instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rft.config.context import Context, Problems
from rft.config.plan import Plan
from rft.trainer.adapterfiles import KEY
from rft.types.row_layout import TEXT_CLASSES, text_config

_ENGINE = "explorer.rollout_model"
_REPLAY = f"{_ENGINE}.router_replay"
_BALANCE = "trainer.router_aux_loss_coef"
TEXTS_ALONE = {
    "emu3",
    "llama4",
    "mllama",
    "qwen4_exp",
}  # transformers trains them without their towers, and vLLM has no class for that
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


def engine(ctx: Context) -> None:
    """Arguments of the policy's engine that no sync can prove; and engines that do not tell which
    experts they chose.
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


def served(config: Mapping[str, Any], plan: Plan, problems: Problems) -> None:
    """Whether vLLM serves the model that is trained, where it takes new weights."""
    e, (whole, *_) = plan.engines[0], config.get("architectures") or ("",)
    if e.engine_type != "vllm" or plan.mode == "bench" or plan.trainer.alone:
        return
    own = "auto_map" in config or "architectures" in (e.extra_engine_args.get("hf_overrides") or ())
    parts = not own and "ForConditionalGeneration" in str(whole)
    if (lora := plan.learner.lora) is not None and not lora.merge:
        c = text_config(config)
        why = ""
        # whose layers are plain ones there
        if c.get("kv_lora_rank") and c.get("model_type") != "minicpm3":
            why = "vLLM multiplies latent attention with weights of its own making"
        elif parts and config.get("model_type") in TEXT_CLASSES:
            why = f"vLLM does not read the language model of {whole} alone, which adapters are for"
        if why:
            problems.error(f"{KEY}.merge", f"{why}; write merge: true", given=False)
    if not parts:
        return
    if config.get("model_type") in TEXTS_ALONE:
        text = (
            f"vLLM serves {whole} whole; its language model is trained, under other names, so "
            f"no weight sync would succeed"
        )
        problems.error(f"{_ENGINE}.engine_type", f"{text}.  Write transformers", given="vllm")


def model(config: Mapping[str, Any], plan: Plan, problems: Problems) -> None:
    """The policy's model, whose config.json is `config`, where it is trained."""
    # loads numpy, which the first stage of a check does without
    from rft.types.experts import sizes_of

    if kind := (config.get("quantization_config") or {}).get("quant_method"):
        problems.error(
            "model.model_path",
            f"its weights are stored as {kind}, which is neither trained nor published; use the "
            f"model's bfloat16 weights",
            given=plan.learner.model_path,
        )
    sizes = sizes_of(config)
    learner = plan.learner
    if learner.router_aux_loss_coef and sizes is None:
        problems.error(
            _BALANCE,
            "the model has no experts to keep busy; write 0",
            given=learner.router_aux_loss_coef,
        )
    if learner.router_aux_loss_coef and learner.compile:
        problems.error(
            _BALANCE,
            "routers are not recorded with trainer.use_torch_compile: true; write 0",
            given=learner.router_aux_loss_coef,
        )
    if sizes is not None and plan.engines[0].lora_rank is not None and not plan.trainer.alone:
        text = "vLLM's own LoRA layers take the experts' place, so no sync could prove these"
        text += ".  Write true, without fully_sharded_loras; or merge: true in model.lora_configs"
        problems.error(f"{_ENGINE}.enforce_eager", text, given=plan.engines[0].enforce_eager)
    if learner.router_replay and sizes is None:
        problems.error(_REPLAY, "the model has no experts to choose among; write off", given=True)
    elif learner.router_replay and sizes is not None:
        layers = text_config(config).get("num_hidden_layers")
        each = sizes.chosen * sizes.dtype.itemsize * (layers if isinstance(layers, int) else 1)
        problems.note(
            f"routed experts (router_replay) take up to {each} bytes of each stored token"
        )

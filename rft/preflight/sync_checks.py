"""Check that weight syncs of the policy's model can be verified, and its experts replayed.

Reads the plan and the model's config.json.  Invariant: each refusal says what to write instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rft.config.context import Problems
from rft.config.plan import Plan
from rft.trainer.model.adapterfiles import KEY
from rft.types.row_layout import TEXT_CLASSES, text_config

_ENGINE = "explorer.rollout_model"
_REPLAY = f"{_ENGINE}.router_replay"
_BALANCE = "trainer.router_aux_loss_coef"
TEXTS_ALONE = {
    "emu3",
    "llama4",
    "mllama",
    "qwen4_exp",
}  # transformers trains them without towers; vLLM has no class for that


def served(config: Mapping[str, Any], plan: Plan, problems: Problems) -> None:
    """Check that vLLM serves the trained model, if it takes new weights."""
    e, (architecture, *_) = plan.engines[0], config.get("architectures") or ("",)
    if e.engine_type != "vllm" or plan.mode == "bench" or plan.trainer.alone:
        return
    custom_code = "auto_map" in config or "architectures" in (
        e.extra_engine_args.get("hf_overrides") or ()
    )
    parts = not custom_code and "ForConditionalGeneration" in str(architecture)
    if (lora := plan.learner.lora) is not None and not lora.merge:
        c = text_config(config)
        reason = ""
        # whose layers are plain in vLLM
        if c.get("kv_lora_rank") and c.get("model_type") != "minicpm3":
            reason = "vLLM multiplies latent attention with weights of its own making"
        elif parts and config.get("model_type") in TEXT_CLASSES:
            reason = f"vLLM does not read the language model of {architecture} alone, which adapters are for"
        if reason:
            problems.error(f"{KEY}.merge", f"{reason}; write merge: true", given=False)
    if not parts:
        return
    if config.get("model_type") in TEXTS_ALONE:
        text = (
            f"vLLM serves {architecture} whole; its language model is trained, under other names, so "
            f"no weight sync would succeed"
        )
        problems.error(f"{_ENGINE}.engine_type", f"{text}.  Write transformers", given="vllm")


def model(config: Mapping[str, Any], plan: Plan, problems: Problems) -> None:
    """Check the policy's model, whose config.json is `config`, if it is trained."""
    # imported here because it loads numpy, which stage 1 avoids
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

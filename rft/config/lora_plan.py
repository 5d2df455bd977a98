"""`model.lora_configs` → the trainer's adapter settings, and where engines compute the adapter.

Part of `resolve`.  Loads no torch.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from rft.config.context import Context, Problems
from rft.config.schema.trainer_section import RefConfig
from rft.engine.settings import EngineSettings
from rft.errors import CheckpointInvalid
from rft.trainer.model import adapterfiles
from rft.trainer.model.adapterfiles import ALL_LINEAR, KEY, RANK
from rft.trainer.settings import LearnerSettings, LoraSettings

# engines that have a base of their own to which they add an adapter
_ALONE = ("vllm", "transformers")
_LARGEST_RANK = 512  # of vLLM's LoRA layers


def lora(ctx: Context) -> LoraSettings | None:
    """The adapter that is trained; None: the whole model."""
    if not ctx.config.model.lora_configs:
        return None
    (adapter,) = ctx.config.model.lora_configs
    saved = ctx.config.trainer.checkpoint.save_contents
    written = adapter.model_fields_set
    if "model" not in saved:
        ctx.error(
            "trainer.checkpoint.save_contents",
            "needs model: that is the adapter, and from hf_model, where it is added to the "
            "weights, it cannot be told again",
        )
    if ctx.config.trainer.ref != RefConfig():
        ctx.warn(
            "trainer.ref has no effect: with model.lora_configs the reference is the model that is "
            "trained, its adapter switched off"
        )
    new = adapter.path is None
    return LoraSettings(
        name=adapter.name,
        path=None if adapter.path is None else ctx.find(adapter.path),
        base_name=adapter.base_model_name or ctx.config.model.model_path,
        rank=adapter.lora_rank if new or "lora_rank" in written else None,
        alpha=adapter.lora_alpha if new or "lora_alpha" in written else None,
        target_modules=_names(adapter.target_modules, "target_modules", ctx)
        if new or "target_modules" in written
        else None,
        exclude_modules=None
        if adapter.exclude_modules is None
        else _names(adapter.exclude_modules, "exclude_modules", ctx),
    )


def _names(modules: str | tuple[str, ...], name: str, p: Problems) -> str | tuple[str, ...]:
    """One name is a list of one; any other text a regular expression."""
    if isinstance(modules, tuple):
        if not modules or not all(n.strip() for n in modules):
            p.error(f"{KEY}.{name}", "has no names, or an empty one")
        return modules
    if modules.strip().lower() == ALL_LINEAR:
        return ALL_LINEAR
    if re.fullmatch(r"\w[\w.]*", modules):
        return (modules,)
    try:
        re.compile(modules)
    except re.error as e:
        p.error(f"{KEY}.{name}", f"is neither a name nor a regular expression: {e}")
    return modules


def published(
    ctx: Context, engines: tuple[EngineSettings, ...], learner: LearnerSettings
) -> tuple[tuple[EngineSettings, ...], LearnerSettings]:
    """Whether the adapter reaches the engines alone, and in whose layers they compute it."""
    e = ctx.config.explorer.rollout_model
    engine = engines[0]
    lora = learner.lora
    lora_layers = (
        lora is not None
        and engine.engine_type == "vllm"
        and (not engine.enforce_eager or e.fully_sharded_loras)
    )
    if lora is not None and ctx.config.model.lora_configs:
        written = ctx.config.model.lora_configs[0].merge
        rank = _rank(lora)
        reason = _whole_only(engine, lora_layers, rank)
        if written is False and reason:
            ctx.error(f"{KEY}.merge", f"{reason}; leave it out")
        merge = bool(reason) if written is None else written
        if written is None:
            ctx.derive(
                f"{KEY}.merge",
                merge,
                reason or f"engine_type {engine.engine_type} adds an adapter to its own weights",
            )
        learner = replace(learner, lora=replace(lora, merge=merge))
        lora_layers = lora_layers and not merge
        if lora_layers:
            engines = tuple(
                replace(
                    x,
                    lora_rank=rank,
                    fully_sharded_loras=e.fully_sharded_loras,
                    max_cpu_loras=e.max_cpu_loras,
                )
                for x in engines
            )
    if not lora_layers:
        reason = (
            "it is about vLLM's own LoRA layers, which take an adapter that comes alone "
            "(model.lora_configs, merge: false) where vLLM "
        )
        reason += "captures graphs (enforce_eager: false) or fully_sharded_loras is true"
        e.warn_unused(
            "explorer.rollout_model", ("fully_sharded_loras", "max_cpu_loras"), reason, ctx
        )
    return engines, learner


def _whole_only(engine: EngineSettings, lora_layers: bool, rank: int) -> str:
    """Why engines need whole weights; "" where an adapter alone will do."""
    if engine.engine_type not in _ALONE:
        return f"engine_type {engine.engine_type} takes whole weights only"
    if lora_layers and rank > _LARGEST_RANK:
        return f"vLLM's own LoRA layers go up to rank {_LARGEST_RANK}, not {rank}"
    return ""


def _rank(lora: LoraSettings) -> int:
    try:
        return lora.rank or (
            RANK if lora.path is None else adapterfiles.read(Path(lora.path))[0].rank
        )
    except CheckpointInvalid:
        return RANK  # told by `fits`

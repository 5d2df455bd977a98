"""`model.lora_configs`: what the trainer gets of it, whether it fits the model on disk, and how
many parameters it trains.

Knows names and shapes, no torch.  Invariant: what the trainer would refuse of an adapter is refused
here first, where the model's files name their layers as the model does.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from rft.config.context import Context, Problems
from rft.config.model_folder import ModelShape, Tensors
from rft.config.plan import Plan
from rft.config.schema.trainer_section import RefConfig
from rft.engine.settings import EngineSettings
from rft.errors import CheckpointInvalid, ConfigError
from rft.trainer import adapterfiles
from rft.trainer.adapterfiles import ALL_LINEAR, KEY, RANK
from rft.trainer.settings import LearnerSettings, LoraSettings

# engines that have a base of their own to which they add an adapter
_ALONE = ("vllm", "transformers")
_LARGEST_RANK = 512  # of vLLM's LoRA layers
_NOT_LINEAR = re.compile(r"(^|\.)(lm_head|embed\w*|word_embeddings|wte|wpe|score|\w*norm\w*)$")


def lora(ctx: Context) -> LoraSettings | None:
    """The adapter that is trained; None: the whole model."""
    if not ctx.config.model.lora_configs:
        return None
    (given,) = ctx.config.model.lora_configs
    saved = ctx.config.trainer.checkpoint.save_contents
    written = given.model_fields_set
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
    new = given.path is None
    return LoraSettings(
        name=given.name,
        path=None if given.path is None else ctx.find(given.path),
        base_name=given.base_model_name or ctx.config.model.model_path,
        rank=given.lora_rank if new or "lora_rank" in written else None,
        alpha=given.lora_alpha if new or "lora_alpha" in written else None,
        target_modules=_names(given.target_modules, "target_modules", ctx)
        if new or "target_modules" in written
        else None,
        exclude_modules=None
        if given.exclude_modules is None
        else _names(given.exclude_modules, "exclude_modules", ctx),
    )


def _names(given: str | tuple[str, ...], name: str, p: Problems) -> str | tuple[str, ...]:
    """One name is a list of one; any other text a regular expression."""
    if isinstance(given, tuple):
        if not given or not all(n.strip() for n in given):
            p.error(f"{KEY}.{name}", "has no names, or an empty one")
        return given
    if given.strip().lower() == ALL_LINEAR:
        return ALL_LINEAR
    if re.fullmatch(r"\w[\w.]*", given):
        return (given,)
    try:
        re.compile(given)
    except re.error as e:
        p.error(f"{KEY}.{name}", f"is neither a name nor a regular expression: {e}")
    return given


def published(
    ctx: Context, engines: tuple[EngineSettings, ...], learner: LearnerSettings
) -> tuple[tuple[EngineSettings, ...], LearnerSettings]:
    """Whether the adapter reaches the engines alone, and in whose layers they compute it."""
    e = ctx.config.explorer.rollout_model
    engine = engines[0]
    lora = learner.lora
    own = (
        lora is not None
        and engine.engine_type == "vllm"
        and (not engine.enforce_eager or e.fully_sharded_loras)
    )
    if lora is not None and ctx.config.model.lora_configs:
        given = ctx.config.model.lora_configs[0].merge
        rank = _rank(lora)
        why = _whole_only(engine, own, rank)
        if given is False and why:
            ctx.error(f"{KEY}.merge", f"{why}; leave it out")
        merge = bool(why) if given is None else given
        if given is None:
            ctx.derive(
                f"{KEY}.merge",
                merge,
                why or f"engine_type {engine.engine_type} adds an adapter to its own weights",
            )
        learner = replace(learner, lora=replace(lora, merge=merge))
        own = own and not merge
        if own:
            engines = tuple(
                replace(
                    x,
                    lora_rank=rank,
                    fully_sharded_loras=e.fully_sharded_loras,
                    max_cpu_loras=e.max_cpu_loras,
                )
                for x in engines
            )
    if not own:
        why = (
            "it is about vLLM's own LoRA layers, which take an adapter that comes alone "
            "(model.lora_configs, merge: false) where vLLM "
        )
        why += "captures graphs (enforce_eager: false) or fully_sharded_loras is true"
        e.idle("explorer.rollout_model", ("fully_sharded_loras", "max_cpu_loras"), why, ctx)
    return engines, learner


def _whole_only(engine: EngineSettings, own: bool, rank: int) -> str:
    """Why engines need whole weights; "" where an adapter alone will do."""
    if engine.engine_type not in _ALONE:
        return f"engine_type {engine.engine_type} takes whole weights only"
    if own and rank > _LARGEST_RANK:
        return f"vLLM's own LoRA layers go up to rank {_LARGEST_RANK}, not {rank}"
    return ""


def _rank(lora: LoraSettings) -> int:
    try:
        return lora.rank or (
            RANK if lora.path is None else adapterfiles.read(Path(lora.path))[0].rank
        )
    except CheckpointInvalid:
        return RANK  # told by `fits`


def linear(tensors: Tensors) -> dict[str, tuple[int, int]]:
    """The layers of a model's files that may have an adapter, (out, in) by name."""
    found = {
        n.removesuffix(".weight"): s
        for n, (_, s) in tensors.items()
        if n.endswith(".weight") and len(s) == 2
    }
    return {
        name: (shape[0], shape[1]) for name, shape in found.items() if not _NOT_LINEAR.search(name)
    }


def fits(settings: LearnerSettings, tensors: Tensors, problems: Problems) -> None:
    """Whether the model has the layers that are named, and the adapter to begin with is one of this
    model.
    """
    if settings.lora is None:
        return
    known = linear(tensors)
    try:
        named = () if settings.lora.path is None else adapterfiles.read(Path(settings.lora.path))[1]
        if (
            named
            and known.keys().isdisjoint(named)
            and set(map(_in_layer, named)) <= set(map(_in_layer, known))
        ):
            # the files have other names than the model's modules, with which the trainer compares
            return
        adapterfiles.form(settings.lora, known, settings.model_path)
    except ConfigError as e:
        problems.take(e)
    except CheckpointInvalid as e:
        problems.error(f"{KEY}.path", str(e))


def _in_layer(name: str) -> str:
    return name.rpartition("layers.")[2]


def rounding(plan: Plan, problems: Problems) -> None:
    """Where engines get the base with the adapter added, a short type rounds away what is small
    beside the base.
    """
    dtypes = {e.dtype for e in plan.engines} & {"bfloat16", "float16"}
    if (
        plan.learner.lora is not None
        and plan.learner.lora.merge
        and dtypes
        and not plan.trainer.alone
    ):
        problems.warn(
            f"explorer.rollout_model.dtype is {dtypes.pop()}: the base with the adapter added is "
            f"rounded to it, which loses most of an "
            "adapter's first small steps, so engines stay near the base while the trainer moves.  "
            "mismatch/* shows how far apart they are; "
            "merge: false or dtype: float32 loses nothing"
        )


def parameters(lora: LoraSettings, sizes: ModelShape, tensors: Tensors | None) -> int:
    """How many are trained.  Without the model's tensors: as many as a Llama's linear layers would
    have.
    """
    known: Mapping[str, tuple[int, int]] = linear(tensors) if tensors else _llama(sizes)
    rank = lora.rank or RANK
    if lora.path is not None:
        try:
            return sum(
                math.prod(size)
                for sides in adapterfiles.read(Path(lora.path))[1].values()
                for size in sides.values()
            )
        except CheckpointInvalid:
            return rank * sum(map(sum, known.values()))
    try:
        chosen = adapterfiles.choose(
            tuple(known), lora.target_modules or ALL_LINEAR, lora.exclude_modules
        )
    except ConfigError:
        chosen = tuple(known)  # told by `fits`, or not to be known without the model
    return rank * sum(sum(known[name]) for name in chosen)


def _llama(sizes: ModelShape) -> dict[str, tuple[int, int]]:
    hidden = sizes.hidden
    queries = sizes.queries
    keys = sizes.keys
    mlp = sizes.mlp
    layer = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.up_proj": (mlp, hidden),
        "mlp.down_proj": (hidden, mlp),
    }
    if sizes.gated:
        layer["mlp.gate_proj"] = (mlp, hidden)
    return {
        f"model.layers.{i}.{name}": size
        for i in range(sizes.layers)
        for name, size in layer.items()
    }

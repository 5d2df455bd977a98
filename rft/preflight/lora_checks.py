"""Check that a LoRA adapter fits the model's files, and count its trained parameters.

Depends on names and shapes, on no torch.  Invariant: an adapter that the trainer would refuse is
refused here first, if the model's files name their layers like the model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path

from rft.config.context import Problems
from rft.config.plan import Plan
from rft.errors import CheckpointInvalid, ConfigError
from rft.preflight.model_folder import ModelShape, Tensors
from rft.trainer.model import adapterfiles
from rft.trainer.model.adapterfiles import ALL_LINEAR, KEY, RANK
from rft.trainer.settings import LearnerSettings, LoraSettings

_NOT_LINEAR = re.compile(r"(^|\.)(lm_head|embed\w*|word_embeddings|wte|wpe|score|\w*norm\w*)$")


def linear_layers(tensors: Tensors) -> dict[str, tuple[int, int]]:
    """Return (out, in) by name of the layers in a model's files that may have an adapter."""
    layers = {}
    for tensor, (_, shape) in tensors.items():
        name = tensor.removesuffix(".weight")
        if name != tensor and len(shape) == 2 and not _NOT_LINEAR.search(name):
            layers[name] = (shape[0], shape[1])
    return layers


def check_adapter(settings: LearnerSettings, tensors: Tensors, problems: Problems) -> None:
    """Check that the model has the named layers, and that the initial adapter fits this model."""
    if settings.lora is None:
        return
    layers = linear_layers(tensors)
    path = settings.lora.path
    try:
        adapted = () if path is None else adapterfiles.read(Path(path))[1]
        in_layers = set(map(_in_layer, adapted)) <= set(map(_in_layer, layers))
        if adapted and layers.keys().isdisjoint(adapted) and in_layers:
            # names in the files differ from the module names that the trainer compares
            return
        adapterfiles.form(settings.lora, layers, settings.model_path)
    except ConfigError as e:
        problems.add_errors(e)
    except CheckpointInvalid as e:
        problems.error(f"{KEY}.path", str(e))


def _in_layer(name: str) -> str:
    return name.rpartition("layers.")[2]


def warn_of_rounding(plan: Plan, problems: Problems) -> None:
    """Warn if engines get merged weights in a short type, which rounds small steps away."""
    dtypes = {e.dtype for e in plan.engines} & {"bfloat16", "float16"}
    lora = plan.learner.lora
    if lora is not None and lora.merge and dtypes and not plan.trainer.alone:
        problems.warn(
            f"explorer.rollout_model.dtype is {dtypes.pop()}: the base with the adapter added is "
            f"rounded to it, which loses most of an adapter's first small steps, so engines stay "
            f"near the base while the trainer moves.  mismatch/* shows how far apart they are; "
            f"merge: false or dtype: float32 loses nothing"
        )


def parameters(lora: LoraSettings, sizes: ModelShape, tensors: Tensors | None) -> int:
    """Return the number of trained parameters; without `tensors`, that for a Llama of these sizes."""
    layers: Mapping[str, tuple[int, int]] = linear_layers(tensors) if tensors else _llama(sizes)
    rank = lora.rank or RANK
    names = list(layers)
    try:
        if lora.path is not None:
            stored = adapterfiles.read(Path(lora.path))[1]
            return sum(math.prod(size) for sides in stored.values() for size in sides.values())
        targets = lora.target_modules or ALL_LINEAR
        names = list(adapterfiles.choose(tuple(layers), targets, lora.exclude_modules))
    except (CheckpointInvalid, ConfigError):
        pass  # reported by `check_adapter`, or unknown without the model
    return rank * sum(sum(layers[name]) for name in names)


def _llama(sizes: ModelShape) -> dict[str, tuple[int, int]]:
    mlp = {
        "mlp.up_proj": (sizes.mlp, sizes.hidden),
        "mlp.down_proj": (sizes.hidden, sizes.mlp),
        "mlp.gate_proj": (sizes.mlp, sizes.hidden),
    }
    if not sizes.gated:
        del mlp["mlp.gate_proj"]
    layer = {
        "self_attn.q_proj": (sizes.queries, sizes.hidden),
        "self_attn.k_proj": (sizes.keys, sizes.hidden),
        "self_attn.v_proj": (sizes.keys, sizes.hidden),
        "self_attn.o_proj": (sizes.hidden, sizes.queries),
        **mlp,
    }
    return {
        f"model.layers.{i}.{name}": size
        for i in range(sizes.layers)
        for name, size in layer.items()
    }

"""Build a small random copy of a model in float64, on which a row layout is proven without rounding
errors.

Whether a layer sees across row boundaries follows from its code and configuration, not from its
weights or dtype.  So the copy has the model's first layers, up to one of every kind, at their
original sizes, and a small vocabulary without an output layer. Depends on modules and
configurations, not on weights.  Invariant: the state of torch's random generators is restored.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from rft.trainer.model import loading
from rft.trainer.model import policy as policies
from rft.trainer.model.critic import ValueModel
from rft.trainer.settings import LearnerSettings

_VOCABULARY = 256
_SEED = 0


def make(settings: LearnerSettings) -> ValueModel:
    """Return the copy of `settings.model_path`, on the device of `settings`.

    Raises MemoryError if it would take more than half of the free memory.
    """
    config = copy.deepcopy(
        loading.config_of(
            Path(settings.model_path),
            trust_remote_code=settings.trust_remote_code,
            override=settings.override_config,
        )
    )
    text = config.get_text_config()
    text.vocab_size = min(text.vocab_size, _VOCABULARY)
    if (text.pad_token_id or 0) >= text.vocab_size:
        text.pad_token_id = None
    config._experts_implementation = "eager"  # the grouped kernels do not support float64
    lm = loading.skeleton(
        config,
        trust_remote_code=settings.trust_remote_code,
        attn_implementation=policies.attention_name(settings),
    )
    layers = policies.layers(lm)
    del layers[_first_layers(layers, text.to_dict()) :]
    model = ValueModel(policies.without_dropout(lm), settings.logprob_chunk_tokens).double()
    needed = sum(p.numel() for p in model.parameters()) * 8
    free = free_bytes(settings.device)
    if needed > free / 2:
        raise MemoryError(
            f"a copy of its first layers in float64 needs {needed / 1e9:.1f} GB, and "
            f"{free / 1e9:.1f} GB are free"
        )
    loading.materialise(model, settings.device, settings.device)
    _random(model)
    return model.eval().requires_grad_(False)


def _first_layers(layers: nn.ModuleList, config: dict[str, Any]) -> int:
    """Return how many layers, counted from the first, contain one of every kind."""
    lists = [
        v
        for v in config.values()
        if isinstance(v, Sequence) and not isinstance(v, str) and len(v) == len(layers)
    ]
    counts: dict[str, int] = {}
    for i, layer in enumerate(layers):
        counts.setdefault(
            repr(([v[i] for v in lists], [_kind(n, m) for n, m in layer.named_modules()])), i
        )
    return max(counts.values()) + 1


def _kind(name: str, module: nn.Module) -> tuple[Any, ...]:
    entries = {
        k: v
        for k, v in vars(module).items()
        if isinstance(v, bool | int | float | str) and not _counts(k)
    }
    return (
        name,
        type(module).__name__,
        entries,
        [(n, tuple(p.shape)) for n, p in module.named_parameters(recurse=False)],
    )


def _counts(name: str) -> bool:
    """Return whether an attribute only numbers the layer."""
    return name.startswith("_") or name.endswith(("idx", "index", "layer_id", "layer_number"))


def free_bytes(device: str) -> int:
    return (
        torch.cuda.mem_get_info()[0] if device == "cuda" else int(psutil.virtual_memory().available)
    )


@torch.no_grad()
def _random(model: nn.Module) -> None:
    """Set random weights: matrices preserve the scale of activations; norms and biases are about 1."""
    with torch.random.fork_rng():
        torch.manual_seed(_SEED)
        for p in model.parameters():
            mean, std = (1.0, 0.1) if p.dim() < 2 else (0.0, 1 / math.sqrt(p.shape[-1]))
            p.normal_(mean, std)

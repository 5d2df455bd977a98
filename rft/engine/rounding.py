"""Measure rounding noise: run a model with embeddings whose last bits differ, which changes every
later rounding.

Another batch shape does not suffice: kernels may add in the same order for every shape.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def otherwise(
    model: Any, computes: torch.dtype, rounds: torch.dtype | None = None
) -> Iterator[None]:
    """Change the last bit of about half of the embedding outputs of `model` inside the block.

    `computes`: the model's dtype.  `rounds`: the dtype for autocast if the model is float32.
    """
    short = rounds or computes
    step = torch.finfo(short).eps / 2
    embeddings = model.get_input_embeddings()

    def hook(module: nn.Module, inputs: object, out: torch.Tensor) -> torch.Tensor:
        signs = 1 - 2 * (torch.arange(out.shape[-1], device=out.device) % 2)
        return (out.double() * (1 + step * signs)).to(out.dtype)

    handle = embeddings.register_forward_hook(hook)
    try:
        with torch.autocast(
            embeddings.weight.device.type, short, enabled=computes == torch.float32 != short
        ):
            yield
    finally:
        handle.remove()

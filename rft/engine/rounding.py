"""What rounding does to a model: its forward with embeddings whose last bits are others, from which
on every rounding is another one.

Another batch shape is not enough: kernels may add in the same order for any of them.
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
    """About half of the numbers that the embeddings of `model` give have another last bit.

    `computes`: the model's type.  `rounds`: the type that it computes in instead, where its own is
    float32.
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

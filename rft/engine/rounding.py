"""What rounding does to a model: its forward with embeddings whose last bits are others, from which
on every rounding is another one.

Another batch shape is not enough: kernels may add in the same order for any of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def otherwise(model: nn.Module, dtype: torch.dtype | None = None) -> Iterator[None]:
    """About half of the numbers that the embeddings of `model` give have another last bit, of
    `dtype` or of theirs.
    """

    def hook(module: nn.Module, inputs: object, out: torch.Tensor) -> torch.Tensor:
        step = torch.finfo(dtype or out.dtype).eps / 2
        signs = 1 - 2 * (torch.arange(out.shape[-1], device=out.device) % 2)
        return (out.double() * (1 + step * signs)).to(out.dtype)

    handle = model.get_input_embeddings().register_forward_hook(hook)  # type: ignore[operator]
    try:
        yield
    finally:
        handle.remove()

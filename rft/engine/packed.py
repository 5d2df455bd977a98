"""Linear layers that multiply with a packed copy of their weight: for float32 inference on CPU.

oneDNN's blocked layout is 1.3 (layers) to 2.4 times (output layer) as fast as a plain product at 32 rows.  The price is a second copy of
the weights and that a copy can be stale; so `pack` is called after every load and `probe` compares each layer with its published weight.
Does not know where weights come from.  Invariant: parameters, their names and their ties stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from rft.engine.adapter import apart

PACK_ROWS = 32  # the number of rows the layout is chosen for; others work too
PROBE_ROWS = 2


def usable(model: nn.Module) -> bool:
    """Packing needs a float32 model on CPU and a torch with oneDNN."""
    parameter = next(model.parameters())
    has_op = hasattr(torch.ops.mkldnn, "_linear_pointwise") and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    return parameter.device.type == "cpu" and parameter.dtype == torch.float32 and torch.backends.mkldnn.is_available() and has_op


@torch.no_grad()
def pack(model: nn.Module, *, skip: nn.Module | None = None) -> None:
    """Pack every plain linear layer anew, from its weight as it is now.  `skip` keeps the copy it has (fault points only)."""
    if not usable(model):
        return
    for _, module in linears(model):
        if module is not skip:
            module.forward = _packed(module.weight, module.bias)  # type: ignore[method-assign,assignment]


def linears(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    for name, module in model.named_modules():
        if type(module) is nn.Linear:
            yield name, module


@torch.no_grad()
def probe(model: nn.Module, published: Callable[[str], torch.Tensor | None], *, seed: int) -> tuple[int, float, str]:
    """(layers probed, largest error relative to the output's scale, the layer that has it), with random inputs of 2 rows."""
    random = torch.Generator().manual_seed(seed)
    count, error, worst = 0, 0.0, ""
    for name, module in linears(model):
        weight = published(f"{name}.weight")
        if weight is None:
            continue
        x = torch.randn(PROBE_ROWS, module.in_features, generator=random).to(module.weight.device, module.weight.dtype)
        want = nn.functional.linear(x, weight.to(x.device, x.dtype), module.bias)
        difference = apart(module(x), want)
        count += 1
        if not difference <= error:  # also true for nan
            error, worst = difference, name
    return count, error, worst


def _packed(weight: torch.Tensor, bias: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor]:
    copy = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), PACK_ROWS)

    def forward(x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, copy, bias, "none", [], "")
        return out

    return forward

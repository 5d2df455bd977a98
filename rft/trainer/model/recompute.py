"""Norms and gated MLPs of Llama-like layers that store less for the backward pass.

transformers writes them as several operations, and autograd stores the inputs of each: the
normalised input of an RMS norm, the activated gate and the product of a gated MLP.  Cheap
operations restore both from tensors that are stored anyway, so the backward pass recomputes them
here: a third less activation memory of the layers, at no cost in time. Depends on modules and
autograd, not on models' names.  Invariant: the forward pass makes the same operations in the same
order, so its results are bitwise equal, and modules whose code is not Llama's are unchanged.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


def apply(lm: nn.Module) -> int:
    """Let the supported modules of `lm` store less; return how many they are."""
    from transformers.activations import SiLUActivation
    from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

    count = 0
    for module in lm.modules():
        if _same_code(module, LlamaRMSNorm):
            module.forward = partial(_norm, module)
        elif (
            _same_code(module, LlamaMLP)
            and isinstance(module.act_fn, SiLUActivation | nn.SiLU)
            and type(module.down_proj) is nn.Linear  # an adapter's layer computes more
            and module.down_proj.bias is None
        ):
            module.forward = partial(_mlp, module)
        else:
            continue
        count += 1
    return count


def _same_code(module: nn.Module, reference: type[nn.Module]) -> bool:
    """Return whether `module` has the code of `reference`; many models copy Llama's classes."""
    code = getattr(type(module).forward, "__code__", None)
    theirs = reference.forward.__code__
    return code is not None and (code.co_code, code.co_names, code.co_consts) == (
        theirs.co_code,
        theirs.co_names,
        theirs.co_consts,
    )


def _norm(module: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = _RmsNorm.apply(hidden_states, module.weight, module.variance_epsilon)
    return out


def _mlp(module: Any, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = _GatedDown.apply(
        module.gate_proj(x), module.up_proj(x), module.down_proj.weight
    )
    return out


class _RmsNorm(torch.autograd.Function):
    """weight * x / sqrt(mean(x^2) + eps) over the last dimension, computed in float32; stores x and
    the factor of each row.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x.to(torch.float32)
        factor = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, factor)
        return weight * (wide * factor).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = grads
        x, weight, factor = ctx.saved_tensors
        normal = x.to(torch.float32) * factor
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = (grad * normal.to(grad.dtype)).flatten(0, -2).sum(0).to(weight.dtype)
        pull = (grad * weight).to(torch.float32)
        along = (pull * normal).mean(-1, keepdim=True)
        return pull.sub_(normal.mul_(along)).mul_(factor).to(x.dtype), grad_weight, None


class _GatedDown(torch.autograd.Function):
    """(silu(gate) * up) @ weight.T; stores gate and up."""

    @staticmethod
    def forward(
        ctx: Any, gate: torch.Tensor, up: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(gate, up, weight)
        return F.linear(F.silu(gate).mul_(up), weight)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gate, up, weight = ctx.saved_tensors
        grad = grads[0].flatten(0, -2)
        active = F.silu(gate)
        grad_weight = grad.t() @ (active * up).flatten(0, -2) if ctx.needs_input_grad[2] else None
        pull = (grad @ weight).view_as(gate)
        grad_up = active.mul_(pull)
        grad_gate = torch.ops.aten.silu_backward(pull.mul_(up), gate)
        return grad_gate, grad_up, grad_weight

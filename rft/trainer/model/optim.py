"""Build an optimizer by name, and convert its state into the tensors and numbers of a checkpoint.

Depends on torch's optimizers, not on models, files or schedules.  Invariant: all parameters that
ever had a gradient have made the same number of updates, so one set of numbers serves all;
parameters without a gradient, such as vision towers, have no state and do not change.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from rft.errors import CheckpointInvalid
from rft.trainer.model import tensors
from rft.trainer.model.tensors import Files
from rft.trainer.settings import OptimizerConfig


def make(names: Mapping[str, nn.Parameter], o: OptimizerConfig) -> torch.optim.Optimizer:
    """Return the optimizer of `o` over these parameters.

    Without `decay_norms_and_biases`, one-dimensional parameters have no weight decay.
    """
    groups: list[dict[str, Any]] = [
        {"params": list(names.values()), "weight_decay": o.weight_decay}
    ]
    if not o.decay_norms_and_biases:
        flat = [p for p in names.values() if p.ndim < 2]
        rest = [p for p in names.values() if p.ndim >= 2]
        groups = [
            {"params": params, "weight_decay": decay}
            for params, decay in ((rest, o.weight_decay), (flat, 0.0))
            if params
        ]
    match o.optimizer_type:
        case "adamw":
            return torch.optim.AdamW(groups, lr=o.lr, betas=o.betas, eps=o.eps, fused=True)
        case "nadam":
            return torch.optim.NAdam(
                groups, lr=o.lr, betas=o.betas, eps=o.eps, decoupled_weight_decay=True
            )
        case "radam":
            return torch.optim.RAdam(
                groups, lr=o.lr, betas=o.betas, eps=o.eps, decoupled_weight_decay=True
            )
        case "adagrad":
            return torch.optim.Adagrad(groups, lr=o.lr, eps=o.eps)
        case "sgd":
            return torch.optim.SGD(groups, lr=o.lr, momentum=o.momentum)


def updated(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> bool:
    """Return whether the parameter was ever updated; Adagrad has all states from the start."""
    state: Mapping[str, Any] = optimizer.state.get(parameter, {})
    return bool(state) and bool(state.get("step", 1))


def moments(
    optimizer: torch.optim.Optimizer, names: Mapping[str, nn.Parameter]
) -> dict[str, torch.Tensor]:
    """Return running averages of parameter size, by `average.parameter`; empty before any update."""
    states = [(name, p, optimizer.state[p]) for name, p in names.items() if updated(optimizer, p)]
    keys = dict.fromkeys(
        k
        for _, p, s in states
        for k, t in s.items()
        if isinstance(t, torch.Tensor) and t.shape == p.shape and p.ndim
    )
    return {f"{key}.{name}": s[key] for key in keys for name, _, s in states if key in s}


def numbers(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Return the scalars of the state, such as the number of updates, equal for all parameters."""
    first: dict[str, Any] = next(
        (state for p, state in optimizer.state.items() if updated(optimizer, p)), {}
    )
    return {
        k: float(t)
        for k, t in first.items()
        if isinstance(t, int | float) or (isinstance(t, torch.Tensor) and t.ndim == 0)
    }


def restore(
    optimizer: torch.optim.Optimizer,
    names: Mapping[str, nn.Parameter],
    files: Files,
    values: Mapping[str, float],
) -> None:
    """Load a saved state.  Raises CheckpointInvalid if it belongs to other parameters."""
    keys = dict.fromkeys(name.partition(".")[0] for name in files)
    fused = bool(optimizer.defaults.get("fused"))
    # the other parameters had no gradient yet
    for p in (p for name, p in names.items() if all(f"{key}.{name}" in files for key in keys)):
        scalars: dict[str, Any] = {
            k: torch.tensor(v, dtype=torch.float32, device=p.device if fused else "cpu")
            for k, v in values.items()
        }
        optimizer.state[p] = scalars | {
            key: torch.zeros_like(p, requires_grad=False) for key in keys
        }
    tensors.fill(files, moments(optimizer, names))


def check_type(saved: str | None, optimizer_type: str, where: str) -> None:
    """Raise CheckpointInvalid if another optimizer wrote the state."""
    if saved != optimizer_type:
        raise CheckpointInvalid(
            f"{where}: the optimizer's state is of {saved}, not of {optimizer_type}; write the old "
            f"optimizer_type, or leave optimizer out of trainer.checkpoint.load_contents"
        )

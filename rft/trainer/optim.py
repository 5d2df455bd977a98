"""The optimizer by name, and its state as tensors and numbers that a checkpoint can hold.

Knows torch's optimizers; not models, files or schedules.  Invariant: all parameters that had a
gradient have made the same number of updates, so one set of numbers stands for all; those without
one, such as towers for images, have no state and do not move.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from rft.errors import CheckpointInvalid
from rft.trainer import tensors
from rft.trainer.settings import OptimSettings
from rft.trainer.tensors import Files


def make(names: Mapping[str, nn.Parameter], o: OptimSettings) -> torch.optim.Optimizer:
    """The optimizer of `o` over these parameters.  Without `decay_norms_and_biases`,
    one-dimensional ones are not decayed.
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
    """Whether it was ever updated; Adagrad has a state of every parameter from the beginning."""
    state: Mapping[str, Any] = optimizer.state.get(parameter, {})
    return bool(state) and bool(state.get("step", 1))


def moments(
    optimizer: torch.optim.Optimizer, names: Mapping[str, nn.Parameter]
) -> dict[str, torch.Tensor]:
    """Running averages of the size of their parameter, by `average.parameter`; empty before the
    first update.
    """
    held = [(name, p, optimizer.state[p]) for name, p in names.items() if updated(optimizer, p)]
    keys = dict.fromkeys(
        k
        for _, p, s in held
        for k, t in s.items()
        if isinstance(t, torch.Tensor) and t.shape == p.shape and p.ndim
    )
    return {f"{key}.{name}": s[key] for key in keys for name, _, s in held if key in s}


def numbers(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """What else the state holds, such as the number of updates: the same for every parameter."""
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
    """Put a saved state in.  Raises CheckpointInvalid where it is of other parameters."""
    keys = dict.fromkeys(name.partition(".")[0] for name in files)
    fused = bool(optimizer.defaults.get("fused"))
    # others had no gradient yet
    for p in (p for name, p in names.items() if all(f"{key}.{name}" in files for key in keys)):
        held: dict[str, Any] = {
            k: torch.tensor(v, dtype=torch.float32, device=p.device if fused else "cpu")
            for k, v in values.items()
        }
        optimizer.state[p] = held | {key: torch.zeros_like(p, requires_grad=False) for key in keys}
    tensors.fill(files, moments(optimizer, names))


def check_type(saved: str | None, optimizer_type: str, where: str) -> None:
    """Raises CheckpointInvalid where another optimizer wrote the state (None: an older checkpoint,
    of AdamW).
    """
    if (saved or "adamw") != optimizer_type:
        raise CheckpointInvalid(
            f"{where}: the optimizer's state is of {saved or 'adamw'}, not of {optimizer_type}; "
            f"write the old optimizer_type, or "
            "leave optimizer out of trainer.checkpoint.load_contents"
        )

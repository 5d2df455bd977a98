"""Compute the learning rate of a train step: a pure function, so a resumed run needs no scheduler
state.
"""

from __future__ import annotations

import math

from rft.trainer.settings import OptimizerConfig

STABLE = 0.9  # share of the steps after the warm-up at the peak rate of wsd


def warmup_steps(optim: OptimizerConfig, total_steps: int) -> int:
    """Return `lr_warmup_steps`, or if negative `lr_warmup_steps_ratio` of all steps, rounded down."""
    return (
        optim.lr_warmup_steps
        if optim.lr_warmup_steps >= 0
        else int(optim.lr_warmup_steps_ratio * total_steps)
    )


def learning_rate(optim: OptimizerConfig, step: int, total_steps: int) -> float:
    """Return the learning rate of train step `step` (from 1); skipped steps count.

    With W warm-up steps and t = step - 1: lr (t + 1) / W for t < W, or lr t / W with
    lr_warmup_from_zero; after that
    constant: lr;
    linear: a straight line from lr, which reaches min_lr_ratio lr at step `total_steps` + 1;
    cosine: `num_cycles` periods of a cosine from lr to min_lr_ratio lr that end at that step (half
    a period: down to the floor);
    wsd: lr for STABLE of the steps after the warm-up, then that cosine over the rest.
    """
    t = step - 1
    warm = warmup_steps(optim, total_steps)
    if t < warm:
        return optim.lr * (t if optim.lr_warmup_from_zero else t + 1) / warm
    if optim.lr_scheduler_type == "constant":
        return optim.lr
    begin = float(warm)
    if optim.lr_scheduler_type == "wsd":
        begin += STABLE * max(0, total_steps - warm)
    progress = min(1.0, max(0.0, t - begin) / max(1.0, total_steps - begin))
    low = optim.min_lr_ratio
    if optim.lr_scheduler_type == "linear":
        return optim.lr * (1 - (1 - low) * progress)
    return optim.lr * max(
        low, (1 + low) / 2 + (1 - low) / 2 * math.cos(2 * math.pi * optim.num_cycles * progress)
    )

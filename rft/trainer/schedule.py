"""Learning rate of every train step: a pure function, so a resumed run needs no scheduler state."""

from __future__ import annotations

import math

from rft.trainer.settings import OptimSettings


def warmup_steps(optim: OptimSettings, total_steps: int) -> int:
    """`lr_warmup_steps` if it is not negative, else that share of all steps, rounded down."""
    return optim.lr_warmup_steps if optim.lr_warmup_steps >= 0 else int(optim.lr_warmup_steps_ratio * total_steps)


def learning_rate(optim: OptimSettings, step: int, total_steps: int) -> float:
    """Rate of train step `step` (from 1).  Skipped steps count, so the rate depends on nothing but the step.

    With W warm-up steps and t = step - 1: lr (t + 1) / W for t < W; then lr (constant), or from lr down to
    min_lr_ratio lr along half a cosine that ends at `total_steps`.
    """
    t, warm = step - 1, warmup_steps(optim, total_steps)
    if t < warm:
        return optim.lr * (t + 1) / warm
    if optim.lr_scheduler_type == "constant":
        return optim.lr
    progress = min(1.0, (t - warm) / max(1, total_steps - warm))
    low = optim.min_lr_ratio
    return optim.lr * max(low, (1 + low) / 2 + (1 - low) / 2 * math.cos(math.pi * progress))

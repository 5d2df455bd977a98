"""Which parts an algorithm is made of, with the arguments of each.  Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class AlgorithmSettings:
    """Parts of the algorithm by name, each with its checked arguments."""

    algorithm_type: str = "grpo"
    advantage_fn: str = "grpo"
    advantage_fn_args: dict[str, Any] = field(default_factory=dict)
    policy_loss_fn: str = "ppo"
    policy_loss_fn_args: dict[str, Any] = field(default_factory=dict)
    kl_loss_fn: str = "none"
    kl_loss_fn_args: dict[str, Any] = field(default_factory=dict)
    entropy_loss_fn: str = "none"
    entropy_loss_fn_args: dict[str, Any] = field(default_factory=dict)
    sample_strategy: str = "default"
    sample_strategy_args: dict[str, Any] = field(default_factory=dict)
    loss_agg_mode: str = "token-mean"
    kl_penalty_fn: str = "none"
    kl_penalty_fn_args: dict[str, Any] = field(default_factory=dict)
    # old log-probs = the engine's; False: the trainer's own before the step, or
    bypass_old_logprobs: bool = True
    proximal_window: bool = False  # those of the weights that were published last
    rollout_correction: dict[str, Any] | None = None  # see rft.algorithm.correction.CorrectionArgs

"""Section `algorithm`: how rewards become gradients."""

from __future__ import annotations

from typing import Annotated, Literal

from rft.algorithm.catalog import ALGORITHMS
from rft.config.schema.base import Args, IgnoreCase, Section, key, renamed, section


class OptimizerConfig(Section):
    """AdamW and its learning-rate schedule."""

    lr: float = key(1e-6, "Peak learning rate.", on_resume="safe", gt=0)
    lr_warmup_steps: int = key(-1, "Steps of linear warm-up; negative: use lr_warmup_steps_ratio.", unit="train steps")
    lr_warmup_steps_ratio: float = key(0.0, "Warm-up as a share of all train steps.", ge=0, le=1)
    min_lr_ratio: float = key(0.01, "Floor of the cosine schedule as a share of lr.", ge=0, le=1)
    lr_scheduler_type: Annotated[Literal["constant", "cosine"], IgnoreCase] = key("constant", "Schedule after the warm-up.")
    optimizer_type: Annotated[Literal["adamw"], renamed(adam="adamw")] = key("adamw", "Optimizer; adam means AdamW.")
    betas: tuple[float, float] = key((0.9, 0.999), "Decay rates of AdamW's two moments, each in [0, 1).")
    eps: float = key(1e-8, "Added to AdamW's denominator.", gt=0)
    weight_decay: float = key(0.01, "Decoupled weight decay.", ge=0)
    clip_grad: float | None = key(None, "Same as trainer.grad_clip; different values are an error.", unit="gradient norm", gt=0)


class AlgorithmConfig(Section):
    """The algorithm by name, and its parts where they should differ from what the name implies."""

    algorithm_type: Annotated[str, IgnoreCase] = key(
        "grpo", f"Gives the parts below that are not written: {', '.join(ALGORITHMS)}."
    )
    repeat_times: int | None = key(
        None, "Runs of each task, the size of a group.  Null: what the algorithm recommends.", unit="runs", ge=1
    )
    optimizer: OptimizerConfig = section(OptimizerConfig, "Optimizer and learning-rate schedule.")
    advantage_fn: str | None = key(None, "How rewards become advantages.  Null: the algorithm's own.")
    advantage_fn_args: Args = key({}, "Single arguments of advantage_fn that differ from its defaults.")
    policy_loss_fn: str | None = key(None, "The policy loss.  Null: the algorithm's own.")
    policy_loss_fn_args: Args = key({}, "Single arguments of policy_loss_fn that differ from its defaults.")
    kl_loss_fn: str | None = key(
        None, "KL loss against the reference model; none = no reference model.  Null: the algorithm's own."
    )
    kl_loss_fn_args: Args = key({}, "Single arguments of kl_loss_fn that differ from its defaults.")
    kl_penalty_fn: Annotated[Literal["none"], IgnoreCase] = key("none", "KL inside the reward.")
    entropy_loss_fn: str | None = key(None, "Entropy bonus.  Null: the algorithm's own.")
    entropy_loss_fn_args: Args = key({}, "Single arguments of entropy_loss_fn that differ from its defaults.")
    loss_agg_mode: (
        Annotated[Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"], IgnoreCase]
        | None
    ) = key(None, "How token losses become one number.  Null: the algorithm's own.")
    bypass_old_logprobs: bool = key(
        True, "True: old log-probs are the engine's.  False: the trainer computes them again before the update."
    )

"""Section `algorithm`: how rewards become gradients."""

from __future__ import annotations

from typing import Annotated, Literal

from rft.algorithm.args import AggMode, Rejection
from rft.algorithm.settings import AlgorithmSettings
from rft.config.schema import units
from rft.config.schema.base import Args, IgnoreCase, Section, Told, key, renamed, safe_key, section
from rft.trainer.settings import OptimSettings

Schedule = Annotated[Literal["constant", "linear", "cosine", "wsd"], IgnoreCase]


class ScheduleConfig(Section):
    """AdamW and its learning-rate schedule."""

    lr_warmup_steps: int = key(
        OptimSettings.lr_warmup_steps,
        "Steps of linear warm-up; negative: use lr_warmup_steps_ratio.",
        unit="train steps",
    )
    lr_warmup_steps_ratio: float = key(
        OptimSettings.lr_warmup_steps_ratio, "Warm-up as a share of all train steps.", ge=0, le=1
    )
    lr_warmup_from_zero: bool = key(
        OptimSettings.lr_warmup_from_zero,
        "False: step t of W warm-up steps (t from 0) has the rate lr (t + 1) / W.  True: lr t / W, "
        "veRL's form, which begins at 0.",
    )
    min_lr_ratio: float = key(
        OptimSettings.min_lr_ratio,
        "Floor of the linear, cosine and wsd schedules as a share of lr.",
        ge=0,
        le=1,
    )
    num_cycles: units.Periods = key(
        OptimSettings.num_cycles,
        "Periods of the cosine from the warm-up to the end; 0.5: from lr down to the floor.",
    )
    lr_scheduler_type: Schedule = key(
        OptimSettings.lr_scheduler_type,
        "Schedule after the warm-up; linear: down to the floor at the end; wsd: nine tenths at lr, "
        "then a cosine down to the floor.",
    )
    warmup_style: Schedule | None = key(None, "Older name of lr_scheduler_type.")
    optimizer_type: Annotated[
        Literal["adamw", "nadam", "radam", "adagrad", "sgd"], renamed(adam="adamw")
    ] = key(
        OptimSettings.optimizer_type,
        "Optimizer of torch; adam means AdamW.  Weight decay is decoupled, except for adagrad and "
        "sgd.",
    )
    betas: tuple[float, float] = key(
        OptimSettings.betas,
        "Decay rates of the two moments of adamw, nadam and radam, each in [0, 1).",
    )
    eps: float = key(OptimSettings.eps, "Added to the denominator; sgd has none.", gt=0)
    momentum: float = key(OptimSettings.momentum, "Of sgd.", ge=0, lt=1)
    weight_decay: float = key(OptimSettings.weight_decay, "Weight decay.", ge=0)
    decay_norms_and_biases: bool = key(
        OptimSettings.decay_norms_and_biases,
        "False: parameters of one dimension have no weight decay.",
    )

    def rules(self, at: str, told: Told) -> None:
        if not all(0 <= b < 1 for b in self.betas):
            told.error(f"{at}.betas", "each must be in [0, 1)")
        idle = {"sgd": ("betas", "eps"), "adagrad": ("betas", "momentum")}.get(
            self.optimizer_type, ("momentum",)
        )
        self.idle(at, idle, f"optimizer_type is {self.optimizer_type}", told)
        shape = self.warmup_style or self.lr_scheduler_type
        # 0: no floor, which holds there, too
        floor = ("min_lr_ratio",) if shape == "constant" and self.min_lr_ratio else ()
        waves = ("num_cycles",) if shape in ("constant", "linear") else ()
        self.idle(at, floor + waves, f"lr_scheduler_type is {shape}", told)
        if self.lr_warmup_steps == 0 or (
            self.lr_warmup_steps < 0 and not self.lr_warmup_steps_ratio
        ):
            self.idle(at, ("lr_warmup_from_zero",), "there is no warm-up", told)
        if self.lr_warmup_steps >= 0 and self.lr_warmup_steps_ratio > 0:
            told.warn(
                f"{at}: lr_warmup_steps is written and wins; lr_warmup_steps_ratio has no effect"
            )
        if self.warmup_style is not None:
            told.warn(f"{at}.warmup_style is the older name of lr_scheduler_type")
            if self.lr_scheduler_type not in ("constant", self.warmup_style):
                text = (
                    f"is {self.warmup_style}, but lr_scheduler_type is "
                    f"{self.lr_scheduler_type}; remove warmup_style, the older name"
                )
                told.error(f"{at}.warmup_style", text)


class OptimizerConfig(ScheduleConfig):
    """AdamW and its learning-rate schedule."""

    lr: float = safe_key(OptimSettings.lr, "Peak learning rate.", gt=0)
    clip_grad: units.GradientNorm | None = key(
        None, "Same as trainer.grad_clip; different values are an error."
    )


class RolloutCorrectionConfig(Section):
    """Weights and rejection for tokens sampled by an older or less exact policy."""

    rollout_is: Annotated[Literal["none", "token", "sequence"], IgnoreCase] | None = key(
        None, "Importance weights of tokens or of whole sequences.  Null or none: no weights."
    )
    rollout_is_threshold: float = key(2.0, "Largest weight; larger ones are cut to it.", gt=0)
    rollout_is_batch_normalize: bool = key(False, "Divide weights by their mean.")
    rollout_rs: Annotated[Rejection, IgnoreCase] | None = key(
        None, "Statistic by which tokens or sequences are rejected.  Null or none: nothing is."
    )
    rollout_rs_threshold: float | str | None = key(
        None,
        "Largest value that is kept; for k1 the largest ratio of the engine's probability to the "
        'trainer\'s, or "lower_upper"; the lower '
        "bound is else 1 / the upper one.  Required with rollout_rs.",
    )
    bypass_mode: bool = key(
        False,
        "Take the engines' log-probs as the old ones (two policies); the clipped ratio is then not "
        "weighted again.",
    )
    loss_type: Annotated[Literal["ppo_clip", "reinforce"], IgnoreCase] = key(
        "ppo_clip",
        "Loss with bypass_mode; reinforce: -advantage x log-prob x weight, without a clipped "
        "ratio.",
    )

    def rules(self, at: str, told: Told) -> None:
        if self.rollout_is in (None, "none"):
            self.idle(
                at,
                ("rollout_is_threshold", "rollout_is_batch_normalize"),
                "no rollout_is is written",
                told,
            )


class AlgorithmConfig(Section):
    """The algorithm by name, and those of its parts that should differ from what the name implies."""

    implied = ("bypass_old_logprobs",)

    algorithm_type: Annotated[str, IgnoreCase] = key(
        AlgorithmSettings.algorithm_type,
        "Supplies the parts below that are not written; the pages on algorithms list all of them, "
        "`rft plugins` those that are installed.",
    )
    repeat_times: units.Runs | None = key(
        None, "Runs of each task, the size of a group.  Null: what the algorithm recommends."
    )
    optimizer: OptimizerConfig = section(OptimizerConfig, "Optimizer and learning-rate schedule.")
    sample_strategy: str | None = key(
        None,
        "Which experiences make a batch: default = what the buffer reads first; staleness_control "
        "= the same without experiences older "
        "than its max_staleness, which is synchronizer.max_staleness; pf_ppo = the same as "
        "default, its rows drawn anew by their "
        "reward.  Null: the algorithm's own.",
    )
    sample_strategy_args: Args = key(
        {}, "Single arguments of sample_strategy that differ from its defaults."
    )
    advantage_fn: str | None = key(
        None, "How rewards become advantages.  Null: the algorithm's own."
    )
    advantage_fn_args: Args = key(
        {}, "Single arguments of advantage_fn that differ from its defaults."
    )
    policy_loss_fn: str | None = key(None, "The policy loss.  Null: the algorithm's own.")
    policy_loss_fn_args: Args = key(
        {}, "Single arguments of policy_loss_fn that differ from its defaults."
    )
    kl_loss_fn: str | None = key(
        None,
        "KL loss against the reference model; none = no reference model.  Null: the algorithm's "
        "own.",
    )
    kl_loss_fn_args: Args = key({}, "Single arguments of kl_loss_fn that differ from its defaults.")
    kl_penalty_fn: str = key(
        AlgorithmSettings.kl_penalty_fn,
        "KL against the reference model, taken from the rewards of the tokens before the "
        "advantages; none: rewards as they are.",
    )
    kl_penalty_fn_args: Args = key(
        {}, "Single arguments of kl_penalty_fn that differ from its defaults."
    )
    entropy_loss_fn: str | None = key(None, "Entropy bonus.  Null: the algorithm's own.")
    entropy_loss_fn_args: Args = key(
        {}, "Single arguments of entropy_loss_fn that differ from its defaults."
    )
    loss_agg_mode: Annotated[AggMode, IgnoreCase] | None = key(
        None, "How token losses become one number.  Null: the algorithm's own."
    )
    bypass_old_logprobs: bool = key(
        AlgorithmSettings.bypass_old_logprobs,
        "True: old log-probs are the engine's.  False: the trainer computes them again before the "
        "update.",
    )
    loss_scale_factor: units.Tokens | None = key(
        None, "Divisor of seq-mean-token-sum-norm.  Null: max_response_tokens."
    )
    compute_prox_logprobs: bool = key(
        False,
        "Old log-probs are those of the weights that the engines got last (three policies): "
        "between two versions the ratio is taken "
        "against the window's first weights.  Costs a copy of the weights in host memory with "
        "sync_interval above 1.",
    )
    rollout_correction: RolloutCorrectionConfig | None = key(
        None,
        "Correction for rows that another policy has written.  With bypass_mode: false old "
        "log-probs are the trainer's own, computed "
        "before the step (three policies).",
    )

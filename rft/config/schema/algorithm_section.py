"""Section `algorithm`: how rewards become gradients."""

from __future__ import annotations

from typing import Annotated

from rft.algorithm.args import AggMode
from rft.algorithm.settings import AlgorithmSettings, CorrectionConfig
from rft.schema import units
from rft.schema.base import Args, IgnoreCase, Section, key, section
from rft.trainer.settings import OptimizerConfig


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
    rollout_correction: CorrectionConfig | None = key(
        None,
        "Correction for rows that another policy has written.  With bypass_mode: false old "
        "log-probs are the trainer's own, computed "
        "before the step (three policies).",
    )

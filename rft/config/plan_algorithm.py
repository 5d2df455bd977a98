"""The algorithm: its parts with their arguments, and which policies its loss compares.  Part of
`resolve`.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from rft.algorithm.args import AggMode, Args, NoArgs, declared
from rft.algorithm.base import AlgorithmDefaults
from rft.algorithm.catalog import (
    BUILT,
    KINDS,
    RENAMED,
    algorithm_defaults,
    algorithms,
    check_args,
    compares_in_groups,
    losses,
    part_args,
    shipped,
)
from rft.algorithm.settings import AlgorithmSettings, CorrectionConfig
from rft.config.context import Context, Problems
from rft.config.plan import Facts
from rft.config.schema.trainer_section import CriticConfig
from rft.errors import ConfigError, PluginError
from rft.plugins import REGISTRY
from rft.schema.base import belongs

REINFORCE = "reinforce"
_WITHOUT_KL = {  # advantages that a KL in the rewards does not reach
    **dict.fromkeys(("none", "on_policy_distill", "jsd"), "on an advantage that reads no rewards"),
    "gdpo": "on reward parts, which alone gdpo reads",
    "gigpo": "where rows have rewards of their steps, which gigpo takes from info",
    "step_wise_grpo": "on steps before the last of a run, whose reward alone is read",
}
WRITTEN_KL = "k2"


def algorithm(ctx: Context) -> tuple[AlgorithmSettings, int, bool]:
    """(settings, runs of a task, whether these are compared with each other)."""
    a = ctx.config.algorithm
    if (
        a.algorithm_type not in algorithms()
        and ":" not in a.algorithm_type
        and not ctx.facts.plugins_loaded
    ):
        for folder in ctx.plugin_dirs:  # its parts are needed to resolve anything else
            REGISTRY.scan_folder(Path(folder).expanduser())
    base = next(iter(algorithms().values()))
    with ctx.collect_errors():
        base = algorithm_defaults(a.algorithm_type)
    if base.name != a.algorithm_type and not ctx.errors:
        ctx.warn(f"algorithm.algorithm_type: {a.algorithm_type} is the older name of {base.name}")
    parts: dict[str, Any] = {}
    for kind in KINDS:
        written = getattr(a, kind)
        default = getattr(base, kind)
        written_args = getattr(a, f"{kind}_args")
        if (
            kind == "kl_loss_fn"
            and written is None
            and default == "none"
            and written_args.get("kl_coef")
        ):
            written = WRITTEN_KL  # Trinity-RFT's own where only the coefficient is written
            ctx.warn(
                f"algorithm.{kind}_args.kl_coef is written without {kind}, so {written} is taken; "
                f"name an estimator, or none"
            )
        part = RENAMED.get((kind, written or default), written or default)
        if written is None:
            ctx.derive(f"algorithm.{kind}", part, f"algorithm {base.name}")
        elif part != written:
            ctx.warn(f"algorithm.{kind}: {written} is another name of {part}")
        inherited = getattr(base, f"{kind}_args") if part == default else {}
        args = {**inherited, **_of_none(kind, part, written_args, ctx)}
        if ctx.can_check_plugin(kind, part):
            with ctx.collect_errors():
                check_args(kind, part, args)
        low, high = (args.get(f"clip_range_{side}") for side in ("low", "high"))
        if "clip_range" in written_args and None not in (low, high):
            ctx.warn(
                f"algorithm.{kind}_args.clip_range has no effect: clip_range_low is {low} and "
                f"clip_range_high {high}; write these"
            )
        _only_with(kind, part, written_args, args, ctx)
        if kind in BUILT or kind == "sample_strategy":
            parts[kind], parts[f"{kind}_args"] = part, args
    loss_agg_mode = _loss_agg_mode(a.loss_agg_mode, base, parts["policy_loss_fn"], ctx)
    if a.loss_scale_factor is not None and loss_agg_mode != "seq-mean-token-sum-norm":
        ctx.warn(
            f"algorithm.loss_scale_factor has no effect: loss_agg_mode is {loss_agg_mode}, not "
            f"seq-mean-token-sum-norm"
        )
    repeat_times = ctx.chosen(
        "algorithm.repeat_times", a.repeat_times, base.repeat_times, f"algorithm {base.name}"
    )
    settings = AlgorithmSettings(algorithm_type=base.name, loss_agg_mode=loss_agg_mode, **parts)
    settings = policies(ctx, settings)
    return settings, repeat_times, compares_in_groups(a.advantage_fn or base.advantage_fn)


def _of_none(kind: str, part: str, args: dict[str, Any], p: Problems) -> dict[str, Any]:
    """`args` without those that the part would have if it were not `none`."""
    models = [model for (k, _), model in shipped().items() if k == kind] if part == "none" else []
    idle = [name for name in args if any(name in model.model_fields for model in models)]
    for name in idle:
        p.warn(f"algorithm.{kind}_args.{name} has no effect: {kind} is none")
    return {name: value for name, value in args.items() if name not in idle}


# Argument of a part: another of its arguments, and with which of its values it counts.
_ONLY_WITH: dict[str, tuple[str, tuple[Any, ...]]] = {
    "target_kl": ("adaptive", (True,)),
    "horizon": ("adaptive", (True,)),
    **dict.fromkeys(("target_entropy", "delta", "min_coef", "max_coef"), ("adaptive", (True,))),
    "delta_sequence_masking": ("enable_sequence_masking", (True,)),
    "mask_clip_range_low": ("enable_mask_clip", (True,)),
    "mask_clip_range_high": ("enable_mask_clip", (True,)),
    "weight_pow": ("reweight_method", ("pow",)),
    "regularizer_coef": ("regularizer", ("k2", "forward-kl")),
    "temp": ("weight", ("advantage",)),
    "tau": ("opmd_baseline", ("logavgexp",)),
}


def _only_with(
    kind: str, part: str, written_args: dict[str, Any], args: dict[str, Any], p: Problems
) -> None:
    """Refuse written arguments of another choice; warn of those that a switch leaves unused."""
    fields = model.model_fields if (model := shipped().get((kind, part))) is not None else {}
    for name in written_args.keys() & _ONLY_WITH.keys():
        other, values = _ONLY_WITH[name]
        if other in fields and (value := args.get(other, fields[other].default)) not in values:
            key = f"algorithm.{kind}_args.{name}"
            if value in (False, "none"):
                p.warn(f"{key} has no effect: {other} is {str(value).lower()}")
            else:
                p.error(key, belongs(f"{other} {' or '.join(values)}", other, value))


def _loss_agg_mode(
    written: AggMode | None, base: AlgorithmDefaults, loss: str, p: Problems
) -> AggMode:
    """What is written, else what a loss is defined with that the algorithm does not imply, else the
    algorithm's.
    """
    model = losses().get(loss)
    if written is not None:
        if model is not None and model.fixed_agg:
            p.warn(
                f"algorithm.loss_agg_mode: {loss} is a mean over sequences or pairs; {written} "
                f"holds for KL and entropy terms only"
            )
        return written
    if model is None or model.agg_mode is None or loss == base.policy_loss_fn:
        mode = base.loss_agg_mode
        source = f"algorithm {base.name}"
    else:
        mode = model.agg_mode
        source = f"policy loss {loss}"
    p.derive("algorithm.loss_agg_mode", mode, source)
    return mode


def reads_baseline(algorithm: AlgorithmSettings) -> bool:
    """Whether the explorer has to play every task once more, greedily."""
    args = shipped().get(("advantage_fn", algorithm.advantage_fn))
    return args is not None and args.baseline


def teacher_top(algorithm: AlgorithmSettings) -> int:
    """How many of a teacher's most likely tokens the policy loss reads."""
    with suppress(ConfigError, PluginError):  # the check of its arguments reports it
        return declared(part_args(algorithm, "policy_loss_fn")).teacher_top
    return 0


def needs_whole_groups(algorithm: AlgorithmSettings, compares: bool) -> bool:
    """Whether a step must have all rows of a group.

    So it is where the advantage compares what only the rows themselves hold, and where a KL in the
    reward changes rewards that are compared (`compares`).
    """
    if algorithm.kl_penalty_fn != "none" and compares:
        return True
    try:
        return declared(part_args(algorithm, "advantage_fn")).whole_groups
    except ConfigError:
        return False  # told by `algorithm`


def takes_any_sampling(algorithm: AlgorithmSettings) -> bool:
    """Whether tokens may be drawn from a part of the distribution: the loss reads no log-probs of
    the sampler, or a correction rejects.
    """
    model = losses().get(algorithm.policy_loss_fn)
    correction = algorithm.rollout_correction
    rejects = correction is not None and bool(correction.rollout_rs)
    return rejects or (model is not None and model.samples == "none")


def advantage_inputs(algorithm: AlgorithmSettings, p: Problems) -> None:
    """What the advantage reads that a step may not have."""
    name = algorithm.advantage_fn
    if (model := shipped().get(("advantage_fn", name))) is None:
        return
    loss = shipped().get(("policy_loss_fn", algorithm.policy_loss_fn))
    if algorithm.sample_strategy == "pf_ppo" and loss is not None and loss.pairs:
        p.error(
            "algorithm.sample_strategy",
            f"draws single rows, but policy loss {algorithm.policy_loss_fn!r} compares pairs; "
            f"leave it out",
        )
    if algorithm.kl_penalty_fn != "none" and (reason := _WITHOUT_KL.get(name)):
        p.warn(f"algorithm.kl_penalty_fn has no effect {reason}; write kl_loss_fn instead")
    if reads := model.reads:
        p.note(
            f"algorithm.advantage_fn {name} reads {reads}; its workflow or an operator has to "
            f"declare that with `gives`"
        )


def policies(ctx: Context, settings: AlgorithmSettings) -> AlgorithmSettings:
    """`settings` with the old policy and the off-policy correction."""
    a = ctx.config.algorithm
    correction = a.rollout_correction
    written = "bypass_old_logprobs" in a.model_fields_set
    settings = replace(settings, bypass_old_logprobs=a.bypass_old_logprobs)
    three = a.compute_prox_logprobs or (correction is not None and not correction.bypass_mode)
    two = correction is not None and correction.bypass_mode
    source = (
        "algorithm.compute_prox_logprobs"
        if a.compute_prox_logprobs
        else "algorithm.rollout_correction"
    )
    if a.compute_prox_logprobs and two:
        ctx.error(
            "algorithm.compute_prox_logprobs",
            "takes old log-probs from the trainer, and rollout_correction.bypass_mode: true from "
            "the engines; write one of them",
        )
    elif written and ((three and a.bypass_old_logprobs) or (two and not a.bypass_old_logprobs)):
        ctx.error(
            "algorithm.bypass_old_logprobs",
            f"is {str(a.bypass_old_logprobs).lower()}, but "
            f"{source}{' with bypass_mode: true' if two else ''} means "
            f"{str(two).lower()}; leave it out",
        )
    elif (three or two) and a.bypass_old_logprobs != two:
        settings = replace(settings, bypass_old_logprobs=two)
        ctx.derive("algorithm.bypass_old_logprobs", two, source)
    s = ctx.config.synchronizer
    # whose windows are as long as they come
    if three and (s.sync_interval > 1 or s.sync_style == "explorer_driven"):
        settings = replace(settings, proximal_window=True)
    settings = settings if correction is None else _corrected(ctx, settings, correction)
    _of_the_loss(settings, ctx)
    return settings


def _of_the_loss(settings: AlgorithmSettings, p: Context) -> None:
    """What the policy loss can do with these policies."""
    if (model := losses().get(name := settings.policy_loss_fn)) is None:
        return
    if "old" in model.before and settings.proximal_window:
        p.error(
            "algorithm.policy_loss_fn",
            f"{name} chooses tokens under the weights before the step, but here old log-probs are "
            f"those of a window's first weights; "
            "write synchronizer.sync_interval: 1 with a sync_style other than explorer_driven, or "
            "another loss",
        )
    elif name == "m2po" and not settings.bypass_old_logprobs:
        p.warn(
            "algorithm.policy_loss_fn: m2po leaves no token out with old log-probs of the trainer: "
            "the ratio before the step is 1"
        )
    elif name == "kl_cov" and not settings.bypass_old_logprobs and p.config.trainer.ppo_epochs == 1:
        p.warn(
            "algorithm.policy_loss_fn: kl_cov holds nothing back with old log-probs of the trainer "
            "and ppo_epochs 1: they are those of the "
            "policy itself, and the slope of the penalty at 0 is the sign of a rounding error; "
            "write bypass_old_logprobs: true"
        )
    if settings.sample_strategy == "mix" and (model.samples == "all" or teacher_top(settings)):
        fit = ", ".join(n for n, m in losses().items() if m.samples == "own" and n != "distill_top")
        p.error(
            "algorithm.policy_loss_fn",
            f"{name} reads log-probs of the policy that sampled, or a teacher's, which the "
            f"expert's rows of "
            f"sample_strategy mix do not have; use {fit}",
        )
    # which reads them as well
    if model.samples == "none" and not settings.kl_loss_fn.startswith("corrected_k3"):
        p.config.algorithm.warn_unused(
            "algorithm", ("compute_prox_logprobs",), f"{name} reads no old log-probs", p
        )
    if model.samples == "none" and settings.rollout_correction is not None:
        p.error(
            "algorithm.rollout_correction",
            f"corrects for the policy that sampled, which {name} does not read; leave it out",
        )


def _corrected(
    ctx: Context, settings: AlgorithmSettings, correction: CorrectionConfig
) -> AlgorithmSettings:
    settings = replace(settings, rollout_correction=correction)
    if correction.loss_type != REINFORCE:
        return settings
    key = "algorithm.rollout_correction"
    if ctx.config.trainer.ppo_epochs > 1:
        ctx.error(
            f"{key}.loss_type",
            f"reinforce weighs rows by the policy before the step, which holds for one update; "
            f"trainer.ppo_epochs is "
            f"{ctx.config.trainer.ppo_epochs}: write 1, or ppo_clip",
        )
    if (loss := ctx.config.algorithm.policy_loss_fn) not in (None, REINFORCE):
        ctx.error(
            "algorithm.policy_loss_fn",
            f"is {loss}, but {key}.loss_type means reinforce; leave one of them out",
        )
    if settings.policy_loss_fn != REINFORCE:
        ctx.derive("algorithm.policy_loss_fn", REINFORCE, f"{key}.loss_type")
    return replace(settings, policy_loss_fn=REINFORCE, policy_loss_fn_args={})


def has_critic(settings: AlgorithmSettings, facts: Facts) -> bool | None:
    """None: of a plugin; it is judged where these are loaded."""
    model: type | None = shipped().get(("advantage_fn", settings.advantage_fn))
    if model is None and facts.plugins_loaded:
        with suppress(PluginError):  # told by `algorithm`
            model = REGISTRY.get("advantage_fn", settings.advantage_fn).args or NoArgs
    if model is None:
        return None
    return issubclass(model, Args) and "values" in model.before


def critic(ctx: Context, settings: AlgorithmSettings) -> None:
    """Keys of the critic, where there is none."""
    if has_critic(settings, ctx.facts) is not False:
        return
    t = ctx.config.trainer
    if t.critic_warmup:
        ctx.error(
            "trainer.critic_warmup",
            f"is {t.critic_warmup}, but advantage {settings.advantage_fn} has no critic; write 0",
        )
    if t.critic != CriticConfig() or ctx.config.model.critic_model_path is not None:
        ctx.note(
            f"trainer.critic and model.critic_model_path have no effect: advantage "
            f"{settings.advantage_fn} has no critic"
        )

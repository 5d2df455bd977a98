"""Arguments of the algorithm parts, checked without importing torch.

`ARGS` maps (kind, name) of every shipped part to the model its arguments are checked against; `check_args` is the one way in,
for the configuration and for the builder alike.  It knows no losses.  Invariant: what passes here is accepted by the part itself.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, BeforeValidator, Field, ValidationError, model_validator

from rft.algorithm.argbase import Args as Args
from rft.algorithm.argbase import NoArgs as NoArgs
from rft.algorithm.argbase import waiting
from rft.algorithm.coming import COMING
from rft.errors import ConfigError, ConfigErrors
from rft.plugins import REGISTRY

AggMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
AGG_MODES: tuple[str, ...] = get_args(AggMode)
BUILT = {"advantage_fn": "advantage", "policy_loss_fn": "policy loss", "kl_loss_fn": "KL loss", "entropy_loss_fn": "entropy loss"}
KINDS = {**BUILT, "kl_penalty_fn": "KL penalty", "sample_strategy": "sample strategy"}


class GrpoArgs(Args):
    """Group-relative advantage (arXiv:2402.03300); `norm_by_std: false` is Dr. GRPO (arXiv:2503.20783)."""

    epsilon: float = Field(1e-6, gt=0, description="added to the group's standard deviation before dividing")
    norm_by_std: bool = Field(True, description="divide by the group's unbiased standard deviation")
    std_threshold: float | None = Field(
        None, ge=0, description="drop groups whose standard deviation is not above this, as the operator reward_std_filter does"
    )
    duplicate_experiences: bool = waiting(
        False, "rows are never copied", description="use remaining groups again in place of the dropped ones"
    )
    rank_penalty: float | None = waiting(
        None, "rewards are used as they are", ge=0, description="lower the rewards of likely answers by their rank in the group"
    )
    std_cal_level: Literal["group", "batch"] = waiting(
        "group",
        "the standard deviation is the group's",
        values=("batch",),
        description="which rewards the standard deviation is taken over",
    )


class PpoArgs(Args):
    """Clipped importance ratio (arXiv:1707.06347) with dual clip (arXiv:1912.09729) and separate bounds (arXiv:2503.14476)."""

    clip_range: float = Field(0.2, ge=0, description="both clip bounds, where the two below are null")
    clip_range_low: float | None = Field(None, ge=0, le=1, description="the ratio is clipped at 1 - clip_range_low")
    clip_range_high: float | None = Field(None, ge=0, description="the ratio is clipped at 1 + clip_range_high")
    clip_ratio_c: float = Field(3.0, gt=1, description="dual clip: a token with negative advantage A costs at most -A times this")
    enable_sequence_masking: bool = waiting(
        False, "no sequence is left out", description="leave out bad answers that the policy has moved far away from"
    )
    delta_sequence_masking: float = waiting(
        0.1,
        "it belongs to enable_sequence_masking",
        harmless=True,
        ge=0,
        description="how far: mean of old less new log-prob of the sequence",
    )
    fallback_to_policy_gradient: bool = waiting(
        False,
        "the ratio is taken against the old policy",
        description="-A log-prob instead: the ratio is 1 and nothing is clipped",
    )

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        if self.low > 1:
            raise ValueError(f"clip_range {self.clip_range} as the lower bound must be at most 1; set clip_range_low")
        return self

    @property
    def low(self) -> float:
        return self.clip_range if self.clip_range_low is None else self.clip_range_low

    @property
    def high(self) -> float:
        return self.clip_range if self.clip_range_high is None else self.clip_range_high


class KlArgs(Args):
    """Weight of a KL loss against the reference model."""

    kl_coef: float = Field(0.001, ge=0, description="factor of the KL loss; 0 switches it and the reference model off")
    adaptive: bool = waiting(False, "kl_coef is constant", description="steer kl_coef so that the KL comes near target_kl")
    target_kl: float = waiting(
        0.1, "it belongs to adaptive", harmless=True, gt=0, description="the KL that is steered for, in nats per token"
    )
    horizon: int = waiting(
        10000,
        "it belongs to adaptive",
        harmless=True,
        gt=0,
        description="experiences after which kl_coef follows an error wholly",
    )


class EntropyArgs(Args):
    """Weight of the entropy bonus."""

    entropy_coef: float = Field(
        0.0, ge=0, description="factor of the entropy bonus; 0 switches it off and no entropy is computed"
    )


class StalenessControlArgs(Args):
    """Rows whose weights are too old are left out; the bound is synchronizer.max_staleness."""

    max_staleness: Annotated[int | None, BeforeValidator(lambda x: None if x == math.inf else x)] = Field(
        None, ge=0, description="train steps by which a row may be behind; null or infinity: no bound"
    )


KL_ESTIMATORS = ("k1", "abs", "k2", "k3", "low_var_kl")
ARGS: dict[tuple[str, str], type[BaseModel]] = {
    ("advantage_fn", "grpo"): GrpoArgs,
    ("policy_loss_fn", "ppo"): PpoArgs,
    ("kl_loss_fn", "none"): NoArgs,
    **{("kl_loss_fn", name + plus): KlArgs for name in KL_ESTIMATORS for plus in ("", "+")},
    ("entropy_loss_fn", "none"): NoArgs,
    ("entropy_loss_fn", "default"): EntropyArgs,
    ("kl_penalty_fn", "none"): NoArgs,
    ("sample_strategy", "default"): NoArgs,
    ("sample_strategy", "staleness_control"): StalenessControlArgs,
}
RENAMED: dict[tuple[str, str], str] = {  # older names that people bring along
    ("advantage_fn", "grpo_verl"): "grpo",
    ("advantage_fn", "opmd_verl"): "opmd",
    ("advantage_fn", "asymre_verl"): "asymre",
    ("advantage_fn", "gae"): "ppo",
    ("advantage_fn", "reinforce_plus_plus"): "reinforceplusplus",
    ("advantage_fn", "reinforce_plus_plus_baseline"): "reinforceplusplus_baseline",
    ("policy_loss_fn", "vanilla"): "ppo",
    ("kl_loss_fn", "kl"): "k1",
    ("kl_loss_fn", "mse"): "k2",
    ("sample_strategy", "warmup"): "default",
}

_REFUSED: dict[tuple[str, str], str] = {
    ("kl_loss_fn", "full"): "it needs both models' logits over the whole vocabulary at once; use low_var_kl, k2 or k3",
}
_KEY_HINTS: dict[tuple[str, str], str] = {
    ("policy_loss_fn", "loss_agg_mode"): "set algorithm.loss_agg_mode, which holds for all losses",
    **dict.fromkeys(
        [
            ("policy_loss_fn", name)
            for name in (
                *("use_dynamic_bsz", "ppo_mini_batch_size", "ppo_micro_batch_size_per_gpu", "ngpus_trainer"),
                *("train_batch_size_usual", "train_batch_size_expert", "sft_loss_agg_mode", "grpo_loss_agg_mode"),
            )
        ],
        "rows are counted by themselves; leave it out",
    ),
    ("kl_loss_fn", "kl_coef"): "name an estimator in kl_loss_fn, such as k2, to switch the KL loss on",
    ("kl_penalty_fn", "kl_coef"): "name an estimator in kl_penalty_fn, such as k1, to put the KL into the reward",
    ("entropy_loss_fn", "entropy_coef"): "set entropy_loss_fn: default to switch the bonus on",
}


def check_args(kind: str, name: str, given: Mapping[str, Any], *, key: str = "") -> BaseModel:
    """The checked arguments of part `name` of `kind` ("advantage_fn", ...).

    `name` is a shipped name, a registered plugin's, `pkg.module:Name` or `path/file.py:Name`.  `key` is the configuration key of
    the name, e.g. "algorithm.policy_loss_fn"; its arguments stand under the same key with `_args`.  Raises ConfigError for an
    unknown name, ConfigErrors with one entry per wrong argument.
    """
    key = key or f"algorithm.{kind}"
    return validate(part_model(kind, name, key=key), given, what=f'{KINDS[kind]} "{name}"', key=f"{key}_args", kind=kind)


def accept_args(kind: str, name: str, given: Mapping[str, Any]) -> BaseModel:
    """`check_args`, which also accepts parts that are not there yet."""
    if (model := COMING.get((kind, name))) is None:
        return check_args(kind, name, given)
    return validate(model, given, what=f'{KINDS[kind]} "{name}"', key=f"algorithm.{kind}_args", kind=kind)


def part_model(kind: str, name: str, *, key: str) -> type[BaseModel]:
    """The model that arguments of this part are checked against; raises ConfigError for a name that is not available.

    Parts of `COMING` are not: whoever only checks a configuration looks there first, as `accept_args` does.
    """
    if (model := ARGS.get((kind, name))) is not None:
        return model
    if ":" in name or name in REGISTRY.names(kind):
        args = REGISTRY.get(kind, name).args
        if args is None:
            return NoArgs
        if not issubclass(args, BaseModel):
            raise ConfigError(f"Args of {KINDS[kind]} {name!r} is {args.__name__}, not a pydantic model", key=key, given=name)
        return args
    if reason := _REFUSED.get((kind, name)):
        raise ConfigError(f"{name!r} is not offered: {reason}", key=key, given=name)
    known = sorted({n for k, n in ARGS if k == kind} | set(REGISTRY.names(kind)))
    if (kind, name) in COMING:
        raise ConfigError(f"{KINDS[kind]} {name!r} comes later.  Available: {', '.join(known)}.", key=key, given=name)
    later = sorted(n for k, n in COMING if k == kind)
    told = f"  Later: {', '.join(later)}." if later else ""
    near = _near(name, [*known, *later])
    raise ConfigError(f"unknown {KINDS[kind]} {name!r}.  Known: {', '.join(known)}.{told}{near}", key=key, given=name)


def validate(model: type[BaseModel], given: Mapping[str, Any], *, what: str, key: str, kind: str = "") -> BaseModel:
    """`given` as a `model`; raises ConfigErrors that name each offending key and the nearest known one."""
    try:
        return model.model_validate(dict(given))
    except ValidationError as e:
        raise ConfigErrors([_error(model, error, what, key, kind) for error in e.errors(include_url=False)]) from None


def _error(model: type[BaseModel], error: Any, what: str, key: str, kind: str) -> ConfigError:
    path = ".".join(str(p) for p in error["loc"])
    full = f"{key}.{path}" if path else key
    given = error["input"]
    if error["type"] == "extra_forbidden":
        known = list(model.model_fields)
        listed = f"Known: {', '.join(known)}." if known else "It takes no arguments."
        hint = _KEY_HINTS.get((kind, path))
        tail = f"  {path}: {hint}." if hint else _near(path, known)
        return ConfigError(f"unknown key for {what}.  {listed}{tail}", key=full, given=given)
    field = model.model_fields.get(path)
    meaning = f"  ({field.description})" if field is not None and field.description else ""
    text = error["msg"].removeprefix("Value error, ")
    shown = f"{given!r}: " if path else ""
    return ConfigError(f"{shown}{text[0].lower()}{text[1:]}{meaning}", key=full, given=given)


def _near(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"  Did you mean {near[0]}?" if near else ""

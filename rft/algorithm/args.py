"""Arguments of the algorithm parts, checked without importing torch.

`ARGS` maps (kind, name) of every shipped part to the model its arguments are checked against; `check_args` is the one way in,
for the configuration and for the builder alike.  It knows no losses.  Invariant: what passes here is accepted by the part itself.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, get_args

from pydantic import BaseModel, BeforeValidator, Field, ValidationError

from rft.algorithm.advantage_args import ADVANTAGES, SAMPLES
from rft.algorithm.advantage_args import GrpoArgs as GrpoArgs
from rft.algorithm.argbase import AggMode as AggMode
from rft.algorithm.argbase import Args as Args
from rft.algorithm.argbase import NoArgs as NoArgs
from rft.algorithm.loss_args import LOSSES
from rft.algorithm.loss_args import PpoArgs as PpoArgs
from rft.errors import ConfigError, ConfigErrors
from rft.plugins import REGISTRY

AGG_MODES: tuple[str, ...] = get_args(AggMode)
BUILT = {
    "advantage_fn": "advantage",
    "policy_loss_fn": "policy loss",
    "kl_loss_fn": "KL loss",
    "kl_penalty_fn": "KL penalty",
    "entropy_loss_fn": "entropy loss",
}
KINDS = {**BUILT, "sample_strategy": "sample strategy"}


class KlArgs(Args):
    """Weight of a KL against the reference model, as a loss or in the reward; constant or steered (arXiv:1909.08593)."""

    kl_coef: float = Field(
        0.001, ge=0, description="factor of the KL, the first one where it is adaptive; 0 switches the KL and its model off"
    )
    adaptive: bool = Field(False, description="steer kl_coef so that the KL comes near target_kl")
    target_kl: float = Field(0.1, gt=0, description="the KL that is steered for, in nats per token")
    horizon: int = Field(10000, gt=0, description="experiences after which kl_coef follows an error wholly")


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
KL_NAMES = (*KL_ESTIMATORS, "corrected_k3")
ARGS: dict[tuple[str, str], type[BaseModel]] = {
    **{("advantage_fn", name): model for name, model in ADVANTAGES.items()},
    **{("policy_loss_fn", name): model for name, model in LOSSES.items()},
    ("kl_loss_fn", "none"): NoArgs,
    **{("kl_loss_fn", name + plus): KlArgs for name in KL_NAMES for plus in ("", "+")},
    ("entropy_loss_fn", "none"): NoArgs,
    ("entropy_loss_fn", "default"): EntropyArgs,
    ("entropy_loss_fn", "mix"): EntropyArgs,
    ("kl_penalty_fn", "none"): NoArgs,
    **{("kl_penalty_fn", name): KlArgs for name in KL_NAMES},
    **{("sample_strategy", name): model for name, model in SAMPLES.items()},
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
    ("kl_penalty_fn", "kl"): "k1",
    ("kl_penalty_fn", "mse"): "k2",
    ("sample_strategy", "warmup"): "default",
}

_REFUSED: dict[tuple[str, str], str] = {
    ("kl_loss_fn", "full"): "it needs both models' logits over the whole vocabulary at once; use low_var_kl, k2 or k3",
    ("kl_penalty_fn", "full"): "it needs both models' logits over the whole vocabulary at once; use k1 or low_var_kl",
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


def part_model(kind: str, name: str, *, key: str) -> type[BaseModel]:
    """The model that arguments of this part are checked against; raises ConfigError for a name that is not available."""
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
    raise ConfigError(f"unknown {KINDS[kind]} {name!r}.  Known: {', '.join(known)}.{_near(name, known)}", key=key, given=name)


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

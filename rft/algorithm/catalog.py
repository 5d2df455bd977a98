"""Algorithms and their parts by name, and the check of a part's arguments.  Imports no torch.

A part is registered by its decorator and an algorithm by `define_algorithm(...)`, each in its own
file of this folder.  `check_args` is the one way in, for the configuration and for the builder
alike.  Invariant: what passes here is accepted by the part itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from rft.algorithm.args import Args, NoArgs
from rft.algorithm.base import AlgorithmDefaults
from rft.algorithm.settings import AlgorithmSettings
from rft.errors import ConfigError, ConfigErrors, nearest
from rft.plugins import REGISTRY, Plugin

BUILT = {
    "advantage_fn": "advantage",
    "policy_loss_fn": "policy loss",
    "kl_loss_fn": "KL loss",
    "kl_penalty_fn": "KL penalty",
    "entropy_loss_fn": "entropy loss",
}
KINDS = {**BUILT, "sample_strategy": "sample strategy"}
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

RENAMED_ALGORITHMS = {"grpo_verl": "grpo"}

_REFUSED: dict[tuple[str, str], str] = {
    (
        "kl_loss_fn",
        "full",
    ): "it needs both models' logits over the whole vocabulary at once; use low_var_kl, k2 or k3",
    (
        "kl_penalty_fn",
        "full",
    ): "it needs both models' logits over the whole vocabulary at once; use k1 or low_var_kl",
}


def _ours(kind: str) -> list[Plugin]:
    """The plugins of `kind` that this folder defines."""
    REGISTRY.scan_package("rft.algorithm")
    here = Path(__file__).parent
    return [p for p in REGISTRY.all(kind) if Path(p.source).parent == here]


@cache
def shipped() -> dict[tuple[str, str], type[Args]]:
    """The argument model of every shipped part, by (kind, name)."""
    return {(kind, p.name): p.args or NoArgs for kind in KINDS for p in _ours(kind)}


def losses() -> dict[str, type[Args]]:
    """Those of the shipped policy losses."""
    return {name: model for (kind, name), model in shipped().items() if kind == "policy_loss_fn"}


@cache
def algorithms() -> dict[str, AlgorithmDefaults]:
    """The shipped algorithms by name."""
    return {p.name: p.obj for p in _ours("algorithm")}


def algorithm_defaults(name: str) -> AlgorithmDefaults:
    """The parts of algorithm `name`, a shipped one or a plugin; raises ConfigError that lists what
    there is.
    """
    name = RENAMED_ALGORITHMS.get(name, name)
    key = "algorithm.algorithm_type"
    if (entry := algorithms().get(name)) is not None:
        return entry
    names = sorted({*algorithms(), *REGISTRY.names("algorithm")})
    if ":" not in name and name not in names:
        text = f"unknown algorithm {name!r}.{nearest(name, names)}  Available: {', '.join(names)}."
        raise ConfigError(text, key=key, given=name)
    algorithm = REGISTRY.get("algorithm", name).obj
    if not isinstance(algorithm, AlgorithmDefaults):
        raise ConfigError(
            f"is {type(algorithm).__name__}; write NAME = define_algorithm(...) in that file",
            key=key,
            given=name,
        )
    return algorithm


def compares_in_groups(advantage_fn: str) -> bool:
    """Whether a run's advantage comes from the other runs of its task, so that a group of one has
    none.
    """
    model = shipped().get(("advantage_fn", advantage_fn))
    return model is None or model.in_groups


def check_args(kind: str, name: str, args: Mapping[str, Any]) -> BaseModel:
    """The checked arguments of part `name` of `kind` ("advantage_fn", ...).

    `name` is a shipped name, a registered plugin's, `pkg.module:Name` or `path/file.py:Name`.
    Raises ConfigError for an unknown name, ConfigErrors with one entry per wrong argument; both
    name keys of section `algorithm`.
    """
    key = f"algorithm.{kind}"
    return validate(
        part_model(kind, name, key=key), args, what=f'{KINDS[kind]} "{name}"', key=f"{key}_args"
    )


def part_args(settings: AlgorithmSettings, kind: str) -> BaseModel:
    """The checked arguments of the part of `kind` that `settings` name; raises as `check_args`."""
    return check_args(kind, getattr(settings, kind), getattr(settings, f"{kind}_args"))


def part_model(kind: str, name: str, *, key: str) -> type[BaseModel]:
    """The model that arguments of this part are checked against; raises ConfigError for a name that
    is not available.
    """
    if (model := shipped().get((kind, name))) is not None:
        return model
    if ":" in name or name in REGISTRY.names(kind):
        plugin = REGISTRY.get(kind, name)
        args = plugin.args
        if inspect.iscoroutinefunction(plugin.obj):
            raise ConfigError(f"{name!r} is async; write def", key=key)
        if args is None:
            return NoArgs
        if not issubclass(args, BaseModel):
            raise ConfigError(
                f"Args of {KINDS[kind]} {name!r} is {args.__name__}, not a pydantic model",
                key=key,
                given=name,
            )
        return args
    if reason := _REFUSED.get((kind, name)):
        raise ConfigError(f"{name!r} is not offered: {reason}", key=key, given=name)
    names = REGISTRY.names(kind)
    raise ConfigError(
        f"unknown {KINDS[kind]} {name!r}.{nearest(name, names)}  Known: {', '.join(names)}.",
        key=key,
        given=name,
    )


def validate(model: type[BaseModel], args: Mapping[str, Any], *, what: str, key: str) -> BaseModel:
    """Return `args` as a `model`; raises ConfigErrors that name each offending key and the nearest known
    one.
    """
    try:
        return model.model_validate(dict(args))
    except ValidationError as e:
        raise ConfigErrors(
            [_error(model, error, what, key) for error in e.errors(include_url=False)]
        ) from None


def _error(model: type[BaseModel], error: Any, what: str, key: str) -> ConfigError:
    path = ".".join(str(p) for p in error["loc"])
    full = f"{key}.{path}" if path else key
    value = error["input"]
    if error["type"] == "extra_forbidden":
        names = list(model.model_fields)
        listed = f"Known: {', '.join(names)}." if names else "It takes no arguments."
        return ConfigError(
            f"unknown key for {what}.  {listed}{nearest(path, names)}", key=full, given=value
        )
    field = model.model_fields.get(path)
    meaning = f"  ({field.description})" if field is not None and field.description else ""
    text = error["msg"].removeprefix("Value error, ")
    shown = f"{value!r}: " if path else ""
    return ConfigError(f"{shown}{text[0].lower()}{text[1:]}{meaning}", key=full, given=value)

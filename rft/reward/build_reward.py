"""Build a `Reward` from its name and arguments; functions and other classes are wrapped only here."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from rft.errors import ConfigError
from rft.plugins import (
    REGISTRY,
    Plugin,
    check_call,
    checked_args,
    derived,
    extra_entries,
    hooks,
    load_entry,
    refused_names,
)
from rft.reward.base import FunctionReward, Reward
from rft.reward.overlong_penalty import OverlongArgs, Shaped
from rft.worker.threads import blamed, contained

SharedArgs = TypeVar("SharedArgs", bound=BaseModel)


def build(name: str, args: Mapping[str, Any], *, key: str = "") -> Reward:
    """Return the reward `name`, or the reward that an extra provides for the data source `name`.

    A class is constructed with `args`, a function gets them as keyword arguments.  Every reward
    accepts the arguments of the overlong penalty.  Raises PluginError for an unknown name and
    ConfigError (under `key`) for invalid arguments.
    """
    if ":" not in name and name not in REGISTRY.names("reward"):
        name, args = alias(name, args) or (name, args)
    if name not in REGISTRY.names("reward") and (reason := refused_names("reward").get(name)):
        raise ConfigError(f"reward {name!r}: {reason}", key=key, given=name)
    return from_plugin(REGISTRY.get("reward", name), args, key=key)


def alias(name: str, args: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]] | None:
    """Return the name and arguments of the reward that an extra maps `name` to, or None."""
    for entry in extra_entries("reward_alias").values():
        translated: tuple[str, Mapping[str, Any]] | None = load_entry(entry)(name, args)
        if translated is not None:
            return translated
    return None


def from_plugin(plugin: Plugin, args: Mapping[str, Any], *, key: str = "") -> Reward:
    """Build the reward of a plugin; arguments and errors as in `build`."""
    args, penalty = split_args(plugin, args, OverlongArgs, "overlong penalty", key=key)
    reward: Reward | None = None
    for entry in extra_entries("reward_form").values():
        reward, args = load_entry(entry)(plugin, args, key=key)
        if reward is not None:
            break
    if reward is None:
        make = _from_class if inspect.isclass(plugin.obj) else _from_function
        reward = make(plugin, args, key=key)
    return Shaped(reward, penalty) if penalty.enable_overlong_penalty else reward


def split_args(
    plugin: Plugin,
    args: Mapping[str, Any],
    shared_model: type[SharedArgs],
    what: str,
    *,
    key: str,
) -> tuple[dict[str, Any], SharedArgs]:
    """Split arguments into those of the reward and those that every reward accepts.

    A reward with a parameter of the same name gets the argument itself.
    """
    reserved = shared_model.model_fields.keys() - argument_names(plugin)
    try:
        shared = shared_model(**{n: v for n, v in args.items() if n in reserved})
    except ValidationError as e:
        faults = [
            f"{'.'.join(map(str, f['loc']))}: {f['msg']}, given {f['input']!r}" for f in e.errors()
        ]
        raise ConfigError(f"arguments of the {what}: {'; '.join(faults)}", key=key) from None
    return {n: v for n, v in args.items() if n not in reserved}, shared


def argument_names(plugin: Plugin) -> set[str]:
    """Return the names of the arguments that a reward declares."""
    if plugin.args is not None:
        return set(plugin.args.model_fields)  # type: ignore[attr-defined]
    return set(inspect.signature(plugin.obj).parameters) if callable(plugin.obj) else set()


def _from_class(plugin: Plugin, args: Mapping[str, Any], *, key: str) -> Reward:
    cls = derived(plugin.obj, Reward)
    if cls.__call__ is Reward.__call__:
        raise _not_callable(plugin.name, key)
    keywords = checked_args(plugin, args, key=key)
    check_call(plugin, keywords, key=key)
    what = f"reward {plugin.name!r}"
    with blamed(f"{what} cannot be made", key or "reward_fn_args"), contained(what):
        return cls(**keywords)


def _from_function(plugin: Plugin, args: Mapping[str, Any], *, key: str) -> Reward:
    """Wrap a function or another callable; attributes such as `whole_group` are copied."""
    if not callable(plugin.obj):
        raise _not_callable(plugin.name, key)
    keywords = checked_args(plugin, args, key=key)
    task = transcript = None
    check_call(plugin, keywords, task, transcript, key=key)
    reward = FunctionReward(partial(plugin.obj, **keywords))
    vars(reward).update(hooks(plugin.obj, Reward))
    return reward


def _not_callable(name: str, key: str) -> ConfigError:
    return ConfigError(
        f"reward {name!r} cannot be called; write a function or a class with __call__(task, "
        f"transcript)",
        key=key,
    )

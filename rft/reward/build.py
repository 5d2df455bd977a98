"""From a reward's name and arguments to something that can be called.  Knows no particular reward."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any, cast

from rft.errors import ConfigError
from rft.plugins import REGISTRY, Plugin, checked_args
from rft.reward import functions, known, lists, manager, overlong, sources
from rft.reward.base import Reward

_BESIDE_CALL = ("whole_group", "prepare", "close", "asks", "gold_answer")  # what a reward may have, see `rft.reward.base`


def build(name: str, args: Mapping[str, Any], *, key: str = "") -> Reward:
    """The reward called `name`, or the one of the data source `name`.

    A class is constructed with `args`, a function gets them as keyword arguments.  Those of the overlong penalty and of the reward
    manager are taken by every reward.  Raises PluginError for an unknown name and ConfigError (under `key`) for arguments it does not take.
    """
    if ":" not in name and name not in REGISTRY.names("reward") and (ours := sources.reward_of(name)) is not None:
        name = ours
        takes = _own(REGISTRY.get("reward", ours))
        args = {n: v for n, v in args.items() if n not in sources.SANDBOX_ARGS or n in takes}
    if (why := known.advice(name)) and name not in REGISTRY.names("reward"):
        raise ConfigError(f"reward {name!r}: {why}", key=key, given=name)
    return of(REGISTRY.get("reward", name), args, key=key)


def of(plugin: Plugin, args: Mapping[str, Any], *, key: str = "") -> Reward:
    """The same for a reward that is there already."""
    name = plugin.name
    own, penalty = overlong.split(args, _own(plugin), key=key)
    own, calls = manager.split(own, _own(plugin), key=key)
    made: Any
    if functions.is_compute_score(plugin.obj):
        made = functions.adapt(plugin.obj, own, calls, name=name, key=key)
    elif lists.is_batch(plugin.obj) or lists.is_trl(plugin.obj):
        if lists.is_batch(plugin.obj):
            manager.fits(calls, lists=True, name=name, key=key)
        made = lists.ListReward(plugin.obj, own, calls, name=name, key=key)
    elif inspect.isclass(plugin.obj):
        made = plugin.obj(**checked_args(plugin, own, key=key))
    else:
        made = partial(plugin.obj, **checked_args(plugin, own, key=key))
        vars(made).update({name: getattr(plugin.obj, name) for name in _BESIDE_CALL if hasattr(plugin.obj, name)})
    if not callable(made):
        raise ConfigError(
            f"reward {name!r} cannot be called; write a function or a class with __call__(task, transcript)", key=key
        )
    return overlong.shaped(made, penalty) if penalty is not None else cast(Reward, made)


def _own(plugin: Plugin) -> set[str]:
    """Names of the arguments that the reward itself knows."""
    if plugin.args is not None:
        return set(plugin.args.model_fields)  # type: ignore[attr-defined]
    return set(inspect.signature(plugin.obj).parameters) if callable(plugin.obj) else set()

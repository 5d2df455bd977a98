"""From a reward's name and arguments to something that can be called.  Knows no particular reward."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any, cast

from rft.errors import ConfigError
from rft.plugins import REGISTRY, checked_args
from rft.reward.base import Reward


def build(name: str, args: Mapping[str, Any], *, key: str = "") -> Reward:
    """The reward called `name`: a class is constructed with `args`, a function gets them as keyword arguments.

    Raises PluginError for an unknown name and ConfigError (under `key`) for arguments it does not take.
    """
    plugin = REGISTRY.get("reward", name)
    keywords = checked_args(plugin, args, key=key)
    made: Any
    if inspect.isclass(plugin.obj):
        made = plugin.obj(**keywords)
    else:
        made = partial(plugin.obj, **keywords)
    if not callable(made):
        raise ConfigError(
            f"reward {name!r} cannot be called; write a function or a class with __call__(task, transcript)", key=key
        )
    return cast(Reward, made)

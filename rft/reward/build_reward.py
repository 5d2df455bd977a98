"""From a reward's name and arguments to a `Reward`.  Functions and classes without that base are
wrapped here, and nowhere else.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from rft.errors import ConfigError
from rft.plugins import REGISTRY, Plugin, check_call, checked_args, derived, hooks
from rft.reward import data_sources, functions, lists, manager, overlong_penalty
from rft.reward.base import FunctionReward, Reward
from rft.worker.threads import blamed, contained

_Shared = TypeVar("_Shared", bound=BaseModel)
INSTEAD: dict[str, str] = {
    **dict.fromkeys(
        (
            "openjudge_reward",
            "trajectory_accuracy_grader_reward",
            "openjudge_trajectory_accuracy_reward",
            "openjudge_multi_grader_reward",
            "rm_gallery_reward",
        ),
        "OpenJudge's graders are not offered: use rubric_judge or reference_judge, with a model in "
        "explorer.auxiliary_models",
    ),
    "rlcr": "calibration is scored by rlcr_reward",
}
"""Rewards that are known by name elsewhere and not offered: what to use.  None of these names is
registered.
"""


def build(name: str, args: Mapping[str, Any], *, key: str = "") -> Reward:
    """The reward called `name`, or the one of the data source `name`.

    A class is constructed with `args`, a function gets them as keyword arguments.  Those of the
    overlong penalty and of the reward manager are taken by every reward.  Raises PluginError for an
    unknown name and ConfigError (under `key`) for arguments it does not take.
    """
    if (
        ":" not in name
        and name not in REGISTRY.names("reward")
        and (ours := data_sources.reward_of(name)) is not None
    ):
        name = ours
        takes = _own(REGISTRY.get("reward", ours))
        args = {n: v for n, v in args.items() if n not in data_sources.SANDBOX_ARGS or n in takes}
    if (why := INSTEAD.get(name)) and name not in REGISTRY.names("reward"):
        raise ConfigError(f"reward {name!r}: {why}", key=key, given=name)
    return of(REGISTRY.get("reward", name), args, key=key)


def of(plugin: Plugin, args: Mapping[str, Any], *, key: str = "") -> Reward:
    """The same for a plugin that was found before."""
    name = plugin.name
    own, penalty = _split(
        args, overlong_penalty.OverlongArgs, "overlong penalty", _own(plugin), key=key
    )
    own, calls = _split(own, manager.ManagerArgs, "reward manager", _own(plugin), key=key)
    made: Reward
    if functions.is_compute_score(plugin.obj):
        made = functions.adapt(plugin.obj, own, calls, name=name, key=key)
    elif lists.is_batch(plugin.obj) or lists.is_trl(plugin.obj):
        if lists.is_batch(plugin.obj):
            manager.fits(calls, lists=True, name=name, key=key)
        made = lists.ListReward(plugin.obj, own, calls, name=name, key=key)
    elif calls.reward_timeout_s is not None:
        text = (
            f"reward_timeout_s is for functions of veRL's and TRL's form; reward {name!r} has "
            f"until explorer.max_timeout"
        )
        raise ConfigError(text, key=key, given=calls.reward_timeout_s)
    elif inspect.isclass(plugin.obj):
        if (cls := derived(plugin.obj, Reward)).__call__ is Reward.__call__:
            raise _not_callable(name, key)
        check_call(plugin, keywords := checked_args(plugin, own, key=key), key=key)
        with (
            blamed(f"reward {name!r} cannot be made", key or "reward_fn_args"),
            contained(f"reward {name!r}"),
        ):
            made = cls(**keywords)
    else:
        made = from_function(plugin, own, key=key)
    return overlong_penalty.Shaped(made, penalty) if penalty.enable_overlong_penalty else made


def _split(
    args: Mapping[str, Any], shared: type[_Shared], what: str, own: Collection[str], *, key: str
) -> tuple[dict[str, Any], _Shared]:
    """The arguments that are the reward's own, and those that every reward takes.  A reward that
    names one of these keeps it.
    """
    mine = {n: v for n, v in args.items() if n in shared.model_fields and n not in own}
    try:
        made = shared(**mine)
    except ValidationError as e:
        faults = [
            f"{'.'.join(map(str, f['loc']))}: {f['msg']}, given {f['input']!r}" for f in e.errors()
        ]
        raise ConfigError(f"arguments of the {what}: {'; '.join(faults)}", key=key) from None
    return {n: v for n, v in args.items() if n not in mine}, made


def from_function(plugin: Plugin, args: Mapping[str, Any], *, key: str) -> Reward:
    """A function, or an object that can be called, as a reward; attributes such as `whole_group`
    are taken over.
    """
    if not callable(plugin.obj):
        raise _not_callable(plugin.name, key)
    # a task and a transcript
    check_call(plugin, keywords := checked_args(plugin, args, key=key), None, None, key=key)
    made = FunctionReward(partial(plugin.obj, **keywords))
    vars(made).update(hooks(plugin.obj, Reward))
    return made


def _not_callable(name: str, key: str) -> ConfigError:
    return ConfigError(
        f"reward {name!r} cannot be called; write a function or a class with __call__(task, "
        f"transcript)",
        key=key,
    )


def _own(plugin: Plugin) -> set[str]:
    """Names of the arguments that the reward itself knows."""
    if plugin.args is not None:
        return set(plugin.args.model_fields)  # type: ignore[attr-defined]
    return set(inspect.signature(plugin.obj).parameters) if callable(plugin.obj) else set()

"""Make rewards of functions with veRL's or TRL's signature, which are known by the names of their
parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rft.errors import ConfigError
from rft.extras.migrate.score_functions import answer_lists, one_answer
from rft.extras.migrate.score_functions.reward_managers import ManagerArgs, check_manager
from rft.plugins import Plugin
from rft.reward.base import Reward
from rft.reward.build_reward import split_args


def adapt(
    plugin: Plugin, args: Mapping[str, Any], *, key: str
) -> tuple[Reward | None, dict[str, Any]]:
    """Return the reward of a plugin, None for one of another form, and the arguments without those
    of a reward manager.

    Raises ConfigError for arguments that the function does not take.
    """
    args, manager = split_args(plugin, args, ManagerArgs, "reward manager", key=key)
    name = plugin.name
    if one_answer.is_compute_score(plugin.obj):
        return one_answer.reward_of(plugin.obj, args, manager, name=name, key=key), args
    if answer_lists.is_batch(plugin.obj):
        check_manager(manager, lists=True, name=name, key=key)
    elif not answer_lists.is_trl(plugin.obj):
        if manager.reward_timeout_s is None:
            return None, args
        raise ConfigError(
            f"reward_timeout_s is for functions of veRL's and TRL's form; reward {name!r} has "
            f"until explorer.max_timeout",
            key=key,
            given=manager.reward_timeout_s,
        )
    return answer_lists.ListReward(plugin.obj, args, manager, name=name, key=key), args

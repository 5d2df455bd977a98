"""Which auxiliary model a reward asks, by the name in its arguments.  Knows no model: it works on a
run's as on a configuration's.
"""

from __future__ import annotations

from collections.abc import Mapping

from rft.errors import ConfigError

NO_TASKS: Mapping[str, str] = {}


def named(
    models: Mapping[str, object],
    name: str | None,
    *,
    who: str,
    key: str,
    task: str,
    tasks: Mapping[str, str] = NO_TASKS,
) -> str:
    """`name`, or that of the only model.  `tasks`: what each model is for, where that is known; it
    must be `task` (generate or score).

    Raises ConfigError at `key` where it is not there, or is not the only one and not named, and for
    one of another task.
    """
    different = len({id(m) for m in models.values()})
    if name is None and different != 1:
        there = (
            f"{different} auxiliary models ({', '.join(models)})"
            if models
            else "no auxiliary models"
        )
        raise ConfigError(f"there are {there}; {who} asks one, name it here", key=key)
    name = name or next(iter(models))
    if name not in models:
        raise ConfigError(
            f"no auxiliary model has this name; explorer.auxiliary_models has "
            f"{', '.join(models) or 'none'}",
            key=key,
            given=name,
        )
    if (given := tasks.get(name, task)) != task:
        raise ConfigError(
            f"{who} asks auxiliary model {name}, which is of task: {given}; write task: {task} in "
            f"its entry of "
            "explorer.auxiliary_models, or name another",
            key=key,
            given=name,
        )
    return name

"""Resolve the auxiliary model that a reward names in its arguments, for running or configured
models.
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
    """Return `name`, or the name of the only model.

    `tasks`: known tasks of models, which must equal `task` (generate or score).  Raises ConfigError
    at `key` if the model is missing, ambiguous, or of another task.
    """
    different = len({id(m) for m in models.values()})
    if name is None and different != 1:
        available = (
            f"{different} auxiliary models ({', '.join(models)})"
            if models
            else "no auxiliary models"
        )
        raise ConfigError(f"there are {available}; {who} asks one, name it here", key=key)
    name = name or next(iter(models))
    if name not in models:
        raise ConfigError(
            f"no auxiliary model has this name; explorer.auxiliary_models has "
            f"{', '.join(models) or 'none'}",
            key=key,
            given=name,
        )
    if (model_task := tasks.get(name, task)) != task:
        raise ConfigError(
            f"{who} asks auxiliary model {name}, which is of task: {model_task}; write task: {task} in "
            f"its entry of "
            "explorer.auxiliary_models, or name another",
            key=key,
            given=name,
        )
    return name

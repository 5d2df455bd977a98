"""Which auxiliary model a reward asks, by the name in its arguments.  Knows no model: it works on a run's as on a configuration's."""

from __future__ import annotations

from collections.abc import Mapping

from rft.errors import ConfigError


def named(models: Mapping[str, object], name: str | None, *, who: str, key: str) -> str:
    """`name`, or that of the only model.  Raises ConfigError at `key` where it is not there, or is not the only one and not named."""
    different = len({id(m) for m in models.values()})
    if name is None and different != 1:
        there = f"{different} auxiliary models ({', '.join(models)})" if models else "no auxiliary models"
        raise ConfigError(f"there are {there}; {who} asks one, name it here", key=key)
    name = name or next(iter(models))
    if name not in models:
        raise ConfigError(
            f"no auxiliary model has this name; explorer.auxiliary_models has {', '.join(models) or 'none'}", key=key, given=name
        )
    return name

"""Tasksets from reasoning-gym: `reasoning_gym://chain_sum`, rows made by seed, scored by the reward "reasoning_gym".

`args` holds `size` (default 500), `seed` (default 42) and the data set's own settings.  A row is made when it is asked for.
"""

from __future__ import annotations

import difflib
from dataclasses import replace
from typing import Any

from rft.errors import ConfigError
from rft.taskset.base import ByIndex, RowTaskset, Taskset, sample_fingerprint
from rft.taskset.settings import TasksetSettings

REWARD = "reasoning_gym"


def open_gym(settings: TasksetSettings) -> Taskset:
    """The named reasoning-gym data set.  Raises ConfigError for an unknown name or a setting it does not have."""
    from reasoning_gym.factory import DATASETS, create_dataset

    name = settings.path.removeprefix("reasoning_gym://")
    key = f"taskset {settings.name}"
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=1)
        hint = f"  Did you mean {near[0]}?" if near else ""
        raise ConfigError(
            f"reasoning-gym has no data set {name!r}.{hint}  It has {len(DATASETS)}: {', '.join(sorted(DATASETS))}.",
            key=f"{key}.path",
        )
    args = {"size": 500, "seed": 42, **settings.args}
    try:
        made: Any = create_dataset(name, **args)
    except (TypeError, ValueError, AssertionError) as e:
        raise ConfigError(
            f"reasoning-gym {name!r} does not take these arguments: {e}", key=f"{key}.args", given=settings.args
        ) from e
    columns = replace(settings.format, prompt_key="question", response_key="answer", prompt_type="plaintext")
    settings = replace(settings, format=columns, reward=settings.reward or REWARD)
    rows = ByIndex(len(made), lambda i: dict(made[i]))
    return RowTaskset(
        settings,
        rows,
        where=lambda i: f"reasoning_gym://{name}, row {i}",
        fingerprint=sample_fingerprint(rows, args, limit=50),
        check_all=False,
    )

"""Tasksets of reasoning-gym: `path: reasoning_gym://NAME`, or `storage_type: reasoning_gym`."""

from __future__ import annotations

from dataclasses import replace

from rft.errors import ConfigError, nearest
from rft.extras.worlds.gym_rows import NoSuchData, gym_rows
from rft.taskset.base import RowSource, Taskset, sample_fingerprint
from rft.taskset.settings import TasksetSettings

REWARD = "reasoning_gym"


def open_gym(settings: TasksetSettings) -> Taskset:
    """Return the named reasoning-gym data set, scored by the reward "reasoning_gym".  Rows are
    generated when requested.

    `args`: `size` (default 500), `seed` (default 42) and the data set's own settings.  Raises
    ConfigError for an unknown name or setting.
    """
    name = settings.path.removeprefix("reasoning_gym://")
    key = f"taskset {settings.name}"
    args = {"size": 500, "seed": 42, **settings.args}
    try:
        rows = gym_rows(name, args)
    except NoSuchData as e:
        hint = nearest(name, e.names)
        raise ConfigError(
            f"reasoning-gym has no data set {name!r}.{hint}  It has {len(e.names)}: {e}.",
            key=f"{key}.path",
        ) from None
    except ValueError as e:
        raise ConfigError(
            f"reasoning-gym {name!r} does not take these arguments: {e}",
            key=f"{key}.args",
            given=settings.args,
        ) from e
    columns = replace(
        settings.format, prompt_key="question", response_key="answer", prompt_type="plaintext"
    )
    settings = replace(settings, format=columns, reward=settings.reward or REWARD)
    fingerprint = sample_fingerprint(rows, args, limit=50)
    source = RowSource(
        rows=rows,
        where=lambda i: f"reasoning_gym://{name}, row {i}",
        fingerprint=fingerprint,
        check_all=False,
    )
    return Taskset(settings, source)

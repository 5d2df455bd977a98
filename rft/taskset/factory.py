"""Tasksets from Python: `pkg.mod:func` or `file.py:func`.  `func(split=..., **args)` gives a list of rows (dicts)."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

from rft.errors import ConfigError
from rft.plugins import REGISTRY
from rft.taskset.base import RowTaskset, Taskset, sample_fingerprint
from rft.taskset.settings import TasksetSettings


def open_factory(settings: TasksetSettings) -> Taskset:
    """Calls the factory once with the taskset's split and `args`.  What it raises reaches the user as it is."""
    func = REGISTRY.get("taskset", settings.path).obj
    key = f"taskset {settings.name}"
    try:
        inspect.signature(func).bind(split=settings.split, **settings.args)
    except TypeError as e:
        raise ConfigError(
            f"{settings.path}{inspect.signature(func)} cannot be called with split and these args: {e}", key=f"{key}.args"
        ) from None
    rows = func(split=settings.split, **settings.args)
    if not isinstance(rows, Sequence) or not all(isinstance(r, dict) for r in rows):
        raise ConfigError(
            f"{settings.path} returned {type(rows).__name__}; it must return a list of dicts, one per task", key=f"{key}.path"
        )
    where = f"{settings.path}, row "
    return RowTaskset(
        settings, rows, where=lambda i: where + str(i), fingerprint=sample_fingerprint(rows, limit=len(rows)), check_all=True
    )

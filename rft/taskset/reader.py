"""Tasksets from a class of one's own: a file (or module) and the name of a class whose objects have a length and rows by number.

The class is called with `path`, `split` and the taskset's `args` by name.  Rows are read when they are asked for, so what
`__getitem__` gives must not change while the run lasts.
"""

from __future__ import annotations

import inspect
from typing import Any

from rft.errors import ConfigError
from rft.plugins import REGISTRY
from rft.taskset.base import CHECKED, ByIndex, Row, RowTaskset, Taskset, sample_fingerprint
from rft.taskset.settings import TasksetSettings


def open_reader(settings: TasksetSettings) -> Taskset:
    """One object of the class `settings.reader_name`.  What its constructor raises reaches the user as it is."""
    key, name = f"taskset {settings.name}", f"{settings.reader_path}:{settings.reader_name}"
    made = REGISTRY.get("reader", name).obj
    missing = [m for m in ("__len__", "__getitem__") if not callable(getattr(made, m, None))]
    if not inspect.isclass(made) or missing:
        wanted = f"has no {' and no '.join(missing)}" if inspect.isclass(made) else "is no class"
        raise ConfigError(
            f"{name} {wanted}; it must be a class with __len__ and __getitem__(i) that gives row i as a dict",
            key=f"{key}.reader_name",
        )
    args: dict[str, Any] = {"path": settings.path, "split": settings.split, **settings.args}
    try:
        inspect.signature(made).bind(**args)
    except TypeError as e:
        raise ConfigError(
            f"{name}{inspect.signature(made)} cannot be called with {', '.join(args)} by name: {e}",
            key=f"{key}.args",
            given=settings.args,
        ) from None
    reader: Any = made(**args)

    def fetch(i: int) -> Row:
        try:
            row = reader[i]
        except Exception as e:  # a reader may raise anything; it is a bad row, named as such
            raise ConfigError(f"{name}, row {i}: {type(e).__name__}: {e}", key=f"{key}.reader_name") from e
        if not isinstance(row, dict):
            raise ConfigError(f"{name}, row {i}: is {type(row).__name__}; it must be a dict of columns", key=f"{key}.reader_name")
        return row

    rows = ByIndex(len(reader), fetch)
    fingerprint = "" if settings.skip_bad_rows or not len(rows) else sample_fingerprint(rows, name)
    return RowTaskset(
        settings,
        rows,
        where=lambda i: f"{name}, row {i}",
        fingerprint=fingerprint or f"{name}-{len(rows)}",
        check_all=len(rows) <= CHECKED,
    )

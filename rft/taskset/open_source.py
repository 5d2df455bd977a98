"""Open a taskset from its settings: a built-in kind of source, or a user's own."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rft.errors import ConfigError
from rft.plugins import REGISTRY, checked_args, derived, extra_entries, load_entry
from rft.taskset.base import (
    CHECKED,
    ByIndex,
    Row,
    RowSource,
    Taskset,
    TaskSource,
    fingerprint_of,
    sample_fingerprint,
)
from rft.taskset.settings import TasksetSettings
from rft.worker.threads import blamed, contained

BUILT_IN = ("file", "sql", "python")
_FACTORY = re.compile(r"[\w./~-]+:[A-Za-z_]\w*")


def open_taskset(settings: TasksetSettings) -> Taskset:
    """Open the taskset described by `settings`.

    The path is a file (.jsonl, .json, .parquet, .csv), a folder or Hugging Face data set id (read
    with `datasets`, from its cache when HF_HUB_OFFLINE is set), a table or query of a database,
    `reasoning_gym://name`, a Python factory `pkg.mod:func` / `file.py:func`, or a `TaskSource`
    (`storage_type`).  Raises ConfigError.
    """
    path = settings.path
    kind = settings.storage_type
    if ":" in kind or kind in REGISTRY.names("task_source"):
        return _open_reader(settings, kind)
    openers = extra_entries("taskset")
    if (entry := openers.get(path.partition("://")[0] if "://" in path else kind)) is not None:
        return load_entry(entry)(settings)  # type: ignore[no-any-return]
    if kind not in BUILT_IN:
        names = ", ".join([*BUILT_IN, *openers, *REGISTRY.names("task_source")])
        raise ConfigError(
            f"storage type {kind!r} is not known; use {names}, or your own class as "
            f"path/file.py:Name",
            key=f"taskset {settings.name}.storage_type",
            given=kind,
        )
    if kind == "sql":
        from rft.taskset.sql_tasks import open_sql

        return open_sql(settings)
    if kind == "python" or (_FACTORY.fullmatch(path) and not Path(path).exists()):
        return _open_factory(settings)
    from rft.taskset.files import open_path

    return Taskset(settings, open_path(settings))


def _open_factory(settings: TasksetSettings) -> Taskset:
    """Open a taskset from Python: the list of rows (dicts) returned by `func(split=..., **args)`."""
    func = REGISTRY.get("taskset", settings.path).obj
    key = f"taskset {settings.name}"
    args = _fitting(func, {"split": settings.split, **settings.args}, settings.path, f"{key}.args")
    with blamed(f"{settings.path} failed", f"{key}.path"):
        rows = func(**args)
    odd = (
        [f" of {type(r).__name__}" for r in rows if not isinstance(r, dict)]
        if isinstance(rows, Sequence)
        else [""]
    )
    if odd:
        what = f"{type(rows).__name__}{odd[0]}; it must return a list of dicts, one per task"
        raise ConfigError(f"{settings.path} returned {what}", key=f"{key}.path")
    where = f"{settings.path}, row "
    fingerprint = sample_fingerprint(rows, limit=len(rows))
    return Taskset(
        settings,
        RowSource(
            rows=rows, where=lambda i: where + str(i), fingerprint=fingerprint, check_all=True
        ),
    )


def _open_reader(settings: TasksetSettings, name: str) -> Taskset:
    """Open a taskset from the class `name`."""
    key = f"taskset {settings.name}"
    option = f"taskset {settings.name}.storage_type"
    plugin = REGISTRY.get("task_source", name)
    source_class = _source_class(plugin.obj, name, option)
    args = _source_arguments(plugin, settings, name, key)
    blame = partial(blamed, f"task source {name} failed", option)
    with blame():
        source = source_class(**args)
        count = len(source)
        fingerprint = str(source.fingerprint() or "")

    def where(i: int) -> str:
        with blame():
            return f"{name}, {source.where(i)}"

    def fetch(i: int) -> Row:
        try:
            with contained(f"task source {name}"):
                row = source[i]
        except Exception as e:  # a source may raise anything; the row is reported as bad
            raise ConfigError(f"{where(i)}: {type(e).__name__}: {e}", key=option) from e
        if not isinstance(row, dict):
            raise ConfigError(
                f"{where(i)}: is {type(row).__name__}; it must be a dict of columns", key=option
            )
        return row

    rows = ByIndex(count, fetch)
    if not fingerprint and count and not settings.skip_bad_rows:
        fingerprint = sample_fingerprint(
            rows, name, full=partial(fingerprint_of, rows) if count <= CHECKED else None
        )
    row_source = RowSource(
        rows=rows,
        where=where,
        fingerprint=fingerprint or f"{name}-{count}",
        check_all=count <= CHECKED,
    )
    return Taskset(settings, row_source)


def _source_class(cls: Any, name: str, key: str) -> type[TaskSource]:
    source_class = derived(cls, TaskSource) if inspect.isclass(cls) else None
    missing = [
        m
        for m in ("__len__", "__getitem__")
        if source_class is None or vars(TaskSource)[m] is inspect.getattr_static(source_class, m)
    ]
    if source_class is None or missing:
        problem = (
            f"has no {' and no '.join(missing)}" if source_class is not None else "is no class"
        )
        raise ConfigError(
            f"{name} {problem}; it must be a class with __len__ and __getitem__(i) that gives row i "
            f"as a dict",
            key=key,
        )
    return source_class


def _source_arguments(
    plugin: Any, settings: TasksetSettings, name: str, key: str
) -> dict[str, Any]:
    """Return `path`, `split` and the taskset's `args`, checked against the class's `Args` or its
    signature.
    """
    arguments = {"path": settings.path, "split": settings.split}
    if plugin.args is not None:
        return {**arguments, **checked_args(plugin, settings.args, key=f"{key}.args")}
    return _fitting(plugin.obj, {**arguments, **settings.args}, name, f"{key}.args")


def _fitting(call: Any, args: dict[str, Any], name: str, key: str) -> dict[str, Any]:
    """Return `args` if `call` accepts them by name.  Raises ConfigError."""
    try:
        inspect.signature(call).bind(**args)
    except TypeError as e:
        raise ConfigError(
            f"{name}{inspect.signature(call)} cannot be called with {', '.join(args)} by name: {e}",
            key=key,
        ) from None
    return args

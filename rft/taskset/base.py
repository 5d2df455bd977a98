"""Where tasks come from: one protocol, one function that opens any source, and the rule how a row becomes a task.

It knows neither engines nor rewards (a task carries their names).  Invariant: `task(i)` depends on the source and `i` alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, overload

import msgspec
import xxhash

from rft.errors import ConfigError
from rft.taskset.settings import FormatSettings, TasksetSettings
from rft.types.task import Task

Row = dict[str, Any]
_FACTORY = re.compile(r"[\w./~-]+:[A-Za-z_]\w*")


class Taskset(Protocol):
    """A finite, ordered collection of tasks."""

    @property
    def settings(self) -> TasksetSettings: ...

    @property
    def fingerprint(self) -> str:
        """Changes when the rows change; compared on resume."""
        ...

    def __len__(self) -> int: ...

    def task(self, index: int) -> Task:
        """Row `index`, 0 <= index < len, as a task.  ConfigError names source, row and key of a bad row."""
        ...


class ByIndex(Sequence[Row]):
    """Rows fetched one at a time, so that a large table is not turned into Python objects as a whole."""

    def __init__(self, length: int, fetch: Callable[[int], Row]) -> None:
        self._length, self._fetch = length, fetch

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self._fetch(i) for i in range(*index.indices(self._length))]
        return self._fetch(index)

    def __iter__(self) -> Iterator[Row]:
        return map(self._fetch, range(self._length))


class RowTaskset:
    """A taskset over any sequence of rows (a list, an Arrow table, a generator by index).

    `where(i)` says in words where row i is, e.g. "data/train.jsonl:17".
    """

    def __init__(
        self, settings: TasksetSettings, rows: Sequence[Row], *, where: Callable[[int], str], fingerprint: str, check_all: bool
    ) -> None:
        self._settings = settings
        self._rows = rows
        self._where = where
        self._fingerprint = fingerprint
        self._length = len(rows) if settings.max_rows is None else min(len(rows), settings.max_rows)
        if self._length == 0:
            raise ConfigError(
                f"taskset {settings.name!r}: {settings.path} has no rows", key=_key(settings, "path"), given=settings.path
            )
        first = rows[0]
        fmt = settings.format
        self._has_truth = fmt.response_key in first
        if not self._has_truth and fmt.response_key != FormatSettings().response_key:
            raise _missing(settings, where(0), "response_key", fmt.response_key, first)
        for i in range(self._length if check_all else 1):
            self.task(i)

    @property
    def settings(self) -> TasksetSettings:
        return self._settings

    @property
    def fingerprint(self) -> str:
        return self._fingerprint

    def __len__(self) -> int:
        return self._length

    def task(self, index: int) -> Task:
        if not 0 <= index < self._length:
            raise IndexError(f"taskset {self._settings.name!r} has {self._length} rows; asked for {index}")
        return row_to_task(self._settings, self._rows[index], index, self._where(index), has_truth=self._has_truth)


def row_to_task(settings: TasksetSettings, row: Row, index: int, where: str, *, has_truth: bool) -> Task:
    """The task of one row, by the taskset's `format`.  Raises ConfigError naming `where` and the key."""
    fmt = settings.format
    prompt: str | None = None
    messages: tuple[dict[str, Any], ...] = ()
    if fmt.prompt_type == "messages":
        messages = _messages(settings, _get(settings, row, where, "messages_key", fmt.messages_key), where)
    elif fmt.prompt_type == "plaintext":
        prompt = _get(settings, row, where, "prompt_key", fmt.prompt_key)
        if not isinstance(prompt, str) or not prompt:
            raise _wrong(settings, where, "prompt_key", fmt.prompt_key, prompt, "a text that is not empty")
    else:
        raise ConfigError(
            f"{fmt.prompt_type!r} is not known; use plaintext or messages", key=_key(settings, "format.prompt_type")
        )
    system = settings.format.system_prompt
    if fmt.system_prompt_key is not None:
        system = _get(settings, row, where, "system_prompt_key", fmt.system_prompt_key)
    return Task(
        taskset=settings.name,
        index=index,
        row=row,
        prompt=prompt,
        messages=messages,
        tools=_tools(settings, row, where),
        system_prompt=system,
        truth=_get(settings, row, where, "response_key", fmt.response_key) if has_truth else None,
        workflow=_get(settings, row, where, "workflow_key", fmt.workflow_key) if fmt.workflow_key else settings.workflow,
        workflow_args=settings.workflow_args,
        reward=_get(settings, row, where, "reward_fn_key", fmt.reward_fn_key) if fmt.reward_fn_key else settings.reward,
        reward_args=settings.reward_args,
        sampling=settings.sampling,
        num_runs=settings.num_runs,
        is_eval=settings.is_eval,
    )


def open_taskset(settings: TasksetSettings) -> Taskset:
    """The taskset that `settings.path` names.

    A file (.jsonl, .json, .parquet, .csv), a folder or Hugging Face data set id (read with `datasets`, from its cache when
    HF_HUB_OFFLINE is set), `reasoning_gym://name`, or a Python factory `pkg.mod:func` / `file.py:func`.  Raises ConfigError.
    """
    path = settings.path
    if settings.storage_type not in ("file", "reasoning_gym", "python"):
        raise ConfigError(
            f"storage type {settings.storage_type!r} is not known; use file, reasoning_gym or python",
            key=_key(settings, "storage_type"),
        )
    if settings.storage_type == "reasoning_gym" or path.startswith("reasoning_gym://"):
        from rft.taskset.gym import open_gym

        return open_gym(settings)
    if settings.storage_type == "python" or (_FACTORY.fullmatch(path) and not Path(path).exists()):
        from rft.taskset.factory import open_factory

        return open_factory(settings)
    from rft.taskset.files import open_path

    return open_path(settings)


def sample_fingerprint(rows: Sequence[Row], *facts: object, limit: int = 1000) -> str:
    """xxh3-128 over the number of rows, `facts`, and the rows themselves: all of them, or `limit` evenly spread ones."""
    digest = xxhash.xxh3_128()
    digest.update(repr((len(rows), facts)).encode())
    count = min(len(rows), limit)
    for i in range(count):
        digest.update(msgspec.json.encode(rows[i * len(rows) // count], enc_hook=repr, order="deterministic"))
    return digest.hexdigest()


def _get(settings: TasksetSettings, row: Row, where: str, which: str, name: str) -> Any:
    if name not in row:
        raise _missing(settings, where, which, name, row)
    return row[name]


def _messages(settings: TasksetSettings, value: Any, where: str) -> tuple[dict[str, Any], ...]:
    key = settings.format.messages_key
    given = _from_json(value)
    if not isinstance(given, list) or not given or not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in given):
        raise _wrong(settings, where, "messages_key", key, value, "a list of messages such as {role: user, content: ...}")
    return tuple(given)


def _tools(settings: TasksetSettings, row: Row, where: str) -> tuple[dict[str, Any], ...]:
    value = row.get(settings.format.tools_key)
    if value is None or value == "":
        return ()
    given = _from_json(value)
    if not isinstance(given, list) or not all(isinstance(t, dict) for t in given):
        raise _wrong(settings, where, "tools_key", settings.format.tools_key, value, "a list of tools, or that list as JSON")
    return tuple(given)


def _from_json(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return None


def _missing(settings: TasksetSettings, where: str, which: str, name: str, row: Row) -> ConfigError:
    return ConfigError(
        f"{where}: the row has no key {name!r}; its keys are {', '.join(sorted(map(str, row))) or 'none'}.  "
        f"Correct the row, or name the right key in format.{which}.",
        key=_key(settings, f"format.{which}"),
        given=name,
    )


def _wrong(settings: TasksetSettings, where: str, which: str, name: str, value: Any, wanted: str) -> ConfigError:
    shown = repr(value)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return ConfigError(
        f"{where}: key {name!r} is {shown} ({type(value).__name__}); it must be {wanted}.",
        key=_key(settings, f"format.{which}"),
        given=value,
    )


def _key(settings: TasksetSettings, rest: str) -> str:
    return f"taskset {settings.name}.{rest}"

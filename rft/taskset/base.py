"""Where tasks come from: one protocol, one function that opens any source, and the rule how a row becomes a task.

It knows neither engines nor rewards (a task carries their names).  Invariant: `task(i)` depends on the source and `i` alone.
"""

from __future__ import annotations

import itertools
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, overload

import msgspec
import numpy as np
import xxhash

from rft.errors import ConfigError
from rft.taskset import overlong
from rft.taskset.overlong import LeftOut
from rft.taskset.settings import FormatSettings, TasksetSettings
from rft.types.task import Task

log = logging.getLogger(__name__)
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

    @property
    def left_out(self) -> LeftOut | None:
        """Rows that the taskset's prompt limit removed; None where none was."""
        ...

    def task(self, index: int) -> Task:
        """Row `index`, 0 <= index < len, as a task.  ConfigError names source, row and key of a bad row."""
        ...

    def rewards(self) -> dict[str, int]:
        """Every reward that rows name for themselves, with the index of the first that does."""
        ...


class ByIndex(Sequence[Row]):
    """Rows fetched one at a time, so that a large table is not turned into Python objects as a whole.  `scan` gives all in order."""

    def __init__(self, length: int, fetch: Callable[[int], Row], scan: Callable[[], Iterable[Row]] | None = None) -> None:
        self._length, self._fetch, self._scan = length, fetch, scan

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
        return iter(self._scan()) if self._scan is not None else map(self._fetch, range(self._length))


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
        self._has_truth = _lookup(first, fmt.response_key) is not _ABSENT
        if not self._has_truth and fmt.response_key != FormatSettings().response_key:
            raise _missing(settings, where(0), "response_key", fmt.response_key, first)
        for i in range(self._length if check_all else 1):
            self._task(i)
        self._left_out = overlong.find(self._all_tasks(), settings) if settings.prompt_limit is not None else None
        self._kept: np.ndarray | None = None  # numbers of the rows that are used; None = all
        if self._left_out is not None:
            self._kept = np.setdiff1d(np.arange(self._length), self._left_out.rows, assume_unique=True)
            self._fingerprint += f"-{xxhash.xxh3_64_hexdigest(self._kept.tobytes())}"
            log.info("taskset %s: %s", settings.name, self._left_out)

    @property
    def settings(self) -> TasksetSettings:
        return self._settings

    @property
    def fingerprint(self) -> str:
        return self._fingerprint

    @property
    def left_out(self) -> LeftOut | None:
        return self._left_out

    def __len__(self) -> int:
        return self._length if self._kept is None else len(self._kept)

    def task(self, index: int) -> Task:
        if not 0 <= index < len(self):
            raise IndexError(f"taskset {self._settings.name!r} has {len(self)} rows; asked for {index}")
        return self._task(index if self._kept is None else int(self._kept[index]))

    def rewards(self) -> dict[str, int]:
        found: dict[str, int] = {}
        key = self._settings.format.reward_fn_key
        if not key:
            return found
        number = itertools.count()
        left_out = set(self._left_out.rows) if self._left_out is not None else set()
        for row, values in enumerate(itertools.islice(self._rows, self._length)):
            if row not in left_out:
                found.setdefault(_get(self._settings, values, self._where(row), "reward_fn_key", key), next(number))
        return found

    def _task(self, row: int) -> Task:
        return self._made(row, self._rows[row])

    def _all_tasks(self) -> Iterator[Task]:
        return itertools.starmap(self._made, enumerate(itertools.islice(self._rows, self._length)))

    def _made(self, row: int, values: Row) -> Task:
        return row_to_task(self._settings, values, row, self._where(row), has_truth=self._has_truth)


def row_to_task(settings: TasksetSettings, row: Row, index: int, where: str, *, has_truth: bool) -> Task:
    """The task of one row, by the taskset's `format`.  Raises ConfigError naming `where` and the key."""
    fmt = settings.format
    if fmt.preset == "verl":
        row = _verl_row(settings, row, where)
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
        chat_template=fmt.chat_template,
        chat_template_args=fmt.chat_template_args,
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
    if (value := _lookup(row, name)) is _ABSENT:
        raise _missing(settings, where, which, name, row)
    return value


_ABSENT = object()


def _lookup(row: Row, name: str) -> Any:
    """The column `name`; else, with dots, what lies below a column: reward_model.ground_truth."""
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        if not isinstance(value, dict) or part not in value:
            return _ABSENT
        value = value[part]
    return value


def _verl_row(settings: TasksetSettings, row: Row, where: str) -> Row:
    """The row with its data source under the name that rewards look for.  Raises ConfigError for pictures, and for a row that only a
    model can score where a rule was to."""
    if column := next((c for c in ("images", "videos") if row.get(c)), None):
        raise ConfigError(
            f"{where}: column {column!r} is not empty; multimodal inputs are not offered.  Use rows of text",
            key=_key(settings, "format.preset"),
            given="verl",
        )
    source = _lookup(row, settings.format.data_source_key)
    if settings.format.reward_fn_key and _lookup(row, "reward_model.style") == "model":
        raise ConfigError(
            f"{where}: reward_model.style is 'model', so no rule for data source {source!r} scores it.  Name a reward in "
            "default_reward_fn_type",
            key=_key(settings, "format.preset"),
            given="verl",
        )
    return row if source is _ABSENT else {**row, "data_source": source}


def _messages(settings: TasksetSettings, value: Any, where: str) -> tuple[dict[str, Any], ...]:
    key = settings.format.messages_key
    given = _from_json(value)
    if not isinstance(given, list) or not given or not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in given):
        raise _wrong(settings, where, "messages_key", key, value, "a list of messages such as {role: user, content: ...}")
    # a table gives every message all keys that one of them has; templates ask whether a key is there
    return tuple({k: v for k, v in m.items() if v is not None or k == "content"} for m in given)


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

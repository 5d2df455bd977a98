"""Tasksets, sources of rows, and the conversion of a row into a task.

Depends on neither engines nor rewards (a task carries their names).
Invariant: `task(i)` depends only on the source and `i`.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any, overload

import msgspec
import numpy as np
import xxhash

from rft.errors import ConfigError
from rft.secrets import redact
from rft.taskset import row_images
from rft.taskset.chatfiles import LeftOut, find_overlong
from rft.taskset.messages import ABSENT, as_chat, from_json, lookup
from rft.taskset.settings import FormatSettings, TasksetSettings
from rft.types.images import Image
from rft.types.task import Task

log = logging.getLogger(__name__)
Row = dict[str, Any]
Messages = tuple[dict[str, Any], ...]
CHECKED = 100_000  # tables of at most this many rows are checked completely when opened
MAX_CHARS = 32 << 20  # of a prompt
USUAL = ("images", "videos")  # columns of multimodal data sets
OTHER_ROWS = (
    "the rows of {} are not those of earlier evaluations: do not compare their values "
    "with later ones"
)
_NAMED = 3  # skipped rows whose errors are reported


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """The number of unreadable rows among `total`, and the errors of the first of them."""

    count: int
    total: int
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        rest = f"; and {more} more" if (more := self.count - len(self.reasons)) else ""
        return (
            f"{self.count} of {self.total} rows are left out (skip_bad_rows): "
            f"{'; '.join(self.reasons)}{rest}"
        )


class ByIndex(Sequence[Row]):
    """Rows fetched one at a time, so that a large table is not converted to Python objects at once.
    `scan` yields all rows in order.
    """

    def __init__(
        self,
        length: int,
        fetch: Callable[[int], Row],
        scan: Callable[[], Iterable[Row]] | None = None,
    ) -> None:
        self._length = length
        self._fetch = fetch
        self._scan = scan

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
        return (
            iter(self._scan()) if self._scan is not None else map(self._fetch, range(self._length))
        )


class TaskSource:
    """Base of custom task sources: rows by number.  A configuration names the class as
    `storage_type`.

    The constructor gets `path`, `split` and the taskset's `args` by name.  Rows are read on demand,
    so the result of `__getitem__` must not change during a run.
    """

    def __len__(self) -> int:
        raise NotImplementedError(f"{type(self).__name__} needs a method __len__(self)")

    def __getitem__(self, index: int) -> Row:
        raise NotImplementedError(f"{type(self).__name__} needs a method __getitem__(self, index)")

    def where(self, index: int) -> str:
        """Describe the location of row `index`, for messages."""
        return f"row {index}"

    def fingerprint(self) -> str:
        """Return a text that changes when the rows change; empty = computed from all rows, or from
        a sample of more than 100,000 rows.
        """
        return ""


@dataclass(frozen=True, kw_only=True)
class RowSource:
    """The rows of a source before their columns are interpreted.  `where(i)` describes the location
    of row i.
    """

    rows: Sequence[Row]
    where: Callable[[int], str]
    fingerprint: str
    check_all: bool
    unreadable: Sequence[ConfigError] = ()  # errors of entries that are no rows


class Taskset:
    """A finite, ordered collection of tasks over any sequence of rows (a list, an Arrow table, a
    generator by index).

    `fingerprint` changes when the rows change; it is compared on resume.  `left_out`: rows removed
    by the prompt limit; `skipped`: unreadable rows (skip_bad_rows); None = no such row.
    """

    def __init__(self, settings: TasksetSettings, source: RowSource) -> None:
        rows = source.rows
        unreadable = source.unreadable
        self.settings = settings
        self._rows = rows
        self._where = source.where
        self.fingerprint = source.fingerprint
        self._length = len(rows) if settings.max_rows is None else min(len(rows), settings.max_rows)
        if self._length == 0:
            reason = f": {unreadable[0].message}" if unreadable else ""
            path = redact(settings.path)
            raise ConfigError(
                f"taskset {settings.name!r}: {path} has no rows{reason}",
                key=_key(settings, "path"),
                given=path,
            )
        self._has_truth = self._truth_is_there()
        self._refuse_absent("tools_key", FormatSettings.tools_key)
        usual = "images" if settings.format.preset == "verl" else ""
        self._refuse_absent("image_key", usual)
        self._used: np.ndarray | None = None  # numbers of the used rows; None = all
        self.skipped = self._skip(unreadable) if settings.skip_bad_rows else None
        if not settings.skip_bad_rows:
            for i in range(self._length if source.check_all else 1):
                self._task(i)
        self.left_out: LeftOut | None = None
        if settings.prompt_limit is not None:
            self.left_out = find_overlong(
                (self._to_task(i, row) for i, row in self._used_rows()), settings
            )
        if self.left_out is not None:
            used = np.arange(self._length) if self._used is None else self._used
            self._keep(np.setdiff1d(used, self.left_out.rows, assume_unique=True))
            log.info("taskset %s: %s", settings.name, self.left_out)

    def __len__(self) -> int:
        return self._length if self._used is None else len(self._used)

    def task(self, index: int) -> Task:
        """Return row `index`, 0 <= index < len, as a task.  ConfigError names source, row and key
        of a bad row.
        """
        if not 0 <= index < len(self):
            raise IndexError(
                f"taskset {self.settings.name!r} has {len(self)} rows; asked for {index}"
            )
        return self._task(index if self._used is None else int(self._used[index]))

    def place(self, index: int) -> int | None:
        """Return the i with `task(i).index == index`; None if the row was left out."""
        if self._used is None:
            return index if 0 <= index < self._length else None
        at = int(np.searchsorted(self._used, index))
        return at if at < len(self._used) and self._used[at] == index else None

    def rewards(self) -> dict[str, int]:
        """Return each reward named in a row, with the index of its first row."""
        return self._named("reward_fn_key")

    def workflows(self) -> dict[str, int]:
        """Return each workflow named in a row, with the index of its first row."""
        return self._named("workflow_key")

    def features(self, keys: Sequence[str]) -> np.ndarray:
        """Return these columns of every row, float64 [len, len(keys)].  ConfigError names source,
        row and column of a value that is no finite number.
        """
        matrix = np.empty((len(self), len(keys)))
        for place, (row, values) in enumerate(self._used_rows()) if keys else ():
            for k, key in enumerate(keys):
                value = lookup(values, key)
                if not isinstance(value, int | float) or not math.isfinite(value):
                    has = (
                        f"is {value!r}"
                        if value is not ABSENT
                        else f"is not there; it has {', '.join(map(str, values))}"
                    )
                    raise ConfigError(
                        f"{self._where(row)}: column {key!r}, by which rows are chosen, must be a "
                        f"finite number, but {has}",
                        key=_key(self.settings, "data_selector.feature_keys"),
                        given=key,
                    )
                matrix[place, k] = value
        return matrix

    def _named(self, which: str) -> dict[str, int]:
        first_places: dict[str, int] = {}
        named = getattr(self.settings.format, which)
        for place, (row, values) in enumerate(self._used_rows()) if named else ():
            if value := _text(self.settings, values, self._where(row), which):
                first_places.setdefault(value, place)
        return first_places

    def _used_rows(self) -> Iterator[tuple[int, Row]]:
        """Yield (number, values) of every used row, in order."""
        if self._used is not None and self.skipped is not None:
            return ((int(row), self._rows[int(row)]) for row in self._used)
        left_out = set(self.left_out.rows) if self.left_out is not None else ()
        return (
            (row, values)
            for row, values in enumerate(itertools.islice(self._rows, self._length))
            if row not in left_out
        )

    def _truth_is_there(self) -> bool:
        """Return whether rows have a truth.  With skip_bad_rows one row decides: rows without are
        then bad.
        """
        key = self.settings.format.response_key
        skips = self.settings.skip_bad_rows
        if not key:
            return False
        for row in range(self._length if skips else 1):
            with suppress(ConfigError) if skips else nullcontext():
                if lookup(self._rows[row], key) is not ABSENT:
                    return True
        if not skips and key != FormatSettings.response_key:
            raise _missing(self.settings, self._where(0), "response_key", self._rows[0])
        return key != FormatSettings.response_key

    def _refuse_absent(self, which: str, usual: str) -> None:
        """Raise ConfigError if a column is named that no row has; `usual` may be absent."""
        key = getattr(self.settings.format, which)
        rows = itertools.islice(self._rows, self._length)
        if (
            key not in ("", usual)
            and all(lookup(row, key) is ABSENT for row in rows)
            and not (which == "image_key" and any(map(self._shows_images, range(self._length))))
        ):
            raise _missing(self.settings, "no row has it", which, self._rows[0])

    def _shows_images(self, row: int) -> bool:
        with suppress(ConfigError):
            return bool(self._task(row).images)
        return False

    def _skip(self, unreadable: Sequence[ConfigError]) -> Skipped | None:
        good = []
        bad = list(unreadable)
        for row in range(self._length):
            try:
                self._task(row)
            except ConfigError as e:
                bad.append(e)
            else:
                good.append(row)
        total = self._length + len(unreadable)
        if not good:
            raise ConfigError(
                f"none of {total} rows can be read; the first: {bad[0].message}",
                key=bad[0].key,
                given=bad[0].given,
            )
        if not bad:
            return None
        self._keep(np.array(good))
        skipped = Skipped(
            count=len(bad), total=total, reasons=tuple(e.message for e in bad[:_NAMED])
        )
        log.warning("taskset %s: %s", self.settings.name, skipped)
        return skipped

    def _keep(self, rows: np.ndarray) -> None:
        self._used = rows
        self.fingerprint += f"-{xxhash.xxh3_64_hexdigest(rows.astype(np.int64).tobytes())}"

    def _task(self, row: int) -> Task:
        return self._to_task(row, self._rows[row])

    def _to_task(self, row: int, values: Row) -> Task:
        return row_to_task(self.settings, values, row, self._where(row), has_truth=self._has_truth)


class FoundRows:
    """Collects rows with their locations (lines), and errors of entries that are no rows.

    The first error is raised, unless the taskset skips bad rows.
    """

    def __init__(self, settings: TasksetSettings) -> None:
        self._settings = settings
        self.rows: list[Row] = []
        self._places: list[int] = []
        self._unreadable: list[ConfigError] = []

    def row(self, row: Row, place: int) -> None:
        self.rows.append(row)
        self._places.append(place)

    def bad(self, error: ConfigError) -> None:
        if not self._settings.skip_bad_rows:
            raise error
        self._unreadable.append(error)

    def source(self, where: Callable[[int], str], fingerprint: str) -> RowSource:
        """Return the collected rows; `where(place)` describes the location of a row."""
        return RowSource(
            rows=self.rows,
            where=lambda i: where(self._places[i]),
            fingerprint=fingerprint,
            check_all=True,
            unreadable=self._unreadable,
        )


def row_to_task(
    settings: TasksetSettings, row: Row, index: int, where: str, *, has_truth: bool
) -> Task:
    """Convert one row into a task by the taskset's `format`.  Raises ConfigError naming `where` and
    the key.
    """
    fmt = settings.format
    if fmt.preset == "verl":
        row = _verl_row(settings, row, where)
    prompt: str | None = None
    messages: tuple[dict[str, Any], ...] = ()
    if fmt.prompt_type == "messages":
        messages = _messages(settings, _get(settings, row, where, "messages_key"), where)
    else:
        prompt = _get(settings, row, where, "prompt_key")
        if isinstance(prompt, list) and prompt:
            messages = _messages(settings, prompt, where, "prompt_key")
            prompt = None
        elif not isinstance(prompt, str) or not 0 < len(prompt) <= MAX_CHARS:
            expected = (
                f"a non-empty text of at most {MAX_CHARS:,} characters, or a list of messages"
            )
            raise _wrong(settings, where, "prompt_key", prompt, expected)
    images: tuple[Image, ...] = ()
    if fmt.image_key:
        row, prompt, messages, images = _with_images(settings, row, prompt, messages, where)
    system = _text(settings, row, where, "system_prompt_key") or fmt.system_prompt
    if system and messages and messages[0]["role"] != "system":
        messages = ({"role": "system", "content": system}, *messages)
    return Task(
        taskset=settings.name,
        index=index,
        row=row,
        prompt=prompt,
        messages=messages,
        images=images,
        tools=_tools(settings, row, where),
        prompt_truncation=settings.prompt_truncation,
        system_prompt=system,
        chat_template=fmt.chat_template,
        chat_template_args=fmt.chat_template_args,
        truth=_get(settings, row, where, "response_key") if has_truth else None,
        workflow=_text(settings, row, where, "workflow_key") or settings.workflow,
        workflow_args=settings.workflow_args,
        reward=_text(settings, row, where, "reward_fn_key") or settings.reward,
        reward_args=settings.reward_args,
        sampling=settings.sampling,
        num_runs=settings.num_runs,
        is_eval=settings.is_eval,
    )


def sample_fingerprint(
    rows: Sequence[Row], *facts: object, limit: int = 1000, full: Callable[[], str] | None = None
) -> str:
    """Hash the number of rows, `facts` and the rows: all, or `limit` evenly spaced rows after
    `full()`.
    """
    count = min(len(rows), limit)
    sample = fingerprint_of((rows[i * len(rows) // count] for i in range(count)), len(rows), facts)
    return sample if full is None or len(rows) == count else f"{full()}-{sample}"


def fingerprint_of(rows: Iterable[Row], *facts: object) -> str:
    """Return xxh3-128 over `facts` and all rows."""
    digest = xxhash.xxh3_128(repr(facts).encode())
    for row in rows:
        digest.update(_as_bytes(row))
    return digest.hexdigest()


def _as_bytes(row: Row) -> bytes:
    """Serialize a row independently of its key order, and identically in every version of this
    package, because resumed runs compare the hash.
    """
    try:
        return msgspec.json.encode(row, enc_hook=repr, order="deterministic")
    except TypeError:  # keys that are not texts cannot be sorted
        return msgspec.json.encode(_with_text_keys(row), enc_hook=repr, order="deterministic")
    except UnicodeEncodeError:  # a lone surrogate
        return json.dumps(_with_text_keys(row), default=repr, sort_keys=True).encode()


def _with_text_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {k if isinstance(k, str) else repr(k): _with_text_keys(v) for k, v in value.items()}
    return [_with_text_keys(v) for v in value] if isinstance(value, list | tuple) else value


def _get(settings: TasksetSettings, row: Row, where: str, which: str) -> Any:
    if (value := lookup(row, getattr(settings.format, which))) is ABSENT:
        raise _missing(settings, where, which, row)
    return value


def _text(settings: TasksetSettings, row: Row, where: str, which: str) -> str | None:
    """Return the column's text; None for null, or if the format names no column."""
    value = _get(settings, row, where, which) if getattr(settings.format, which) else None
    if value is None or isinstance(value, str):
        return value
    raise _wrong(settings, where, which, value, "a text")


def refuse_media(row: Row, where: str, key: str, image_key: str) -> None:
    """Raise ConfigError for a row with something in the usual columns of multimodal data sets, beside
    the images of `image_key`.
    """
    columns = ("videos",) if image_key else USUAL
    if column := next((c for c in columns if row.get(c)), None):
        raise ConfigError(
            f"{where}: column {column!r} is not empty; multimodal inputs are not offered.  Use "
            f"rows of text, or name a column of images in format.image_key",
            key=key,
        )


def _verl_row(settings: TasksetSettings, row: Row, where: str) -> Row:
    """Return the row with its data source under the name that rewards read.  Raises ConfigError for
    videos, and for a row that needs a reward model instead of a rule.
    """
    refuse_media(row, where, _key(settings, "format.preset"), settings.format.image_key)
    source = lookup(row, settings.format.data_source_key)
    if settings.format.reward_fn_key and lookup(row, "reward_model.style") == "model":
        raise ConfigError(
            f"{where}: reward_model.style is 'model', so no rule for data source {source!r} scores "
            f"it.  Name a reward in "
            "default_reward_fn_type",
            key=_key(settings, "format.preset"),
            given="verl",
        )
    return row if source is ABSENT else {**row, "data_source": source}


def _messages(
    settings: TasksetSettings, value: Any, where: str, which: str = "messages_key"
) -> tuple[dict[str, Any], ...]:
    try:
        return as_chat(value, parts=bool(settings.format.image_key))
    except ValueError as e:
        raise _wrong(settings, where, which, value, str(e)) from None


def _with_images(
    settings: TasksetSettings, row: Row, prompt: str | None, messages: Messages, where: str
) -> tuple[Row, str | None, Messages, tuple[Image, ...]]:
    try:
        return row_images.with_images(settings, row, prompt, messages)
    except ValueError as e:
        raise ConfigError(
            f"{where}: {e}",
            key=_key(settings, "format.image_key"),
            given=settings.format.image_key,
        ) from None


def _tools(settings: TasksetSettings, row: Row, where: str) -> tuple[dict[str, Any], ...]:
    value = lookup(row, settings.format.tools_key)
    if value in (ABSENT, None, ""):
        return ()
    tools = from_json(value)
    if not isinstance(tools, list) or not all(isinstance(t, dict) for t in tools):
        raise _wrong(
            settings,
            where,
            "tools_key",
            value,
            "a list of tools, or that list as JSON",
        )
    return tuple(tools)


def _missing(settings: TasksetSettings, where: str, which: str, row: Row) -> ConfigError:
    name = getattr(settings.format, which)
    return ConfigError(
        f"{where}: the row has no key {name!r}; its keys are "
        f"{', '.join(sorted(map(str, row))) or 'none'}.  "
        f"Correct the row, or name the right key in format.{which}.",
        key=_key(settings, f"format.{which}"),
        given=name,
    )


def _wrong(
    settings: TasksetSettings, where: str, which: str, value: Any, expected: str
) -> ConfigError:
    return ConfigError(
        f"{where}: key {getattr(settings.format, which)!r} is {value!r:.80} "
        f"({type(value).__name__}); it must be {expected}.",
        key=_key(settings, f"format.{which}"),
        given=value,
    )


def _key(settings: TasksetSettings, rest: str) -> str:
    return f"taskset {settings.name}.{rest}"

"""Tasksets from files: jsonl, json, csv and parquet with rft's own readers, folders and Hugging
Face ids with `datasets`.

Every error names the file and the line (or row).  The meaning of columns is unknown here; see
`base.row_to_task`.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import xxhash

from rft.errors import ConfigError, SetupError
from rft.files.strict_json import parse_json
from rft.secrets import redact
from rft.taskset.base import (
    CHECKED,
    MAX_CHARS,
    ByIndex,
    FoundRows,
    RowSource,
    fingerprint_of,
    sample_fingerprint,
)
from rft.taskset.settings import TasksetSettings

# part of the Arrow type of Hugging Face images, sound and videos
_MEDIA = re.compile(r"\bbytes: (large_)?binary")
_SPOKEN = {"role", "function", "parameters", "arguments"}  # keys of messages, tools and calls


def open_path(settings: TasksetSettings) -> RowSource:
    """Open the rows of a file, a folder, or a Hugging Face data set id."""
    path = Path(settings.path).expanduser()
    if path.is_dir():
        file = _of_split(settings, path)
        return (
            _open_datasets(settings, path)
            if file is None
            else _READERS[file.suffix](settings, file)
        )
    if path.is_file():
        reader = _READERS.get(path.suffix.lower())
        if reader is None:
            raise _error(
                settings,
                f"{path}: suffix {path.suffix!r} is not known; use one of {', '.join(_READERS)} or "
                f"a folder",
            )
        return reader(settings, path)
    if "://" in settings.path:
        raise _error(
            settings,
            f"{redact(settings.path)} is an address; download it, and name the file, or a data set "
            f"of the hub",
        )
    if (
        path.suffix.lower() in _READERS
        or path.is_absolute()
        or settings.path.startswith((".", "~"))
    ):
        if os.path.lexists(path):
            raise _error(
                settings,
                f"{path} is no plain file (a pipe, a device or a broken link); name a file or a "
                f"folder",
            )
        looked = (
            ""
            if path.is_absolute()
            else f"; relative paths are looked up in {Path.cwd()} and beside the configuration file"
        )
        raise _error(settings, f"{path} does not exist{_near(path)}{looked}")
    return _open_datasets(settings, None)


def _jsonl(settings: TasksetSettings, path: Path) -> RowSource:
    collected = FoundRows(settings)
    data = path.read_bytes()
    for number, raw in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not (line := raw.strip()):
            continue
        try:
            row = parse_json(_text(settings, line, f"{path}:{number}"))
        except ConfigError as e:
            collected.bad(e)
        except json.JSONDecodeError as e:
            collected.bad(
                _error(
                    settings,
                    f"{path}:{number}: not JSON ({e.msg} at column {e.colno}): {_short(line)}",
                )
            )
        except ValueError as e:
            collected.bad(_error(settings, f"{path}:{number}: {e}: {_short(line)}"))
        else:
            if isinstance(row, dict):
                collected.row(row, number)
            else:
                kind = type(row).__name__
                collected.bad(
                    _error(
                        settings,
                        f"{path}:{number}: a line must be a JSON object, not {kind}: "
                        f"{_short(line)}",
                    )
                )
    return collected.source(lambda line: f"{path}:{line}", xxhash.xxh3_128_hexdigest(data))


def _json(settings: TasksetSettings, path: Path) -> RowSource:
    data = path.read_bytes()
    try:
        rows = parse_json(_text(settings, data.removeprefix(b"\xef\xbb\xbf"), str(path)))
    except json.JSONDecodeError as e:
        if e.msg == "Extra data" and data.lstrip().startswith(b"{"):
            return _jsonl(settings, path)
        raise _error(
            settings, f"{path}:{e.lineno}: not JSON ({e.msg} at column {e.colno})"
        ) from None
    except ValueError as e:
        raise _error(settings, f"{path}: {e}") from None
    if not isinstance(rows, list):
        raise _error(
            settings, f"{path}: must hold a JSON list of objects, not {type(rows).__name__}"
        )
    collected = FoundRows(settings)
    for i, row in enumerate(rows):
        if isinstance(row, dict):
            collected.row(row, i)
        else:
            collected.bad(
                _error(
                    settings,
                    f"{path}, element {i}: must be a JSON object, not {type(row).__name__}",
                )
            )
    return collected.source(lambda i: f"{path}, element {i}", xxhash.xxh3_128_hexdigest(data))


def _csv(settings: TasksetSettings, path: Path) -> RowSource:
    data = path.read_bytes()
    csv.field_size_limit(MAX_CHARS)
    reader = csv.DictReader(
        io.StringIO(_text(settings, data.removeprefix(b"\xef\xbb\xbf"), str(path)), newline=""),
        strict=True,
    )
    collected = FoundRows(settings)
    try:
        columns = reader.fieldnames or ()
        if len(set(columns)) < len(columns):
            twice = next(name for i, name in enumerate(columns) if name in columns[:i])
            raise _error(settings, f"{path}:1: the column {twice!r} is there twice; rename one")
        for row in reader:
            width = len(columns)
            if None in row or None in row.values():
                at = f"{path}:{reader.line_num}"
                collected.bad(
                    _error(
                        settings,
                        f"{at}: the line does not have {width} columns as the first line says",
                    )
                )
            else:
                collected.row(dict(row), reader.line_num)
    except csv.Error as e:
        raise _error(settings, f"{path}:{reader.line_num}: not CSV ({e})") from None
    return collected.source(lambda line: f"{path}:{line}", xxhash.xxh3_128_hexdigest(data))


def _parquet(settings: TasksetSettings, path: Path) -> RowSource:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path, memory_map=True)
    except (pa.ArrowInvalid, OSError) as e:
        raise _error(settings, f"{path}: not a readable Parquet file ({e})") from None
    _of_texts(settings, str(path), table.schema)
    stored = ByIndex(
        table.num_rows,
        lambda i: table.slice(i, 1).to_pylist()[0],
        lambda: (
            row for batch in table.to_batches(max_chunksize=1024) for row in batch.to_pylist()
        ),
    )
    rows = ByIndex(len(stored), lambda i: _drop_nulls(stored[i]), lambda: map(_drop_nulls, stored))
    where = f"{path}, row "
    fingerprint = sample_fingerprint(
        stored,
        table.column_names,
        full=lambda: xxhash.xxh3_128_hexdigest(pa.memory_map(str(path)).read_buffer()),
    )
    return RowSource(
        rows=rows,
        where=lambda i: where + str(i),
        fingerprint=fingerprint,
        check_all=len(rows) <= CHECKED,
    )


def _of_texts(settings: TasksetSettings, source: str, schema: Any) -> None:
    """Raise ConfigError for an Arrow schema with a column of images, sound or videos that
    image_key does not name.
    """
    media = [field.name for field in schema if _MEDIA.search(str(field.type))]
    if media := [name for name in media if name != settings.format.image_key]:
        offer = (
            "name a column of images in format.image_key, or save the data set without it "
            "(remove_columns, then save_to_disk or to_parquet)"
        )
        raise _error(
            settings,
            f"{source}: column {media[0]!r} holds images, sound or videos; {offer}",
        )


def _drop_nulls(value: Any, inside: bool = False) -> Any:
    """Drop nulls from messages, tools and calls inside lists, where Arrow adds keys of other
    elements.

    `inside`: the value is such an element.  A message keeps its `content`.
    """
    if isinstance(value, dict):
        required = (
            value.keys() if not inside else {"content"} & value.keys() if "role" in value else ()
        )
        return {
            k: _drop_nulls(v, inside) for k, v in value.items() if v is not None or k in required
        }
    if not isinstance(value, list) or not value or isinstance(value[0], int | float | str):
        return value
    return [
        _drop_nulls(v, inside or (isinstance(v, dict) and bool(_SPOKEN & v.keys()))) for v in value
    ]


_READERS = {".jsonl": _jsonl, ".ndjson": _jsonl, ".json": _json, ".csv": _csv, ".parquet": _parquet}


def _of_split(settings: TasksetSettings, folder: Path) -> Path | None:
    """Return the file of a folder named after the split, such as train.parquet; None if `datasets`
    must find the rows.
    """
    if settings.subset_name is not None or _is_saved(folder):
        return None
    files = [
        folder / f"{settings.split}{suffix}"
        for suffix in _READERS
        if (folder / f"{settings.split}{suffix}").is_file()
    ]
    if len(files) > 1:
        raise _error(
            settings,
            f"{folder} holds {' and '.join(f.name for f in files)}; name one of them in path",
        )
    return files[0] if files else None


def _is_saved(folder: Path) -> bool:
    """Return whether `save_to_disk` of a Dataset or a DatasetDict wrote this folder."""
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def _load(settings: TasksetSettings, source: str, folder: Path | None) -> Any:
    import datasets

    if folder is None or not _is_saved(folder):
        return datasets.load_dataset(source, settings.subset_name, split=settings.split)
    if settings.subset_name is not None:
        raise ValueError(
            f"it has no subsets, and {settings.subset_name!r} is asked for; leave subset_name out"
        )
    loaded = datasets.load_from_disk(source)
    if isinstance(loaded, datasets.Dataset) and settings.split not in ("train", str(loaded.split)):
        raise ValueError(
            f"it was saved without splits, and {settings.split!r} is asked for; save a DatasetDict"
        )
    return loaded


def _open_datasets(settings: TasksetSettings, folder: Path | None) -> RowSource:
    """Open a folder (saved with `save_to_disk`, or of data files) or a hub id; HF_HUB_OFFLINE and
    HF_HOME are respected.
    """
    import datasets

    source = str(folder) if folder is not None else settings.path
    try:
        loaded = _load(settings, source, folder)
    except (
        OSError,
        ValueError,
        RuntimeError,
        KeyError,
        TypeError,
        datasets.exceptions.DatasetsError,
    ) as e:
        if isinstance(e, OSError) and not _can_write(
            cache := Path(datasets.config.HF_DATASETS_CACHE)
        ):
            raise SetupError(
                f"taskset {settings.name}: {source} is read through the cache of Hugging Face "
                f"datasets, and {cache} cannot be written "
                f"({e}).  Set HF_HOME or HF_DATASETS_CACHE to a folder that can be, or name a "
                f"jsonl, csv or parquet file itself."
            ) from e
        hint = (
            "  It is not a local file or folder either; without a network only data sets in the "
            "local cache can be used."
        )
        raise _error(
            settings,
            f"{source}: cannot be loaded: {type(e).__name__}: {e}{hint if folder is None else ''}",
        ) from e
    if isinstance(loaded, datasets.DatasetDict):
        if settings.split not in loaded:
            raise _error(
                settings, f"{source}: has no split {settings.split!r}; it has {', '.join(loaded)}"
            )
        loaded = loaded[settings.split]
    _of_texts(settings, source, loaded.features.arrow_schema)
    rows = ByIndex(len(loaded), lambda i: _drop_nulls(loaded[i]), lambda: map(_drop_nulls, loaded))
    row_stream = (
        row for table in loaded.with_format("arrow").iter(1024) for row in table.to_pylist()
    )
    return RowSource(
        rows=rows,
        where=lambda i: f"{source} ({settings.split}), row {i}",
        fingerprint=sample_fingerprint(
            loaded, loaded.column_names, full=lambda: fingerprint_of(row_stream)
        ),
        check_all=len(rows) <= CHECKED,
    )


def _text(settings: TasksetSettings, data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as e:
        raise _error(
            settings, f"{where}: not UTF-8 (byte {data[e.start]:#04x} at offset {e.start})"
        ) from None


def _short(line: bytes) -> str:
    text = line.decode("utf-8", "replace")
    return text if len(text) <= 80 else text[:77] + "..."


def _near(path: Path) -> str:
    import difflib

    if not path.parent.is_dir():
        return f"; the folder {path.parent} does not exist either"
    near = difflib.get_close_matches(path.name, [p.name for p in path.parent.iterdir()], n=1)
    return f"; did you mean {path.with_name(near[0])}?" if near else ""


def _can_write(folder: Path) -> bool:
    """Return whether this process can write to `folder`, by trying; permission bits are not
    sufficient.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _error(settings: TasksetSettings, message: str) -> ConfigError:
    return ConfigError(message, key=f"taskset {settings.name}.path", given=settings.path)

"""Experiences as a file: Parquet or JSON lines, with bounded memory, while the run goes on or after it.

It knows the columns' types and no other program's format.  The one invariant: the file appears whole or not at all, and nothing that was
there is overwritten.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from sqlalchemy import Boolean, Float, Integer

from rft.buffer.query import Questions
from rft.buffer.schema import experiences, texts
from rft.errors import ConfigError
from rft.types.experience import Experience

PAGE = 256  # experiences that are asked for at once
GROUP_ROWS = 2048  # largest row group
GROUP_BYTES = 32 << 20  # it is also ended when its tokens and texts take so much
SPAN = pa.struct([("version", pa.string()), ("start", pa.int32()), ("end", pa.int32())])
PAYLOAD = pa.schema(
    [
        ("tokens", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("logprobs", pa.list_(pa.float32())),
        ("token_rewards", pa.list_(pa.float32())),
        ("teacher_logprobs", pa.list_(pa.float32())),
        ("version_spans", pa.list_(SPAN)),
        ("messages", pa.string()),
        ("tools", pa.string()),
        ("metrics", pa.string()),
        ("info", pa.string()),
    ]
)


def export(
    questions: Questions, to: Path, *, where: str = "", tokens: bool = False, told: Callable[[int], None] = lambda n: None
) -> int:
    """Write the experiences that fulfil `where`, a condition on v_experiences, to `to`; how many they are.

    They come in the order of their ids, a page at a time, each page as it is at its moment: a long export neither keeps the database's
    log from being cut nor sees two states of one experience.  `told` hears how many are written.  Raises ConfigError.
    """
    if to.suffix not in _WRITERS:
        raise ConfigError(f"{to.name!r} must end in {' or '.join(_WRITERS)}", key="--to", given=str(to))
    if to.exists():
        raise ConfigError(f"{to} exists and is not overwritten; name another file", key="--to", given=str(to))
    if tokens and not questions.storage.durable:
        raise ConfigError("the payload was kept in memory only (path: none), there are no tokens to export", key="--tokens")
    header = schema(questions)
    aside = to.with_name(f".{to.name}.{os.getpid()}")
    try:
        with _WRITERS[to.suffix](aside, _joined(header) if tokens else header) as write:
            count = 0
            for rows in pages(questions, where):
                if tokens:
                    found = questions.payload([row["id"] for row in rows])
                    rows = [{**row, **unpacked(found[row["id"]])} for row in rows]
                write(rows)
                told(count := count + len(rows))
        if to.exists():
            raise ConfigError(f"{to} appeared meanwhile and is not overwritten", key="--to", given=str(to))
        aside.rename(to)
    except OSError as e:
        raise ConfigError(f"{to} cannot be written: {e.strerror or e}; name another file", key="--to", given=str(to)) from e
    finally:
        aside.unlink(missing_ok=True)
    return count


def pages(questions: Questions, where: str) -> Iterator[list[dict[str, Any]]]:
    """Rows of v_experiences that fulfil `where`, by id, PAGE at a time."""
    last = ""
    while True:
        rows = questions.page(where, last, PAGE)
        if rows:
            yield rows
            last = rows[-1]["id"]
        if len(rows) < PAGE:
            return


def schema(questions: Questions) -> pa.Schema:
    """Columns of v_experiences with the types of the ledger's columns."""
    return pa.schema([(name, _type(name)) for name in questions.columns("v_experiences")])


def _type(name: str) -> pa.DataType:
    column = next((t.c[name] for t in (experiences, texts) if name in t.c), None)
    if column is None:
        return _DERIVED[name]
    kind = column.type
    if isinstance(kind, Boolean):
        return pa.bool_()
    return pa.int64() if isinstance(kind, Integer) else pa.float64() if isinstance(kind, Float) else pa.string()


_DERIVED = {  # columns of the view that no table has
    "run_name": pa.string(),
    "leased_step": pa.int64(),
    "leased": pa.float64(),
    "used_step": pa.int64(),
    "used": pa.float64(),
}


def unpacked(x: Experience) -> dict[str, Any]:
    """What the payload adds to the columns; arrays as they are, the rest as JSON."""
    return {
        "tokens": x.tokens,
        "loss_mask": x.loss_mask,
        "logprobs": x.logprobs if x.has_logprobs else None,
        "token_rewards": x.token_rewards,
        "teacher_logprobs": x.teacher_logprobs,
        "version_spans": [{"version": str(s.version), "start": s.start, "end": s.end} for s in x.version_spans],
        **{name: _json(getattr(x, name)) for name in ("messages", "tools", "metrics", "info")},
    }


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _joined(header: pa.Schema) -> pa.Schema:
    return pa.schema([*(field for field in header if field.name not in PAYLOAD.names), *PAYLOAD])


class _Parquet:
    """Rows are collected until a row group is full."""

    def __init__(self, path: Path, columns: pa.Schema) -> None:
        self._columns = columns
        self._writer = pq.ParquetWriter(path, columns, compression="zstd")
        self._tables: list[pa.Table] = []

    def __enter__(self) -> Callable[[list[dict[str, Any]]], None]:
        return self._write

    def __exit__(self, *_: object) -> None:
        self._flush()
        self._writer.close()

    def _write(self, rows: list[dict[str, Any]]) -> None:
        arrays = [pa.array(_typed([row[f.name] for row in rows], f.type), f.type) for f in self._columns]
        self._tables.append(pa.Table.from_arrays(arrays, schema=self._columns))
        if sum(t.num_rows for t in self._tables) >= GROUP_ROWS or sum(t.nbytes for t in self._tables) >= GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._tables:
            whole = pa.concat_tables(self._tables)
            self._writer.write_table(whole, row_group_size=whole.num_rows)
            self._tables = []


class _Lines:
    """One JSON object a line, with the columns of the schema."""

    def __init__(self, path: Path, columns: pa.Schema) -> None:
        self._columns = columns
        self._file = path.open("xb")

    def __enter__(self) -> Callable[[list[dict[str, Any]]], None]:
        return self._write

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _write(self, rows: list[dict[str, Any]]) -> None:
        columns = [_typed([row[f.name] for row in rows], f.type) for f in self._columns]
        for values in zip(*columns, strict=True):
            self._file.write(msgspec.json.encode(dict(zip(self._columns.names, values, strict=True)), enc_hook=_listed) + b"\n")


def _typed(values: list[Any], kind: pa.DataType) -> list[Any]:
    """A column; SQLite keeps truth values as numbers and may give whole floats as integers."""
    if pa.types.is_boolean(kind):
        return [None if v is None else bool(v) for v in values]
    return [None if v is None else float(v) for v in values] if pa.types.is_floating(kind) else values


def _listed(value: Any) -> Any:
    return value.tolist()


_WRITERS: dict[str, Any] = {".parquet": _Parquet, ".jsonl": _Lines}

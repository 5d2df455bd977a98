"""Export experiences to a Parquet or JSON-lines file with bounded memory, during or after a run.

With tokens come the files of images, each once, in the folder NAME.images beside the file; a row
names them relative to it, as rows of tasksets and of data sets to train on do.  Depends on the
columns' types and no other program's format.  Invariant: the file appears complete, and after its
images, or not at all, and no existing file is overwritten.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from sqlalchemy import Boolean, Float, Integer
from sqlalchemy.types import TypeEngine

from rft.buffer.query import Questions
from rft.buffer.schema import experiences, texts
from rft.errors import ConfigError
from rft.types.experience import Experience
from rft.types.token_logprobs import TrainerTokens

_Write = Callable[[list[dict[str, Any]]], None]
PAGE = 256  # experiences per query
GROUP_ROWS = 2048  # largest row group
GROUP_BYTES = 32 << 20  # limit of a row group by size of its tokens and texts
PLACE = pa.struct(
    [
        ("sha256", pa.string()),
        ("start", pa.int32()),
        ("length", pa.int32()),
        ("grid", pa.list_(pa.int32())),
        ("pixels", pa.string()),
    ]
)
SPAN = pa.struct([("version", pa.string()), ("start", pa.int32()), ("end", pa.int32())])
PAYLOAD = pa.schema(
    [
        ("tokens", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("logprobs", pa.list_(pa.float32())),
        ("trainer_logprobs", pa.list_(pa.float32())),
        ("advantages", pa.list_(pa.float32())),
        ("token_rewards", pa.list_(pa.float32())),
        ("teacher_logprobs", pa.list_(pa.float32())),
        ("teacher_top_ids", pa.list_(pa.list_(pa.int32()))),
        ("teacher_top_logprobs", pa.list_(pa.list_(pa.float32()))),
        ("teacher_spans", pa.list_(SPAN)),
        ("version_spans", pa.list_(SPAN)),
        ("messages", pa.string()),
        ("tools", pa.string()),
        ("metrics", pa.string()),
        ("info", pa.string()),
        ("image_places", pa.list_(PLACE)),
        ("images", pa.list_(pa.string())),
    ]
)


def export(
    questions: Questions,
    to: Path,
    *,
    where: str = "",
    tokens: bool = False,
    on_progress: Callable[[int], None] = lambda n: None,
) -> int:
    """Write the experiences that fulfil `where`, a condition on v_experiences, to `to`; return
    their number.

    Experiences come in the order of their ids, page by page, and each page is a separate snapshot:
    a long export does not stop the database's log from being cut, and no experience appears in two
    states. `on_progress` gets the number written so far.  Raises ConfigError.
    """
    if to.suffix not in _WRITERS:
        raise ConfigError(
            f"{to.name!r} must end in {' or '.join(_WRITERS)}", key="--to", given=str(to)
        )
    if to.exists():
        raise ConfigError(
            f"{to} exists and is not overwritten; name another file", key="--to", given=str(to)
        )
    if tokens and not questions.storage.durable:
        raise ConfigError(
            "the payload was kept in memory only (path: none), there are no tokens to export",
            key="--tokens",
        )
    header = schema(questions)
    if tokens:
        header = pa.schema(
            [*(field for field in header if field.name not in PAYLOAD.names), *PAYLOAD]
        )
    aside = to.with_name(f".{to.name}.{os.getpid()}")
    images = _Images(questions, to)
    try:
        with _WRITERS[to.suffix](aside, header) as write:
            count = 0
            for rows in pages(questions, where):
                if tokens:
                    ids = [row["id"] for row in rows]
                    payloads = questions.payload(ids)
                    trainer_tokens = questions.trainer_tokens(ids)
                    rows = [
                        {
                            **row,
                            **unpacked(payloads[x], trainer_tokens.get(x)),
                            "images": images.written(payloads[x]),
                        }
                        for x, row in zip(ids, rows, strict=True)
                    ]
                write(rows)
                on_progress(count := count + len(rows))
        if to.exists():
            raise ConfigError(
                f"{to} appeared meanwhile and is not overwritten", key="--to", given=str(to)
            )
        images.complete()
        aside.rename(to)
    except OSError as e:
        raise ConfigError(
            f"{to} cannot be written: {e.strerror or e}; name another file",
            key="--to",
            given=str(to),
        ) from e
    finally:
        aside.unlink(missing_ok=True)
        images.close()
    return count


class _Images:
    """The files of images that are exported to `to`."""

    def __init__(self, questions: Questions, to: Path) -> None:
        self._questions = questions
        self._folder = to.with_name(f"{to.stem}.images")
        self._aside = to.with_name(f".{self._folder.name}.{os.getpid()}")
        self._names: set[str] = set()

    def written(self, row: Experience) -> list[str]:
        """Write what `row` shows; return the paths, each once.  Raises ConfigError, OSError."""
        names = list(dict.fromkeys(place.sha256 for place in row.images))
        for name in (n for n in names if n not in self._names):
            if not self._names:
                self._refuse_another()
                self._aside.mkdir()
            (self._aside / name).write_bytes(self._questions.image(name))
            self._names.add(name)
        return [f"{self._folder.name}/{name}" for name in names]

    def complete(self) -> None:
        if self._names:
            self._refuse_another()
            self._aside.rename(self._folder)

    def close(self) -> None:
        shutil.rmtree(self._aside, ignore_errors=True)

    def _refuse_another(self) -> None:
        if self._folder.exists():
            raise ConfigError(
                f"{self._folder}, for its images, exists and is not overwritten; name another file",
                key="--to",
                given=str(self._folder),
            )


def pages(questions: Questions, where: str) -> Iterator[list[dict[str, Any]]]:
    """Yield rows of v_experiences that fulfil `where`, by id, PAGE at a time."""
    last = ""
    while True:
        rows = questions.page(where, last, PAGE)
        if rows:
            yield rows
            last = rows[-1]["id"]
        if len(rows) < PAGE:
            return


def schema(questions: Questions) -> pa.Schema:
    """Return the columns of v_experiences with the ledger's column types; columns of no table are
    steps, times or texts.
    """
    kinds = {
        name: column.type for table in (texts, experiences) for name, column in table.c.items()
    }
    kinds |= {"leased_step": Integer(), "used_step": Integer(), "leased": Float(), "used": Float()}
    return pa.schema(
        [(name, _arrow(kinds.get(name))) for name in questions.columns("v_experiences")]
    )


def as_table(rows: list[dict[str, Any]], columns: pa.Schema) -> pa.Table:
    """Convert rows of `pages` to a table with the columns of `schema`."""
    arrays = [pa.array(_typed([row[f.name] for row in rows], f.type), f.type) for f in columns]
    return pa.Table.from_arrays(arrays, schema=columns)


def _arrow(kind: TypeEngine[Any] | None) -> pa.DataType:
    if isinstance(kind, Boolean):
        return pa.bool_()
    return (
        pa.int64()
        if isinstance(kind, Integer)
        else pa.float64()
        if isinstance(kind, Float)
        else pa.string()
    )


def unpacked(x: Experience, trainer: TrainerTokens | None) -> dict[str, Any]:
    """Return the columns from the payload and from the trainer: arrays unchanged, the rest as JSON."""
    return {
        "tokens": x.tokens,
        "loss_mask": x.loss_mask,
        "logprobs": x.logprobs if x.has_logprobs else None,
        "trainer_logprobs": None if trainer is None else trainer.logprobs,
        "advantages": None if trainer is None else trainer.advantages,
        "token_rewards": x.token_rewards,
        "teacher_logprobs": x.teacher_logprobs,
        "teacher_top_ids": _lists(x.teacher_top_ids),
        "teacher_top_logprobs": _lists(x.teacher_top_logprobs),
        **{
            name: [
                {"version": str(s.version), "start": s.start, "end": s.end}
                for s in getattr(x, name)
            ]
            for name in ("teacher_spans", "version_spans")
        },
        **{
            name: msgspec.json.encode(getattr(x, name)).decode()
            for name in ("messages", "tools", "metrics", "info")
        },
        "image_places": [msgspec.structs.asdict(place) for place in x.images],
    }


def _lists(values: np.ndarray | None) -> list[np.ndarray] | None:
    """Return the rows of [R, k], in float32 where they are numbers of a shorter type."""
    if values is None:
        return None
    return list(values.astype(np.float32) if values.dtype == np.float16 else values)


@contextmanager
def _parquet(path: Path, columns: pa.Schema) -> Iterator[_Write]:
    """Write Parquet; rows are collected until a row group is full."""
    tables: list[pa.Table] = []

    def flush() -> None:
        if tables:
            table = pa.concat_tables(tables)
            writer.write_table(table, row_group_size=table.num_rows)
            tables.clear()

    def write(rows: list[dict[str, Any]]) -> None:
        tables.append(as_table(rows, columns))
        if (
            sum(t.num_rows for t in tables) >= GROUP_ROWS
            or sum(t.nbytes for t in tables) >= GROUP_BYTES
        ):
            flush()

    with pq.ParquetWriter(path, columns, compression="zstd") as writer:
        yield write
        flush()


@contextmanager
def _lines(path: Path, columns: pa.Schema) -> Iterator[_Write]:
    """Write one JSON object per line, with the columns of the schema."""

    def write(rows: list[dict[str, Any]]) -> None:
        values = [_typed([row[f.name] for row in rows], f.type) for f in columns]
        for row in zip(*values, strict=True):
            file.write(
                msgspec.json.encode(
                    dict(zip(columns.names, row, strict=True)),
                    enc_hook=lambda array: array.tolist(),
                )
                + b"\n"
            )

    with path.open("xb") as file:
        yield write


def _typed(values: list[Any], kind: pa.DataType) -> list[Any]:
    """Convert a column: SQLite stores booleans as numbers and may return whole floats as integers."""
    if pa.types.is_boolean(kind):
        return [None if v is None else bool(v) for v in values]
    return (
        [None if v is None else float(v) for v in values] if pa.types.is_floating(kind) else values
    )


_WRITERS: dict[str, Any] = {".parquet": _parquet, ".jsonl": _lines}

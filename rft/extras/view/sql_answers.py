"""Answers to SQL questions of people: a limited table for the page, CSV or Parquet whole.

Depends on `Questions.ask`, which only reads.  Invariant: a question has a connection and a thread
of its own, so it holds up no page; a long answer is sent as it is read, and never takes more memory
than MEMORY_BYTES in SQLite and two portions of rows here.
"""

from __future__ import annotations

import asyncio
import csv
import io
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rft.buffer.query import num_bytes_of, open_run, row_portions
from rft.errors import ConfigError

KINDS = {"csv": "text/csv; charset=utf-8", "parquet": "application/vnd.apache.parquet"}
SHOWN_ROWS = 1000
SHOWN_BYTES = 2 << 20  # of the values that the page shows
SHOWN_CHARS = 501  # of a value: the page shows 500 and a mark
VALUE_BYTES = 16 << 20  # of one value that SQLite computes
MEMORY_BYTES = 256 << 20  # of SQLite in the process of `rft view`
TIMEOUT_S = 60.0
_FILE_TIMEOUT_S = 600.0
_AT_ONCE = asyncio.Semaphore(2)
EXAMPLES = {
    "How is each batch "
    "doing?": """SELECT batch, count(*) AS runs, avg(reward) AS reward, avg(num_response_tokens) AS length,
  sum(CASE WHEN status = 'truncated' THEN 1 ELSE 0 END) AS truncated
FROM v_runs WHERE status <> 'failed' GROUP BY batch ORDER BY batch""",
    "The worst answers of step 10": """SELECT id, reward, response_text FROM v_experiences
WHERE used_step = 10 AND reward IS NOT NULL ORDER BY reward LIMIT 10""",
    "Why was something not "
    "trained?": """SELECT explained, reason, count(*) AS experiences, max(batch) AS last_batch FROM v_experiences
WHERE state = 'explained' OR status = 'failed' GROUP BY explained, reason ORDER BY experiences DESC""",
    "Tasks whose runs all got the same "
    "reward": """SELECT taskset, task_index, reward_mean, num_scored FROM v_groups
WHERE reward_min = reward_max ORDER BY reward_mean LIMIT 20""",
    "How stale was each "
    "step?": """SELECT train_step, avg(staleness) AS mean, max(staleness) AS largest, count(*) AS experiences
FROM v_lineage WHERE counts = 1 GROUP BY train_step ORDER BY train_step""",
    "Tokens by weight "
    "version": """SELECT version_lineage, version_step, count(DISTINCT id) AS experiences, sum(num_tokens) AS tokens
FROM v_tokens GROUP BY version_lineage, version_step ORDER BY version_lineage, version_step""",
    "Tokens with the largest advantages (kept)": """SELECT id, token_start, advantage FROM v_tokens
WHERE advantage IS NOT NULL ORDER BY abs(advantage) DESC LIMIT 20""",
    "Engine and trainer apart (kept "
    "log-probs)": """SELECT id, token_start, logprob, trainer_logprob FROM v_tokens
WHERE trainer_logprob IS NOT NULL ORDER BY abs(trainer_logprob - logprob) DESC LIMIT 20""",
}


@dataclass(frozen=True)
class SqlAnswer:
    """What the page shows; `more`: why rows after these are not shown, "" where none are."""

    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    more: str


async def answer(run_dir: Path, sql: str) -> SqlAnswer:
    """The first rows.  Raises ConfigError that says what is wrong with the question."""

    def read() -> SqlAnswer:
        with (
            open_run(run_dir, longest=VALUE_BYTES) as questions,
            questions.ask(sql, timeout_s=TIMEOUT_S) as answer,
        ):
            return _shown(answer.columns, answer.rows)

    async with _AT_ONCE:
        return await asyncio.to_thread(read)


def _shown(columns: tuple[str, ...], rows: Iterator[Sequence[Any]]) -> SqlAnswer:
    """The first rows with values cut, within SHOWN_ROWS and SHOWN_BYTES."""
    shown: list[tuple[Any, ...]] = []
    size = 0
    for row in rows:
        if len(shown) == SHOWN_ROWS:
            return SqlAnswer(columns, shown, f"the page shows {SHOWN_ROWS}")
        if size > SHOWN_BYTES:
            return SqlAnswer(columns, shown, f"the page shows {SHOWN_BYTES >> 20} MiB")
        shown.append(tuple(map(_cut, row)))
        size += sum(map(num_bytes_of, shown[-1]))
    return SqlAnswer(columns, shown, "")


def _cut(value: Any) -> Any:
    return value[:SHOWN_CHARS] if isinstance(value, str | bytes | memoryview) else value


async def chunks(run_dir: Path, sql: str, kind: str) -> AsyncGenerator[bytes]:
    """All rows as a file of `kind`, piece by piece.  Raises ConfigError."""
    write: Callable[[tuple[str, ...], Iterator[Sequence[Any]]], Iterator[bytes]] = (
        _csv if kind == "csv" else _parquet
    )

    def pieces() -> Generator[bytes, None, None]:
        with (
            open_run(run_dir, longest=VALUE_BYTES) as questions,
            questions.ask(sql, timeout_s=_FILE_TIMEOUT_S) as answer,
        ):
            yield from write(answer.columns, answer.rows)

    chunks_iterator = pieces()
    async with _AT_ONCE:
        try:
            while (piece := await asyncio.to_thread(next, chunks_iterator, None)) is not None:
                yield piece
        finally:
            await asyncio.to_thread(chunks_iterator.close)


def _csv(columns: tuple[str, ...], rows: Iterator[Sequence[Any]]) -> Iterator[bytes]:
    """As `rft buffer query -f csv` writes into a file."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for part in row_portions(rows):
        writer.writerows([[_bytes_of_views(v) for v in row] for row in part])
        yield text.getvalue().encode("utf-8", "backslashreplace")
        text.seek(0)
        text.truncate()
    if head := text.getvalue():  # of an answer without rows
        yield head.encode()


def _parquet(columns: tuple[str, ...], rows: Iterator[Sequence[Any]]) -> Iterator[bytes]:
    """Types are those of the first portion; a column whose values change their type later is
    refused.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    if len(set(columns)) < len(columns):
        raise ConfigError(
            "has two columns of one name, which Parquet does not allow; name them with AS",
            key="SQL",
        )
    sink = _Sink()
    writer = None
    try:
        portions = row_portions(rows)
        while (part := next(portions, [])) or writer is None:
            columns_of = {
                c: [_bytes_of_views(row[i]) for row in part] for i, c in enumerate(columns)
            }
            table = pa.table(columns_of, schema=None if writer is None else writer.schema)
            if writer is None:
                types = [
                    pa.field(f.name, pa.string() if pa.types.is_null(f.type) else f.type)
                    for f in table.schema
                ]
                writer = pq.ParquetWriter(sink, pa.schema(types))
            writer.write_table(table.cast(writer.schema))
            yield sink.take()
    except (pa.ArrowInvalid, pa.ArrowTypeError) as e:
        raise ConfigError(
            f"has a column of several types, which Parquet does not allow: {e}; CAST it, or take "
            f"CSV",
            key="SQL",
        ) from e
    finally:
        if writer is not None:
            writer.close()
    yield sink.take()


class _Sink:
    """A file that is sent while it is written: it knows how long it is, and holds what was not
    taken yet.
    """

    closed = False

    def __init__(self) -> None:
        self._chunks: list[bytes] = []
        self._size = 0

    def write(self, data: Any) -> int:
        self._chunks.append(bytes(data))
        self._size += len(self._chunks[-1])
        return len(self._chunks[-1])

    def tell(self) -> int:
        return self._size

    def flush(self) -> None: ...

    def take(self) -> bytes:
        data = b"".join(self._chunks)
        self._chunks = []
        return data


def _bytes_of_views(value: Any) -> Any:
    return bytes(value) if isinstance(value, memoryview) else value

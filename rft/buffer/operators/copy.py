"""A copy of every experience as it was played, before any operator, as lines of JSON for people and other programs.

Knows nothing of the ledger; it is no part of the accounting.  Invariant: each line is whole; a line cut off by a crash is taken away
when the file is opened again, and a later lineage adds to it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from typing import Any

import msgspec

from rft.errors import RunFailed
from rft.types.experience import Experience

KEY = "data_processor.experience_pipeline.input_save_path"
_PIECE = 1 << 20


class InputCopy:
    """The jsonl file at `path`.  Lines are made and written in a thread; a group waits for its own lines, so nothing piles up."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: FileIO | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="experience-copy")  # jobs in order, also when a caller gives up

    async def open(self) -> None:
        """Raises RunFailed where the file cannot be written."""
        await self._work(self._open)

    async def write(self, rows: Sequence[Experience]) -> None:
        await self._work(lambda: self._write(rows))

    async def close(self) -> None:
        """May be repeated."""
        if self._file is not None:
            await self._work(self._close)
        self._thread.shutdown()

    async def _work(self, job: Callable[[], None]) -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, job)
        except OSError as e:
            raise RunFailed(f"{self._path} cannot be written: {e}.  Make room, or set {KEY} or save_input: false") from e

    def _open(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("a+b", buffering=0)
        whole = _whole_lines(self._file)
        if whole != self._file.seek(0, os.SEEK_END):
            os.ftruncate(self._file.fileno(), whole)

    def _write(self, rows: Sequence[Experience]) -> None:
        assert self._file is not None, "write after open"
        rest = memoryview(b"".join(msgspec.json.encode(as_line(r)) + b"\n" for r in rows))
        while rest:
            rest = rest[self._file.write(rest) :]

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()


def as_line(row: Experience) -> dict[str, Any]:
    """One experience as JSON values: all its fields, arrays as lists, its id as text."""
    line: dict[str, Any] = {"id": str(row.id), "group": str(row.group)}
    for name in row.__struct_fields__:
        if name != "id":
            value = getattr(row, name)
            line[name] = value.tolist() if hasattr(value, "tolist") else value
    line["version_spans"] = [{"version": str(s.version), "start": s.start, "end": s.end} for s in row.version_spans]
    return line


def _whole_lines(file: FileIO) -> int:
    """Bytes up to and with the last end of a line."""
    at = file.seek(0, os.SEEK_END)
    while at > 0:
        start = max(0, at - _PIECE)
        file.seek(start)
        if (found := file.read(at - start).rfind(b"\n")) >= 0:
            return start + found + 1
        at = start
    return 0

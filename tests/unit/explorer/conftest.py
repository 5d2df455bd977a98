"""What the explorer sees of the others, in memory: a gate a test can close, a buffer that
remembers, a sink that keeps.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from rft.engine.scripted import ScriptedEngine
from rft.errors import WeightSyncFailed
from rft.explorer.assign import Assignments, BatchAssigner
from rft.explorer.explorer import Explorer
from rft.explorer.settings import ExplorerSettings
from rft.sync.waits import Waits
from rft.taskset.settings import TasksetSettings
from rft.types.block import decode
from rft.types.ids import Version
from rft.types.ports import AppendResult, Assignment, StoredGroup, TaskOutcome


class MemoryBuffer:
    def __init__(self, held: list[StoredGroup] | None = None) -> None:
        self.groups: list[tuple[list[Any], bool, str]] = []
        self.closed: list[tuple[int, int, int, dict[str, int]]] = []
        self.finished: str | None = None
        self._held = held or []
        self.full = asyncio.Event()
        self.full.set()

    @property
    def rows(self):
        return [r for rows, _, _ in self.groups for r in rows]

    async def append(self, frame: bytes, *, accepted: bool, reason: str = "") -> AppendResult:
        rows = decode(frame)
        self.groups.append((rows, accepted, reason))
        return AppendResult(appended=len(rows), duplicates=0)

    async def room(self, batch: int) -> None:
        await self.full.wait()

    async def close_batch(
        self, batch: int, *, accepted: int, expected: int, reasons: dict[str, int]
    ) -> None:
        self.closed.append((batch, accepted, expected, reasons))

    async def stored_groups(self, first_batch: int) -> list[StoredGroup]:
        return [h for h in self._held if h.batch >= first_batch]

    async def outcomes(self, first_batch: int, end_batch: int) -> list[TaskOutcome]:
        scored = [
            (g[0].id.batch, g[0].id.task, g[0], [r.reward for r in g if r.reward is not None])
            for g, _, _ in self.groups
            if first_batch <= g[0].id.batch < end_batch
        ]
        return [
            TaskOutcome(
                batch, task, x.taskset, x.task_index, sum(rewards) / len(rewards), len(rewards)
            )
            for batch, task, x, rewards in sorted(scored, key=lambda s: s[:2])
            if rewards
        ]

    async def check_taskset_fingerprints(self, fingerprints: dict[str, str]) -> list[str]:
        self.fingerprints = fingerprints
        return []

    async def finish(self, reason: str) -> None:
        self.finished = reason


class Gate:
    """Lets batches below `limit` start; `open(n)` raises it.  Every version counts as served,
    unless `unproven` holds it back.
    """

    def __init__(self, limit: int = 10**6) -> None:
        self.limit = limit
        self.trained_out = False
        self.explored_batches: list[int] = []
        self.unproven: set[Version] = set()
        self.rejected: set[Version] = set()
        self.broken: str | None = None
        self.asked: list[Version] = []
        self._changed = asyncio.Condition()
        self.assigner: BatchAssigner

    async def next_batch(
        self, *, lag: int | None, fingerprint: str, total: int | None
    ) -> Assignment | str:
        self.assigner.assignments.total = total
        return await self.assigner.next("explorer", lag)

    async def evaluates(self) -> bool:
        return True

    async def open(self, limit: int, *, finished: bool = False) -> None:
        async with self._changed:
            self.limit = limit
            self.trained_out = finished
            self._changed.notify_all()

    async def prove(self, version: Version) -> None:
        async with self._changed:
            self.unproven.discard(version)
            self._changed.notify_all()

    async def may_explore(self, batch: int) -> Version | None:
        async with self._changed:
            await self._changed.wait_for(lambda: batch < self.limit or self.trained_out)
        return Version(1, batch) if batch < self.limit else None

    async def wait_verified(self, version: Version) -> bool:
        async with self._changed:
            self.asked.append(version)
            self._changed.notify_all()
        if self.broken:
            raise WeightSyncFailed(self.broken)
        async with self._changed:
            await self._changed.wait_for(lambda: version not in self.unproven)
        return version not in self.rejected

    async def until_asked(self, version: Version) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: version in self.asked)

    async def explored(self, batch: int) -> None:
        await self.assigner.close(batch)
        async with self._changed:
            self.explored_batches.append(batch)
            self._changed.notify_all()

    async def until_explored(self, batch: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: batch in self.explored_batches)

    async def wait_final(self) -> Version:
        return Version(1, 99)


class Sink:
    def __init__(self) -> None:
        self.records: list[Any] = []
        self.tables: list[tuple[str, int, list[dict[str, Any]]]] = []

    async def log(self, record: Any) -> None:
        self.records.append(record)

    async def samples(self, name: str, step: int, rows: list[dict[str, Any]]) -> None:
        self.tables.append((name, step, rows))

    def of(self, role: str) -> dict[int, dict[str, float]]:
        return {r.step: r.values for r in self.records if r.role == role}


class World:
    """One explorer over tasks "1+1?", "2+2?" ... whose answer a test scripts."""

    def __init__(self, folder: Path) -> None:
        self.engine = ScriptedEngine(answer=lambda messages: messages[-1]["content"][0])
        self.buffer = MemoryBuffer()
        self.gate = Gate()
        self.sink = Sink()
        self._file = folder / "sums.jsonl"
        self._file.write_text(
            "".join(
                json.dumps({"prompt": f"{i}+{i}?", "response": str(2 * i)}) + "\n" for i in range(8)
            )
        )

    def taskset(self, name: str = "sums", **changes: Any) -> TasksetSettings:
        return TasksetSettings(
            **{
                "name": name,
                "path": str(self._file),
                "workflow": "simple_workflow",
                "reward": "exact_answer",
                "num_runs": 2,
                **changes,
            }
        )

    def explorer(
        self,
        *,
        lineage: int = 1,
        cursor: int = 0,
        resumes_evaluation: bool = False,
        models: Any = None,
        **changes: Any,
    ) -> Explorer:
        assignments = Assignments(cursor, None, changes.get("max_inflight"))
        self.gate.assigner = BatchAssigner(
            assignments, self.buffer.room, self.gate.may_explore, Waits(60.0)
        )
        changes = {
            "tasksets": (self.taskset(),),
            "batch_size": 2,
            "total_batches": 3,
            "max_retry_times": 0,
            **changes,
        }
        return Explorer(
            ExplorerSettings(**changes),
            model=self.engine,
            buffer=self.buffer,
            gate=self.gate,
            sink=self.sink,
            lineage=lineage,
            cursor=cursor,
            resumes_evaluation=resumes_evaluation,
            models=models or {},
        )


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)

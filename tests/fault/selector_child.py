"""A small run in one process: explorer with a selector that learns, the real buffer, a trainer that
only counts.

    python selector_child.py FOLDER LAG [KILL_AFTER_GROUPS]

The checkpoint is FOLDER/checkpoint.json, every second step.  At the end it prints which row each
task of each batch was.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import msgspec

from rft.buffer.buffer import Buffer
from rft.buffer.settings import BufferSettings
from rft.engine.scripted import ScriptedEngine
from rft.explorer.assign import Assignments, BatchAssigner
from rft.explorer.explorer import Explorer
from rft.explorer.settings import ExplorerSettings
from rft.sync.waits import Waits
from rft.taskset.settings import TasksetSettings
from rft.types.completion import Score
from rft.types.ids import Version
from rft.types.ports import Consumption
from rft.workflow.base import Workflow, workflow

BATCHES = 9
BATCH = 4


class Checkpoint(msgspec.Struct):
    version: Version
    consumption: Consumption


@workflow("selector_child_rates")
class Rates(Workflow):
    """A reward that depends on row and run alone, so that a row played again turns out the same."""

    async def run(self, task, ctx):
        await ctx.chat(task.chat())
        return ctx.transcript(score=Score(value=float((task.index * 7 + ctx.run) % 5 < 2)))


class Gate:
    """Batch b begins when `lag` steps less than b are trained; the engine's weights are then those
    of the last step.
    """

    def __init__(self, engine: ScriptedEngine, lineage: int, step: int, lag: int) -> None:
        self.engine = engine
        self.lineage = lineage
        self.step = step
        self.lag = lag
        self.changed = asyncio.Condition()
        engine.version = Version(lineage, step)

    async def step_finished(self, step: int) -> None:
        async with self.changed:
            self.step = step
            self.engine.version = Version(self.lineage, step)
            self.changed.notify_all()

    async def may_explore(self, batch: int) -> Version | None:
        async with self.changed:
            await self.changed.wait_for(lambda: self.step >= batch - self.lag)
        return Version(self.lineage, self.step)

    async def wait_verified(self, version: Version) -> bool:
        return True

    async def next_batch(self, *, lag, fingerprint, total):
        self.assigner.assignments.total = total
        return await self.assigner.next("explorer", lag)

    async def evaluates(self) -> bool:
        return True

    async def explored(self, batch: int) -> None:
        await self.assigner.close(batch)

    async def wait_final(self) -> Version:
        return Version(self.lineage, self.step)


class Sink:
    async def log(self, record) -> None: ...
    async def samples(self, name, step, rows) -> None: ...


class Killed:
    """A writer after whose `left`-th group the process is gone."""

    def __init__(self, writer, left: int) -> None:
        self._writer = writer
        self._left = left

    def __getattr__(self, name):
        return getattr(self._writer, name)

    async def append(self, frame, *, accepted, reason=""):
        result = await self._writer.append(frame, accepted=accepted, reason=reason)
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return result


async def main(folder: Path, lag: int, kill_after: int) -> None:
    rows = folder / "rows.jsonl"
    if not rows.exists():
        lines = [{"prompt": f"{i}?", "weak": i / 60, "strong": min(1, i / 30)} for i in range(30)]
        rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    file = folder / "checkpoint.json"
    found = msgspec.json.decode(file.read_bytes(), type=Checkpoint) if file.exists() else None
    buffer = Buffer(BufferSettings(folder=folder / "buffer"))
    await buffer.open()
    start = await buffer.start_lineage(
        found.version if found else None, found.consumption if found else None
    )
    step = found.version.step if found else 0
    engine = ScriptedEngine(answer=lambda messages: "4")
    gate = Gate(engine, start.lineage, step, lag)
    writer = buffer.writer(start.lineage)
    gate.assigner = BatchAssigner(
        Assignments(start.cursor, None), writer.room, gate.may_explore, Waits(60)
    )
    taskset = TasksetSettings(
        name="rates",
        path=str(rows),
        workflow="selector_child_rates",
        num_runs=4,
        selector="difficulty_based",
        feature_keys=("weak", "strong"),
        selector_args={"target_reward": 0.5, "tau": 0.1},
    )
    explorer = Explorer(
        ExplorerSettings(
            tasksets=(taskset,),
            batch_size=BATCH,
            total_batches=BATCHES,
            feedback_lag=lag,
            eval_at_end=False,
        ),
        model=engine,
        buffer=Killed(buffer.writer(start.lineage), kill_after),
        gate=gate,
        sink=Sink(),
        lineage=start.lineage,
        cursor=start.cursor,
    )
    reader = buffer.reader(start.lineage)

    async def train() -> None:
        for t in range(step + 1, BATCHES + 1):
            await reader.lease(t, groups=BATCH, rows=None, deadline_s=30, max_staleness=None)
            await reader.use(t)
            if t % 2 == 0:
                made = Checkpoint(Version(start.lineage, t), await reader.consumption(t))
                aside = file.with_suffix(".tmp")
                aside.write_bytes(msgspec.json.encode(made))
                aside.rename(file)
            await gate.step_finished(t)

    async with asyncio.timeout(60), asyncio.TaskGroup() as both:
        both.create_task(train())
        both.create_task(explorer.run())
    audit = await buffer.audit()
    chosen = {
        f"{o.batch}.{o.task}": o.index for o in await buffer.outcomes(start.lineage, 0, BATCHES)
    }
    await buffer.close()
    print(
        json.dumps(
            {
                "chosen": chosen,
                "ok": audit.ok,
                "twice": audit.used_twice,
                "lineage": start.lineage,
                "cursor": start.cursor,
            }
        )
    )


if __name__ == "__main__":
    asyncio.run(
        main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0)
    )

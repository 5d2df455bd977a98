"""The explorer with the real buffer: what is stored is not played again, what was in flight is."""

from __future__ import annotations

import asyncio

from rft.buffer.buffer import Buffer
from rft.buffer.settings import BufferSettings
from rft.types.block import decode
from rft.workflow.base import Workflow, workflow


class Counting:
    """A buffer writer that tells when `count` groups are stored."""

    def __init__(self, writer, count):
        self._writer = writer
        self._left = count
        self.reached = asyncio.Event()

    def __getattr__(self, name):
        return getattr(self._writer, name)

    async def append(self, frame, *, accepted, reason=""):
        result = await self._writer.append(frame, accepted=accepted, reason=reason)
        self._left -= 1
        if self._left == 0:
            self.reached.set()
        return result


async def test_a_restarted_explorer_goes_on_where_the_buffer_stands(world, tmp_path):
    free = asyncio.Event()

    @workflow("test_last_two_wait")
    class LastTwoWait(Workflow):
        async def run(self, task, ctx):
            if task.index >= 6:
                await free.wait()
            await ctx.chat(task.chat())
            return ctx.transcript()

    buffer = Buffer(BufferSettings(folder=tmp_path / "buffer"))
    await buffer.open()
    try:
        lineage = (await buffer.start_lineage(None, None)).lineage
        world.buffer = writer = Counting(buffer.writer(lineage), 6)
        settings = {
            "total_batches": 3,
            "batch_size": 4,
            "tasksets": (world.taskset(workflow="test_last_two_wait"),),
        }
        async with asyncio.timeout(120):
            world.gate.limit = 2
            first = world.explorer(lineage=lineage, **settings)
            job = asyncio.ensure_future(first.run())
            await writer.reached.wait()  # batch 0 and half of batch 1
            await first.stop()
            await job
            assert {(h.batch, h.task) for h in await writer.stored_groups(0)} == {
                (0, 0),
                (0, 1),
                (0, 2),
                (0, 3),
                (1, 0),
                (1, 1),
            }
            world.engine.calls.clear()
            free.set()
            await world.gate.open(3)
            await world.explorer(lineage=lineage, **settings).run()
            assert len(world.engine.calls) == 2 * 6
            reader = buffer.reader(lineage)
            rows = []
            for step in (1, 2, 3):
                rows += decode(
                    (
                        await reader.lease(
                            step, groups=4, rows=None, deadline_s=10, max_staleness=None
                        )
                    ).frame
                )
                await reader.use(step)
        assert [(r.id.batch, r.id.task, r.id.run) for r in rows] == [
            (b, t, r) for b in range(3) for t in range(4) for r in range(2)
        ]
        audit = await buffer.audit()
        assert audit.acked == audit.used == 24
    finally:
        await buffer.close()

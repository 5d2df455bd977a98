"""Pass rates out of the ledger: of every scored group that stands, whoever asks."""

from __future__ import annotations

import msgspec
import numpy as np

from rft.buffer.buffer import Buffer
from rft.buffer.settings import BufferSettings
from rft.types.block import encode
from rft.types.completion import VersionSpan
from rft.types.experience import Experience, failed
from rft.types.ids import GroupId, Version
from rft.types.ports import TaskOutcome


def member(group: GroupId, run: int, reward: float | None, version: Version) -> Experience:
    return Experience(
        id=group.run(run, 0),
        taskset="sums",
        task_index=10 * group.task,
        workflow="w",
        status="complete",
        finish_reason="stop",
        tokens=np.array([1, 2, 3], np.int32),
        loss_mask=np.array([False, True, True]),
        logprobs=np.array([0, -0.5, -0.5], np.float32),
        has_logprobs=True,
        version_spans=(VersionSpan(version, 1, 3),),
        reward=reward,
    )


async def test_outcomes_of_standing_groups(tmp_path):
    buffer = Buffer(BufferSettings(folder=tmp_path))
    await buffer.open()
    try:
        await buffer.start_lineage(None, None)
        writer = buffer.writer(1)
        old = Version(1, 0)

        async def put(batch: int, task: int, *rewards: float | None, accepted: bool = True) -> None:
            group = GroupId(1, 0, batch, task)
            await writer.append(
                encode([member(group, run, r, old) for run, r in enumerate(rewards)]),
                accepted=accepted,
                reason="" if accepted else "filtered",
            )

        await put(0, 1, 1.0, 0.0, 1.0)
        await put(0, 0, 0.0, 0.0, accepted=False)
        await put(1, 0, 1.0, 1.0)
        await put(2, 0, 0.5, 0.5)
        lost = GroupId(1, 0, 1, 1)
        await writer.append(
            encode(
                [failed(lost.run(0, 0), taskset="sums", task_index=3, workflow="w", reason="x")]
            ),
            accepted=False,
            reason="failed",
        )
        found = await writer.outcomes(0, 2)
        assert found == [
            TaskOutcome(0, 0, "sums", 0, 0.0, 2),
            TaskOutcome(0, 1, "sums", 10, 2 / 3, 3),
            TaskOutcome(1, 0, "sums", 0, 1.0, 2),
        ]
        assert await writer.outcomes(0, 2) == found and [
            o.batch for o in await writer.outcomes(2, 9)
        ] == [2]
        # from the base model: what lineage 1 wrote stands no more
        await buffer.start_lineage(None, None)
        assert await buffer.writer(2).outcomes(0, 9) == []
    finally:
        await buffer.close()


async def test_a_run_of_several_steps_counts_once(tmp_path):
    buffer = Buffer(BufferSettings(folder=tmp_path))
    await buffer.open()
    try:
        await buffer.start_lineage(None, None)
        group = GroupId(1, 0, 0, 0)
        old = Version(1, 0)
        steps = [
            msgspec.structs.replace(member(group, 0, 1.0, old), id=group.run(0, 0, step))
            for step in range(3)
        ]
        await buffer.writer(1).append(encode([*steps, member(group, 1, 0.0, old)]), accepted=True)
        assert await buffer.writer(1).outcomes(0, 1) == [TaskOutcome(0, 0, "sums", 0, 0.5, 2)]
    finally:
        await buffer.close()

"""A canary that fails while explore batches are under way, in simulated time: the version is tried
again and the run goes on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rft import fault_injection as faults
from rft.sync.schedule import Schedule
from rft.types.block import decode
from rft.types.ids import Version
from tests.helpers import simulated


@pytest.mark.parametrize(
    "schedule", [Schedule(offset=2), Schedule(style="fully_async", interval=2, threshold=0.5)]
)
def test_rows_of_a_failed_attempt_are_explained_and_never_train(
    schedule: Schedule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: set[Version] = set()
    score = simulated.Ranks.score
    train = simulated.SimTrainer._train

    async def slow_score(ranks: Any, rows: Any) -> Any:
        await simulated.asyncio.sleep(1.5)  # rollouts of the provisional version end meanwhile
        return await score(ranks, rows)

    async def seen_train(trainer: Any, lease: Any) -> Any:
        trained.update(s.version for x in decode(lease.frame) for s in x.version_spans)
        return await train(trainer, lease)

    monkeypatch.setattr(simulated.Ranks, "score", slow_score)
    monkeypatch.setattr(simulated.SimTrainer, "_train", seen_train)
    faults._visits.clear()
    # the third load claims success and does nothing
    monkeypatch.setenv(faults.VARIABLE, "sync.skip:3")
    world = simulated.World(
        schedule=schedule, steps=8, explore_s=(1.0,), train_s=(0.5,), max_refill=4
    )
    found = simulated.play(world, tmp_path)
    assert len(found.steps) == world.steps and found.audit.ok
    second = {v for v in trained if v.attempt == 1}
    assert len(second) == 1, "the second attempt was served, and its rows train"
    failed = next(iter(second)).published
    assert failed not in trained and {v.published for v in trained} >= {failed}
    rejected = [
        r for r in found.records if r.role == "explorer" and r.values.get("rollout/failed", 0) > 0
    ]
    assert rejected, "some groups of the failed attempt ended before its canary"


def test_what_replaces_rows_of_a_failed_attempt_is_no_older_than_the_schedule_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On-policy: it waits for the second attempt instead of being written by the version before,
    which is served in between.
    """
    late: list[tuple[int, Version]] = []
    score = simulated.Ranks.score
    train = simulated.SimTrainer._train

    async def slow_score(ranks: Any, rows: Any) -> Any:
        await simulated.asyncio.sleep(1.5)
        return await score(ranks, rows)

    async def seen_train(trainer: Any, lease: Any) -> Any:
        versions = (s.version for x in decode(lease.frame) for s in x.version_spans)
        late.extend((lease.step, v) for v in versions if v.step < lease.step - 1)
        return await train(trainer, lease)

    monkeypatch.setattr(simulated.Ranks, "score", slow_score)
    monkeypatch.setattr(simulated.SimTrainer, "_train", seen_train)
    faults._visits.clear()
    monkeypatch.setenv(faults.VARIABLE, "sync.skip:3")
    world = simulated.World(
        schedule=Schedule(), steps=4, explore_s=(1.0,), train_s=(0.5,), max_refill=8
    )
    found = simulated.play(world, tmp_path)
    assert len(found.steps) == world.steps and found.audit.ok and late == []

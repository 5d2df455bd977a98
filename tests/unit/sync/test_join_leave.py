"""Engines of explorers that come and go: proven before they count, let go without harm to the
others.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from rft.engine.scripted import ScriptedEngine, logprobs, weights_key
from rft.errors import DeadlineExceeded, EngineFailed, WeightSyncFailed
from rft.sync.schedule import Schedule
from rft.sync.settings import SyncRuntime, TrainerDrivenSync
from rft.sync.synchronizer import Synchronizer
from rft.types.ids import Version
from rft.types.ports import WeightManifest

PROMPTS = [[1, 2, i] for i in range(8)]


class Trainer:
    key = 0

    def stage(self, step: int) -> WeightManifest:
        made = WeightManifest(version=Version(1, step), transport="memory", path="", tensors=())
        self.key = weights_key(made)
        return made

    async def score(self, rows: Any) -> list[np.ndarray]:
        return [
            logprobs(r.tokens[: r.prompt_length], r.tokens[r.prompt_length :], self.key)
            for r in rows
        ]


class Mortal(ScriptedEngine):
    """Dies in the load of step `dies_at`."""

    def __init__(self, *, dies_at: int | None = None) -> None:
        super().__init__(answer=lambda messages: "x")
        self.dies_at = dies_at
        self.loaded: list[int] = []

    async def load(self, manifest: WeightManifest) -> Any:
        if self.dies_at == manifest.version.step:
            raise EngineFailed("its process is gone")
        self.loaded.append(manifest.version.step)
        return await super().load(manifest)


def synchronizer(trainer: Trainer, **more: Any) -> Synchronizer:
    async def restart(index: int) -> None:
        raise EngineFailed("nobody owns it")

    config = TrainerDrivenSync(sync_timeout=more.pop("sync_timeout", 20.0))
    schedule = Schedule(style="trainer_driven")
    return Synchronizer(
        config, SyncRuntime(), (), trainer, schedule, PROMPTS, Version(1, 0), restart, **more
    )


async def test_the_first_version_waits_for_the_first_explorer():
    trainer = Trainer()
    sync = synchronizer(trainer)
    publishing = asyncio.ensure_future(sync.publish(trainer.stage(0)))
    await asyncio.sleep(0)
    assert not publishing.done()
    assert await sync.join("a", [Mortal(), Mortal()]) == (0, 1)
    await publishing
    assert sync.owned("a") == [0, 1]


async def test_nobody_comes():
    trainer = Trainer()
    with pytest.raises(DeadlineExceeded, match="mode: explore"):
        await synchronizer(trainer, sync_timeout=0.01).publish(trainer.stage(0))


async def test_one_that_comes_later_gets_the_newest_version_and_a_number_of_its_own():
    trainer = Trainer()
    sync = synchronizer(trainer)
    await sync.join("a", [Mortal()])
    await sync.publish(trainer.stage(0))
    await sync.publish(trainer.stage(1))
    late = Mortal()
    await sync.leave("a")
    assert await sync.join("b", [late]) == (1,), "also when nobody is left to compare with"
    assert late.loaded == [1] and sync.owned("a") == []
    await sync.publish(trainer.stage(2))
    assert late.loaded == [1, 2]


async def test_one_that_does_not_serve_what_it_says_is_refused_and_the_others_go_on():
    trainer = Trainer()
    sync = synchronizer(trainer)
    await sync.join("a", [Mortal()])
    await sync.publish(trainer.stage(0))
    broken = Mortal(dies_at=0)
    with pytest.raises(WeightSyncFailed, match="engines of explorer b do not serve 1:0"):
        await sync.join("b", [broken])
    assert sync.owned("b") == []
    await sync.publish(trainer.stage(1))


async def test_an_explorer_that_dies_in_a_publish_leaves_with_all_its_engines():
    trainer = Trainer()
    told = []
    sync = synchronizer(trainer, on_evicted=lambda owner, why: told.append((owner, why)))
    stays = Mortal()
    partner = Mortal()
    await sync.join("a", [stays])
    await sync.join("b", [Mortal(dies_at=1), partner])
    await sync.publish(trainer.stage(0))
    await sync.publish(trainer.stage(1))
    assert [owner for owner, _ in told] == ["b"] and "engine 1 could not be restarted" in told[0][1]
    assert sync.owned("b") == [] and stays.loaded[-1] == 1
    await sync.publish(trainer.stage(2))
    assert 2 not in partner.loaded


async def test_the_last_one_dies_in_a_publish_and_the_next_one_gets_it():
    trainer = Trainer()
    sync = synchronizer(trainer)
    await sync.join("a", [Mortal(dies_at=1)])
    await sync.publish(trainer.stage(0))
    publishing = asyncio.ensure_future(sync.publish(trainer.stage(1)))
    await asyncio.sleep(0)  # it has begun
    late = Mortal()
    await sync.join("a", [late])
    await publishing
    assert late.loaded == [0, 1]

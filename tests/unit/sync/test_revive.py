"""An engine that died gets a new process with the newest proven version, and proves it, whenever it
dies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rft.engine.pool import EnginePool
from rft.engine.scripted import ScriptedEngine, echo, logprobs, weights_key
from rft.errors import EngineFailed, EngineStalled, WeightSyncFailed
from rft.sync.schedule import Schedule
from rft.sync.settings import FixedSync, SyncRuntime
from rft.sync.synchronizer import Synchronizer
from rft.sync.transport.choose import make
from rft.testing.engine_contract import ask
from rft.types.completion import Completion
from rft.types.ids import Version
from rft.types.metrics import reduce
from rft.types.ports import GenerateRequest, LoadReport, ScoreRow, WeightManifest

PROMPTS = [[10 + i, 20, 30] for i in range(8)]


class Mortal(ScriptedEngine):
    """Dies when asked for `dies_at`; `anew` is what a new process has."""

    dies_at = ""

    def anew(self) -> None:
        self.__init__(answer=echo)  # type: ignore[misc]

    async def load(self, manifest: WeightManifest) -> LoadReport:
        if self.dies_at == "load":
            self.die("kill -9")
        return await super().load(manifest)

    async def pause(self, *, clear_cache: bool = True) -> None:
        if self.dies_at == "way back" and self.version == Version(1, 1):
            self.die("kill -9")
        await super().pause(clear_cache=clear_cache)

    async def resume(self) -> None:
        await super().resume()
        if self.dies_at == "resume":
            self.die("kill -9")

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        if self.dies_at == "probe" and self.version == Version(1, 1):
            self.die("kill -9")
        return await super().generate(request)


class World:
    """Two engines, a synchronizer that restarts them, and a scorer that computes what was staged
    last.
    """

    method = "checkpoint"

    def __init__(self, folder: Path, *, can_restart: bool = True) -> None:
        self.engines = [Mortal(answer=echo) for _ in range(2)]
        self.restarted: list[int] = []
        self.refuse = False
        self.key = 0
        self.transport: Any = make(FixedSync(sync_method=self.method), folder)
        self.sync = Synchronizer(
            FixedSync(),
            SyncRuntime(),
            self.engines,
            self,
            Schedule(),
            PROMPTS,
            Version(1, 0),
            self.restart if can_restart else None,
            self.transport,
        )

    async def restart(self, index: int) -> None:
        if self.refuse:
            raise EngineFailed("it has died too often")
        self.restarted.append(index)
        self.engines[index].anew()

    async def score(self, rows: Sequence[ScoreRow]) -> list[np.ndarray]:
        return [
            logprobs(r.tokens[: r.prompt_length], r.tokens[r.prompt_length :], self.key)
            for r in rows
        ]

    async def publish(self, step: int) -> None:
        weights = {"embed": torch.full((4,), float(step)), "head": torch.ones(2)}
        manifest = self.transport.stage(Version(1, step), weights.items(), {})
        self.key = weights_key(manifest)
        self.told = reduce(await self.sync.publish(manifest))

    def serve(self, step: int, attempt: int = 0) -> None:
        assert [e.version for e in self.engines] == [Version(1, step, attempt)] * 2
        assert self.engines[0]._key == self.engines[1]._key == self.key


@pytest.fixture(autouse=True, params=["checkpoint", "nccl"])
def method(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(World, "method", request.param)


async def test_it_serves_the_current_version_again(tmp_path: Path) -> None:
    w = World(tmp_path)
    await w.publish(0)
    await w.publish(1)
    w.engines[1].die("kill -9")
    pool = EnginePool(w.engines, revive=w.sync.revive)
    jobs = [pool.generate(ask(f"prompt {i}")) for i in range(8)]
    assert {a[0].version for a in await asyncio.gather(*jobs)} == {Version(1, 1)}
    await asyncio.gather(*pool._lost.values())
    assert w.restarted == [1]
    w.serve(1)
    await w.sync.revive(1)  # it is well: nothing happens
    assert w.restarted == [1]
    await w.publish(2)
    w.serve(2)


async def test_restarts_are_reported_once(tmp_path: Path) -> None:
    w = World(tmp_path)
    await w.publish(0)
    assert (w.told["sync/engines_restarted"], w.told["sync/engines_stalled"]) == (0, 0)

    async def hangs() -> None:
        raise EngineStalled("engine-1 hangs: no sign of life for 10 s")

    w.engines[1].health = hangs  # type: ignore[method-assign]
    w.engines[1].anew = lambda: (delattr(w.engines[1], "health"), Mortal.anew(w.engines[1]))[1]  # type: ignore[method-assign]
    await w.sync.revive(1)
    w.engines[0].die("kill -9")
    await w.publish(1)
    assert (w.told["sync/engines_restarted"], w.told["sync/engines_stalled"]) == (2, 1)
    await w.publish(2)
    assert (w.told["sync/engines_restarted"], w.told["sync/engines_stalled"]) == (0, 0)


@pytest.mark.parametrize("moment", ["before", "load", "resume"])
async def test_it_dies_while_a_version_is_published(moment: str, tmp_path: Path) -> None:
    w = World(tmp_path)
    await w.publish(0)
    assert await w.sync.may_explore(0) == Version(1, 0)  # rollouts are under way
    if moment == "before":
        w.engines[0].die("kill -9")
    else:
        w.engines[0].dies_at = moment
    w.engines[0].anew = lambda: (setattr(w.engines[0], "dies_at", ""), Mortal.anew(w.engines[0]))[1]  # type: ignore[method-assign]
    await w.publish(1)
    assert w.restarted == [0]
    w.serve(1, attempt=int(moment == "resume"))  # the other one may have written with it by then


@pytest.mark.parametrize("moment", ["resume", "probe"])
async def test_what_others_wrote_meanwhile_never_counts(moment: str, tmp_path: Path) -> None:
    """Engine 0 has other weights than it says; its canary is never compared, because engine 1 dies."""
    w = World(tmp_path)
    await w.publish(0)
    w.engines[1].dies_at = moment
    w.engines[1].anew = lambda: (setattr(w.engines[1], "dies_at", ""), Mortal.anew(w.engines[1]))[1]  # type: ignore[method-assign]
    load = w.engines[0].load

    async def stale(manifest: WeightManifest) -> LoadReport:
        report = await load(manifest)
        w.engines[0]._key += 1
        del w.engines[0].load  # type: ignore[method-assign]
        return report

    w.engines[0].load = stale  # type: ignore[method-assign]
    await w.publish(1)
    assert w.restarted == [1]
    assert (
        await w.sync.wait_verified(Version(1, 1)) is False
        and await w.sync.wait_verified(Version(1, 1, 1)) is True
    )


async def test_another_one_dies_on_the_way_back(tmp_path: Path) -> None:
    w = World(tmp_path)
    await w.publish(0)
    w.engines[0].dies_at = "resume"
    w.engines[1].dies_at = "way back"
    for engine in w.engines:
        engine.anew = lambda e=engine: (setattr(e, "dies_at", ""), Mortal.anew(e))[1]  # type: ignore[method-assign,misc]
    await w.publish(1)
    assert w.restarted == [0, 1]
    w.serve(1, attempt=1)


async def test_one_that_cannot_be_restarted_ends_the_run(tmp_path: Path) -> None:
    w = World(tmp_path)
    await w.publish(0)
    w.refuse = True
    w.engines[0].die("kill -9")
    with pytest.raises(EngineFailed, match=r"could not be brought back.*died too often"):
        await w.sync.revive(0)
    with pytest.raises(EngineFailed, match="died too often"):
        await w.sync.may_explore(1)


async def test_one_that_comes_back_with_other_weights_is_not_served(tmp_path: Path) -> None:
    w = World(tmp_path)
    await w.publish(0)
    w.engines[0].die("kill -9")
    anew = w.engines[0].anew

    class Stale(Mortal):
        async def load(self, manifest: WeightManifest) -> LoadReport:
            report = await super().load(manifest)
            self._key += 1
            return report

    def stale() -> None:
        anew()
        w.engines[0].__class__ = Stale

    w.engines[0].anew = stale  # type: ignore[method-assign]
    with pytest.raises(EngineFailed, match="log-probs differ from those of 1:0"):
        await w.sync.revive(0)


async def test_without_restarts_a_death_ends_the_run(tmp_path: Path) -> None:
    w = World(tmp_path, can_restart=False)
    await w.publish(0)
    w.engines[0].die("kill -9")
    with pytest.raises(WeightSyncFailed, match=r"engine 0.*kill -9"):
        await w.publish(1)

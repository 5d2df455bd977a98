"""New weights a few engines at a time: the others answer meanwhile, and clients meet no weights
that are not verified.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rft.engine.pool import EnginePool
from rft.engine.scripted import ScriptedEngine, echo, logprobs, weights_key
from rft.errors import WeightSyncFailed
from rft.sync.schedule import Schedule
from rft.sync.settings import FixedSync
from rft.sync.synchronizer import Synchronizer
from rft.sync.transport.choose import make
from rft.testing.engine_contract import ask
from rft.types.ids import Version
from rft.types.metrics import reduce
from rft.types.ports import LoadReport, ScoreRow, WeightManifest
from tests.helpers.sync_config import sync_config

PROMPTS = [[10 + i, 20, 30] for i in range(8)]


class Watched(ScriptedEngine):
    """Tells which engines of its world are paused; `on_load` is awaited while it is."""

    def __init__(self, world: World, number: int) -> None:
        super().__init__(answer=echo)
        self.world = world
        self.number = number
        self.pauses = 0
        self.damaged = False
        self.drains = asyncio.Event()

    async def pause(self, *, clear_cache: bool = True) -> None:
        await super().pause(clear_cache=clear_cache)
        self.pauses += 1
        self.world.paused.add(self.number)
        self.world.most_paused = max(self.world.most_paused, len(self.world.paused))

    async def drain(self, timeout_s: float) -> None:
        asyncio.get_running_loop().call_soon(self.drains.set)
        await super().drain(timeout_s)

    async def load(self, manifest: WeightManifest) -> LoadReport:
        await self.world.on_load(self, manifest)
        report = await super().load(manifest)
        if self.damaged and manifest.version.step > 0:
            self._key ^= 1  # other weights than it says: the canary alone can tell
        return report

    async def resume(self) -> None:
        await super().resume()
        self.world.paused.discard(self.number)


class World:
    """Engines behind a pool, and a synchronizer that scores as they do."""

    def __init__(
        self, folder: Path, engines: int = 2, method: str = "checkpoint", **settings: Any
    ) -> None:
        self.paused: set[int] = set()
        self.most_paused = 0
        self.engines = [Watched(self, i) for i in range(engines)]
        self.pool = EnginePool(self.engines)
        self.transport = make(FixedSync(sync_method=method), folder)
        self.key = 0
        sync = sync_config(**{"at_a_time": 1, "retries": 0, **settings})
        self.sync = Synchronizer(
            *sync, self.engines, self, Schedule(), PROMPTS, Version(1, 0), None, self.transport
        )

    async def on_load(self, engine: Watched, manifest: WeightManifest) -> None: ...

    async def score(self, rows: Sequence[ScoreRow]) -> list[np.ndarray]:
        return [
            logprobs(r.tokens[: r.prompt_length], r.tokens[r.prompt_length :], self.key)
            for r in rows
        ]

    async def publish(self, step: int) -> dict[str, float]:
        weights = {"embed": torch.full((4,), float(step)), "head": torch.ones(2)}
        manifest = self.transport.stage(Version(1, step), weights.items(), {})
        self.key = weights_key(manifest)
        return reduce(await self.sync.publish(manifest))

    async def answers(self, *texts: str) -> list[Version]:
        """The one version that wrote each answer."""
        found = await asyncio.gather(*(self.pool.generate(ask(t)) for t in texts))
        return [a[0].version for a in found]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def make_world(*args: Any, **settings: Any) -> World:
        made.append(World(tmp_path, *args, **settings))
        return made[-1]

    yield make_world
    for w in made:
        w.transport.close()


@pytest.mark.parametrize("method", ["checkpoint", "nccl"])
async def test_the_others_answer_while_one_loads(world: Any, method: str) -> None:
    w = world(3, method)
    answered: list[list[Version]] = []

    async def on_load(engine: Watched, manifest: WeightManifest) -> None:
        if manifest.version.step:
            answered.append(await w.answers(*(f"{engine.number} {i}" for i in range(6))))

    w.on_load = on_load  # type: ignore[method-assign]
    await w.publish(0)
    assert (w.most_paused, answered) == (3, []), (
        "before the first version there is nothing to serve"
    )
    w.most_paused = 0
    told = await w.publish(1)
    old = Version(1, 0)
    new = Version(1, 1)
    assert w.most_paused == 1 and [e.pauses for e in w.engines] == [2, 2, 2]
    assert [set(a) for a in answered] == [{old}, {old, new}, {new}], "one engine after the other"
    assert set(await w.answers(*"abcdef")) == {new}
    assert (
        told["sync/requests_paused"] == told["sync/requests_aborted"] == 0
        and told["sync/canary_tokens"] == 3 * 8 * 4
    )


async def test_what_is_under_way_ends_before_the_pause(world: Any) -> None:
    w = world()
    await w.publish(0)
    first = w.engines[0]
    first.hold(after_tokens=3)
    under_way = asyncio.ensure_future(w.pool.generate(ask("a question")))
    await first.waiting(1)
    publishing = asyncio.ensure_future(w.publish(1))
    await first.drains.wait()
    assert await w.answers("a question") == [Version(1, 0)], (
        "its own engine has it in its cache, and refuses it now"
    )
    assert len(w.engines[1].calls) == 1 + len(PROMPTS) and not w.paused
    first.release()
    (answer,) = await under_way
    assert [s.version for s in answer.version_spans] == [Version(1, 0)]
    await publishing


async def test_what_takes_too_long_is_paused_and_goes_on(world: Any) -> None:
    w = world(drain_s=0.01)
    await w.publish(0)
    first = w.engines[0]
    first.hold(after_tokens=3)
    under_way = asyncio.ensure_future(w.pool.generate(ask("a question")))
    await first.waiting(1)
    for _ in range(3):
        await asyncio.sleep(0)  # until it has begun to write
    held = first._released  # the probes of the canary are not held
    first._released = None
    await w.publish(1)
    assert held is not None
    held.set()
    (answer,) = await under_way
    assert [s.version.step for s in answer.version_spans] == [0, 1]


async def test_weights_that_fail_their_canary_are_met_by_nobody(world: Any) -> None:
    w = world()
    await w.publish(0)
    w.engines[0].damaged = True
    score = w.score
    met = list[Version]()

    async def scored(rows: Sequence[ScoreRow]) -> list[np.ndarray]:
        met.extend(await w.answers(*"abcdef"))
        return await score(rows)

    w.sync._updates._canary._scorer.score = scored  # type: ignore[method-assign]
    with pytest.raises(WeightSyncFailed, match=r"engine 0: its log-probs.*serve 1:0 again"):
        await w.publish(1)
    assert set(met) == {Version(1, 0)}
    assert w.engines[1].pauses == 1, "the other one never stopped"
    w.engines[0].calls.clear()
    assert set(await w.answers(*"ghijkl")) == {Version(1, 0)} and w.engines[0].calls, (
        "the first one takes requests again"
    )


async def test_rows_of_the_first_engine_do_not_count_when_a_later_one_fails(world: Any) -> None:
    w = world()
    await w.publish(0)
    w.engines[1].damaged = True
    answered: list[Version] = []

    async def on_load(engine: Watched, manifest: WeightManifest) -> None:
        if engine.number == 1 and manifest.version.step:
            answered.extend(await w.answers("a"))

    w.on_load = on_load  # type: ignore[method-assign]
    with pytest.raises(WeightSyncFailed, match="engine 1: "):
        await w.publish(1)
    assert answered == [Version(1, 1)] and w.sync._gate.is_rejected(Version(1, 1))
    assert [e.version for e in w.engines] == [Version(1, 0)] * 2


async def test_where_all_refuse_a_request_waits(world: Any) -> None:
    w = world()
    await w.publish(0)
    for engine in w.engines:
        await engine.drain(1.0)
    assert await w.answers("a") == [Version(1, 0)]


@pytest.mark.parametrize("together", [2, None])
async def test_how_many_load_together(world: Any, together: int | None) -> None:
    w = world(4, at_a_time=together)
    await w.publish(0)
    w.most_paused = 0
    await w.publish(1)
    assert w.most_paused == (together or 4)

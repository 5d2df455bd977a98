"""Engines that share their GPUs with the trainer: they sleep before its first step of a window and
wake with the next weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rft.errors import EngineFailed, WeightSyncFailed
from rft.sync.base import Transport
from rft.sync.settings import FixedSync
from rft.sync.synchronizer import Synchronizer
from rft.sync.transport.choose import make
from rft.types.completion import Completion
from rft.types.ids import Version
from rft.types.ports import GenerateRequest, LoadReport, WeightManifest
from tests.helpers.sync_config import sync_config
from tests.unit.sync.test_synchronizer import PROMPTS, TableEngine, World, weights


class Sleeper(TableEngine):
    """Tells what it was asked; asleep it holds no weights, and computes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.cannot: BaseException | None = None

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        self.calls.append("generate")
        return await super().generate(request)

    async def pause(self, *, clear_cache: bool = True) -> None:
        self.calls.append("pause")
        await super().pause(clear_cache=clear_cache)

    async def sleep(self) -> None:
        assert not self.go.is_set(), "only while paused"
        self.calls.append("sleep")
        self.weights = {}
        if self.cannot is not None:
            raise self.cannot

    async def load(self, manifest: WeightManifest) -> LoadReport:
        self.calls.append("load")
        return await super().load(manifest)

    async def resume(self) -> None:
        assert self.weights, "resumed without weights"
        self.calls.append("resume")
        await super().resume()

    def told(self) -> list[str]:
        """The calls since this was asked last, requests of the canary together."""
        said = self.calls
        self.calls = []
        return [c for i, c in enumerate(said) if not (i and c == said[i - 1] == "generate")]


class Turns(World):
    def __init__(self, transport: Transport, **settings: Any) -> None:
        super().__init__(transport, interval=2)
        self.engines: list[Any] = [Sleeper(), Sleeper()]
        config, runtime = sync_config(in_turns=True, sync_timeout=20.0, **settings)
        self.sync = Synchronizer(
            config, runtime, self.engines, self.trainer, self.schedule, PROMPTS, Version(1, 0)
        )

    def told(self) -> list[list[str]]:
        return [e.told() for e in self.engines]


@pytest.fixture
def turns(tmp_path: Path) -> Iterator[Turns]:
    transport = make(FixedSync(), tmp_path)
    yield Turns(transport)
    transport.close()


async def test_the_order_of_calls(turns: Turns) -> None:
    await turns.publish(0)
    assert turns.told() == [["pause", "load", "resume", "generate"]] * 2
    await turns.sync.step_started(1)
    assert turns.told() == [["pause", "sleep"]] * 2
    await turns.sync.step_finished(1)
    await turns.sync.step_started(2)
    assert turns.told() == [[]] * 2, "they sleep through the window"
    await turns.publish(2)
    assert turns.told() == [["pause", "load", "resume", "generate"]] * 2
    assert turns.all_hold(2)
    await turns.sync.step_started(3)
    assert turns.told() == [["pause", "sleep"]] * 2


async def test_what_is_asked_of_a_sleeping_engine_waits_for_the_next_weights(turns: Turns) -> None:
    await turns.publish(0)
    await turns.sync.step_started(1)
    asked = asyncio.create_task(turns.engines[0].generate(GenerateRequest(prompt_tokens=(1, 2))))
    await turns.publish(2)
    (answer,) = await asked
    assert answer.version_spans[0].version == Version(1, 2)


async def test_a_load_that_fails_ends_awake_under_the_version_before(turns: Turns) -> None:
    await turns.publish(0)
    await turns.sync.step_started(1)
    turns.engines[0].trouble = lambda n, m: "hash" if m.version.step == 2 else ""
    with pytest.raises(WeightSyncFailed, match=r"could not be served .attempts: 2."):
        await turns.publish(2)
    assert all(e.holds(weights(0)) for e in turns.engines)


async def test_an_engine_that_does_not_sleep_ends_the_run_before_the_step(turns: Turns) -> None:
    await turns.publish(0)
    turns.engines[1].cannot = EngineFailed("it cannot")
    with pytest.raises(
        WeightSyncFailed,
        match=r"train step 1 needs the engines' memory.*engine 1: sleep: EngineFailed: it cannot",
    ):
        await turns.sync.step_started(1)

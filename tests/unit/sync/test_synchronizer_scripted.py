"""The named fault points of an engine, in a scripted engine: each is detected and stops the sync
with a named error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from rft import fault_injection as faults
from rft.engine.scripted import ScriptedEngine, echo, logprobs, weights_key
from rft.errors import WeightSyncFailed
from rft.sync.schedule import Schedule
from rft.sync.settings import FixedSync, SyncRuntime
from rft.sync.synchronizer import Synchronizer
from rft.sync.transport.choose import make
from rft.types.ids import Version
from rft.types.ports import LoadReport, ScoreRow, WeightManifest

PROMPTS = [list(f"probe number {i}".encode()) for i in range(8)]
SAID = {
    "sync.skip": "differ from the trainer's",
    "sync.missing_tensor": "got no weights",
    "sync.stale_head": "layer lm_head computes with other weights",
    "sync.corrupt_byte": "arrived damaged",
    "sync.wrong_version": "loaded version 1:2",
}


@pytest.fixture(params=["memory", "nccl"])
def transport(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    made = make(FixedSync(sync_method=request.param), tmp_path)
    yield made
    made.close()


class Scorer:
    """Scores as the scripted engine does with the weights staged last."""

    key = 0

    async def score(self, rows: Sequence[ScoreRow]) -> list[np.ndarray]:
        return [
            logprobs(r.tokens[: r.prompt_length], r.tokens[r.prompt_length :], self.key)
            for r in rows
        ]


class FaultyEngine(ScriptedEngine):
    """Loads as the fault points say."""

    async def load(self, manifest: WeightManifest) -> LoadReport:
        active = {point for point in faults.SYNC_POINTS if faults.fault(point)}
        before = self.version
        key = self._key
        report = await super().load(manifest)
        name = (manifest.tensors[0].name,)
        for point, field in (("sync.corrupt_byte", "bad_hash"), ("sync.missing_tensor", "missing")):
            if point in active:
                self.version = before
                self._key = key
                return replace(report, num_tensors=0, nbytes=0, **{field: name})
        if "sync.skip" in active:
            self._key = key
        if "sync.wrong_version" in active:
            self.version = Version(manifest.version.lineage, manifest.version.step + 1)
            return replace(report, version=self.version)
        if "sync.stale_head" in active:
            self._key ^= 1
            return replace(report, probe_error=1.0, probe_worst="lm_head")
        return report


@pytest.mark.parametrize("point", faults.SYNC_POINTS)
async def test_every_fault_point_stops_the_sync(
    point: str, transport: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    scorer = Scorer()
    engines = [FaultyEngine(answer=echo) for _ in range(2)]
    sync = Synchronizer(
        FixedSync(),
        SyncRuntime(),
        engines,
        scorer,
        Schedule(),
        PROMPTS,
        Version(1, 0),
        None,
        transport,
    )

    def stage(step: int) -> WeightManifest:
        manifest = transport.stage(
            Version(1, step),
            {"embed": torch.full((4,), float(step)), "head": torch.ones(2)}.items(),
            {},
        )
        scorer.key = weights_key(manifest)
        return manifest

    await sync.publish(stage(0))
    # publishing loads both engines, so does the way back: only the published version is hurt
    loads = 2
    faults._visits.clear()
    monkeypatch.setenv(faults.VARIABLE, f"{point}:1,{point}:{2 * loads + 1}")
    with pytest.raises(
        WeightSyncFailed,
        match=f"1:1 could not be served .attempts: 2..*{SAID[point]}.*serve 1:0 again",
    ):
        await sync.publish(stage(1))
    monkeypatch.delenv(faults.VARIABLE)
    assert [e.version for e in engines] == [Version(1, 0)] * 2


async def test_a_batch_that_a_step_needs_begins_before_its_turn(transport: Any) -> None:
    scorer = Scorer()
    engines = [ScriptedEngine(answer=echo)]
    sync = Synchronizer(
        FixedSync(),
        SyncRuntime(),
        engines,
        scorer,
        Schedule(),
        PROMPTS,
        Version(1, 0),
        None,
        transport,
    )
    manifest = transport.stage(
        Version(1, 0), {"embed": torch.zeros(4), "head": torch.ones(2)}.items(), {}
    )
    scorer.key = weights_key(manifest)
    early = asyncio.create_task(sync.may_explore(1))
    await sync.allow_batch(1)  # no weights yet: nothing may begin
    assert not early.done()
    await sync.publish(manifest)
    assert await asyncio.wait_for(early, 120) == Version(1, 0)
    late = asyncio.create_task(sync.may_explore(2))
    await asyncio.sleep(0)
    assert not late.done()
    await sync.step_finished(1, finished=True)
    assert await asyncio.wait_for(late, 120) is None

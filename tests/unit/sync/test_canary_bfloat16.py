"""In bfloat16 and at a temperature other than 1, a real engine and a real trainer speak of one distribution, which the canary compares."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

from rft.engine.settings import EngineSettings
from rft.engine.transformers import TransformersEngine
from rft.errors import WeightSyncFailed
from rft.sync.canary import FLOORS, Canary, Verdict
from rft.sync.settings import SyncSettings
from rft.sync.transport.memory import MemoryTransport
from rft.trainer.learner import Learner
from rft.trainer.ranks import Ranks
from rft.trainer.settings import LearnerSettings
from rft.types.ids import Version
from rft.types.ports import Scorer, ScoreRow

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("ignore")]
PROMPTS = [[5 + i, 60 + 3 * i, 9, 33] for i in range(12)]


class OtherTemperature:
    """A trainer that divides by 1, whatever a row says."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    async def score(self, rows: Sequence[ScoreRow]) -> list[np.ndarray]:
        return await self._ranks.score([msgspec.structs.replace(row, temperature=1.0) for row in rows])


async def test_a_temperature_is_the_same_on_both_sides(tiny_model: Path, tmp_path: Path) -> None:
    """Rounding alone passes, at 1 and at 0.7; a trainer with another temperature does not."""
    given = EngineSettings(engine_type="transformers", model_path=str(tiny_model), dtype="bfloat16", max_model_len=64)
    engine, transport = await TransformersEngine.start(given), MemoryTransport(tmp_path)
    learner = Learner(LearnerSettings(model_path=str(tiny_model), dtype="bfloat16"))
    ranks, version = Ranks(learner), Version(1, 0)

    async def verdict(scorer: Scorer, temperature: float) -> Verdict:
        settings = SyncSettings(canary_temperature=temperature, canary_tokens=16, engine_dtype="bfloat16")
        canary = Canary(settings, PROMPTS, scorer)
        return await canary.check([await canary.probe(engine, version)], [])

    try:
        await engine.pause()
        assert (await engine.load(await ranks.stage(version, transport))).whole
        await engine.resume()
        warm, cool = await verdict(ranks, 1.0), await verdict(ranks, 0.7)
        assert cool.noise is not None and cool.limit == FLOORS["bfloat16"]
        assert 0 < warm.max_abs < warm.limit and 0 < cool.max_abs < cool.limit
        with pytest.raises(WeightSyncFailed, match="differ from the trainer's"):
            await verdict(OtherTemperature(ranks), 0.7)
    finally:
        await engine.close()
        transport.close()
        learner.close()

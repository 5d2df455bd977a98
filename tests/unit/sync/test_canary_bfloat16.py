"""In bfloat16 a real engine and a real trainer round apart, at any temperature, and the canary
tells that from wrong weights.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from rft.engine.settings import EngineSettings
from rft.engine.transformers import TransformersEngine
from rft.errors import WeightSyncFailed
from rft.launch.start import probe_prompts
from rft.sync.canary import Canary, Probe, Verdict
from rft.sync.settings import FixedSync, SyncRuntime
from rft.sync.transport.memory import MemoryTransport
from rft.testing import tiny
from rft.trainer.loop.learner import Learner
from rft.trainer.loop.ranks import Ranks
from rft.trainer.model import tensors
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
        return await self._ranks.score(
            [msgspec.structs.replace(row, temperature=1.0) for row in rows]
        )


Change = Callable[[str, torch.Tensor], torch.Tensor]


@dataclass
class Pair:
    """An engine and a trainer of one model.  The trainer's weights are published as `changed` makes
    them.
    """

    engine: Any
    ranks: Ranks
    learner: Learner
    transport: MemoryTransport
    published: dict[str, torch.Tensor] = field(default_factory=dict)  # of the version before
    step: int = 0

    async def publish(self, changed: Change = lambda name, tensor: tensor) -> Version:
        self.step += 1
        version = Version(1, self.step)
        right: dict[str, torch.Tensor] = {}
        pair = self

        class Changing:
            def stage(
                self,
                version: Version,
                given: Iterable[tuple[str, torch.Tensor]],
                tied: dict[str, str],
            ) -> Any:
                def all_changed() -> Iterable[tuple[str, torch.Tensor]]:
                    for name, tensor in given:
                        right[name] = tensor.clone()
                        yield name, changed(name, right[name])

                return pair.transport.stage(version, all_changed(), tied)

        await self.engine.pause()
        assert (await self.engine.load(await self.ranks.stage(version, Changing()))).intact
        await self.engine.resume()
        self.published = self.published or right
        return version

    def learn(self, lr: float) -> None:
        """As Adam takes its first one: every weight moves by the learning rate."""
        draw = torch.Generator().manual_seed(1)
        for p in self.learner.policy.parameters():
            weights = tensors.local(p)
            weights.add_(lr * torch.randn(weights.shape, generator=draw).sign())


@asynccontextmanager
async def pair(model: Path, folder: Path, trainer_dtype: str = "bfloat16") -> AsyncIterator[Pair]:
    given = EngineSettings(
        engine_type="transformers", model_path=str(model), dtype="bfloat16", max_model_len=64
    )
    engine, transport = await TransformersEngine.start(given), MemoryTransport(folder)
    learner = Learner(LearnerSettings(model_path=str(model), dtype=trainer_dtype))
    try:
        yield Pair(engine, Ranks(learner), learner, transport)
    finally:
        await engine.close()
        transport.close()
        learner.close()


EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "decoder_sparse_step": 1,
    "head_dim": 32,
}
SEEDS = 12


@pytest.mark.parametrize(("family", "more"), [("llama", {}), ("qwen3_moe", EXPERTS)])
async def test_right_weights_pass_and_wrong_ones_do_not(
    family: str, more: dict[str, Any], tmp_path: Path
) -> None:
    """U1, over twelve seeds: weights of one step before, a layer that was not loaded, an expert
    swapped with another.
    """
    model = tiny.make(
        tmp_path / "model", family=family, initializer_range=0.1, num_hidden_layers=3, **more
    )
    runtime = SyncRuntime(engine_dtype="bfloat16", trainer_dtype="bfloat16", canary_temperature=0.8)
    async with pair(model, tmp_path) as sides:
        canaries = [
            Canary(FixedSync(), runtime, probe_prompts(str(model), 8, seed), sides.ranks)
            for seed in range(SEEDS)
        ]
        first = await sides.publish()
        before: list[Probe] = []
        for canary in canaries:
            before.append(await canary.probe(sides.engine, first))
            verdict = await canary.check(before[-1:], [])
            assert (
                0 < verdict.error.mean < verdict.limit.mean / 2
                and verdict.noise is not None
                and verdict.noise.mean > 0
            )
        sides.learn(0.02)
        old = sides.published

        async def refused(changed: Change) -> int:
            version, count = await sides.publish(changed), 0
            for canary, probe in zip(canaries, before, strict=True):
                try:
                    await canary.check([await canary.probe(sides.engine, version)], [probe])
                except WeightSyncFailed:
                    count += 1
            return count

        def swapped(name: str, tensor: torch.Tensor) -> torch.Tensor:
            return tensor[[1, 0, 2, 3]] if "layers.0.mlp.experts" in name else tensor

        assert await refused(lambda name, tensor: tensor) == 0
        assert await refused(lambda name, tensor: old[name]) == SEEDS
        for layer in range(3):
            assert (
                await refused(
                    lambda name, tensor, at=f"layers.{layer}.": old[name] if at in name else tensor
                )
                == SEEDS
            )  # type: ignore[misc]
        assert not more or await refused(swapped) == SEEDS


async def test_what_rounding_alone_moves_is_allowed(tmp_path: Path) -> None:
    """U1: a fixed ceiling, as of 0.25 nats, is below what rounding does to large logits."""
    model = tiny.make(tmp_path / "model", initializer_range=0.3, num_hidden_layers=3)
    runtime = SyncRuntime(engine_dtype="bfloat16", trainer_dtype="bfloat16")
    async with pair(model, tmp_path) as sides:
        version = await sides.publish()
        largest = 0.0
        for seed in range(4):
            prompts = probe_prompts(str(model), 8, seed)
            canary = Canary(FixedSync(), runtime, prompts, sides.ranks)
            verdict = await canary.check([await canary.probe(sides.engine, version)], [])
            assert verdict.noise is not None and verdict.noise.within(verdict.limit)
            largest = max(largest, verdict.noise.largest)
        assert largest > 0.25


async def test_a_float32_trainer_knows_what_a_bfloat16_engine_rounds(tmp_path: Path) -> None:
    """U1: the noise is that of the shorter type, which the trainer itself does not have."""
    model = tiny.make(tmp_path / "model", initializer_range=0.1, num_hidden_layers=3)
    runtime = SyncRuntime(engine_dtype="bfloat16", trainer_dtype="float32")
    async with pair(model, tmp_path, "float32") as sides:
        version = await sides.publish()
        canary = Canary(FixedSync(), runtime, probe_prompts(str(model), 8, 0), sides.ranks)
        verdict = await canary.check([await canary.probe(sides.engine, version)], [])
        assert verdict.noise is not None and 0.3 < verdict.noise.mean / verdict.error.mean < 10


async def test_a_temperature_is_the_same_on_both_sides(tiny_model: Path, tmp_path: Path) -> None:
    """Rounding alone passes, at 1 and at 0.7; a trainer with another temperature does not."""
    async with pair(tiny_model, tmp_path) as sides:
        version = await sides.publish()

        async def verdict(scorer: Scorer, temperature: float) -> Verdict:
            runtime = SyncRuntime(
                canary_temperature=temperature, canary_tokens=16, engine_dtype="bfloat16"
            )
            canary = Canary(FixedSync(), runtime, PROMPTS, scorer)
            return await canary.check([await canary.probe(sides.engine, version)], [])

        warm, cool = await verdict(sides.ranks, 1.0), await verdict(sides.ranks, 0.7)
        assert 0 < warm.error.mean < warm.limit.mean and 0 < cool.error.mean < cool.limit.mean
        with pytest.raises(WeightSyncFailed, match="differ from the trainer's"):
            await verdict(OtherTemperature(sides.ranks), 0.7)

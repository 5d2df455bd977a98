"""The engine contract on the engines that need no vLLM."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from rft.engine.base import worst
from rft.engine.built_in import make
from rft.engine.pool import EnginePool
from rft.engine.scripted import ScriptedEngine, echo
from rft.engine.settings import EngineSettings
from rft.testing.engine_contract import EngineContract, Subject
from rft.types.ids import Version
from rft.types.ports import LoadReport, WeightManifest

LENGTH = 501


def arrays() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {
        f"layer.{i}.weight": random.standard_normal((4, 3)).astype(np.float32) for i in range(3)
    }


class TestScripted(EngineContract):
    @pytest.fixture
    async def subject(self, tmp_path: Path) -> AsyncIterator[Subject]:
        engine = ScriptedEngine(
            answer=echo, settings=EngineSettings(engine_type="scripted", max_model_len=LENGTH)
        )
        hold = lambda: engine.hold(after_tokens=3)  # noqa: E731
        subject = Subject(engine, arrays(), {}, tmp_path, hold=hold, release=engine.release)
        await subject.publish(version=Version(1, 0))
        yield subject
        await engine.close()


class LoadedPool(EnginePool):
    """A pool whose engines are loaded together, as `rft.sync` does it."""

    async def pause(self, *, clear_cache: bool = True) -> None:
        await asyncio.gather(*(e.pause(clear_cache=clear_cache) for e in self.engines))

    async def sleep(self) -> None:
        await asyncio.gather(*(e.sleep() for e in self.engines))

    async def load(self, manifest: WeightManifest) -> LoadReport:
        return worst(
            await asyncio.gather(*(e.load(manifest) for e in self.engines)), manifest.version
        )

    async def resume(self) -> None:
        await asyncio.gather(*(e.resume() for e in self.engines))

    async def health(self) -> None:
        await asyncio.gather(*(e.health() for e in self.engines))


class TestPool(EngineContract):
    @pytest.fixture
    async def subject(self, tmp_path: Path) -> AsyncIterator[Subject]:
        settings = EngineSettings(engine_type="scripted", max_model_len=LENGTH)
        engines = [ScriptedEngine(answer=echo, settings=settings) for _ in range(3)]

        def hold() -> None:
            for e in engines:
                e.hold(after_tokens=3)

        def release() -> None:
            for e in engines:
                e.release()

        subject = Subject(LoadedPool(engines), arrays(), {}, tmp_path, hold=hold, release=release)
        await subject.publish(version=Version(1, 0))
        yield subject
        await asyncio.gather(*(e.close() for e in engines))


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
class TestTransformers(EngineContract):
    @pytest.fixture
    async def subject(
        self, tiny_model: Path, tiny_untied: Path, tied: bool, tmp_path: Path
    ) -> AsyncIterator[Subject]:
        from safetensors.numpy import load_file

        folder = tiny_model if tied else tiny_untied
        engine = await make(
            EngineSettings(
                engine_type="transformers",
                model_path=str(folder),
                max_model_len=LENGTH,
                max_num_seqs=16,
            )
        )
        aliases = {"lm_head.weight": "model.embed_tokens.weight"} if tied else {}
        subject = Subject(engine, load_file(folder / "model.safetensors"), aliases, tmp_path)
        await subject.publish(version=Version(1, 0))
        yield subject
        await engine.close()

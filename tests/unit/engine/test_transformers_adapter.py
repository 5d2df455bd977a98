"""The transformers engine with an adapter alone."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rft.engine.settings import EngineSettings
from rft.engine.transformers import TransformersEngine
from rft.errors import WeightSyncFailed
from rft.testing.engine_contract import ask
from tests.helpers.adapter_contract import Adapted, AdapterContract


@pytest.fixture
async def engine(tiny_model: Path) -> AsyncIterator[TransformersEngine]:
    engine = await TransformersEngine.start(
        EngineSettings(
            engine_type="transformers",
            model_path=str(tiny_model),
            max_model_len=501,
            max_num_seqs=8,
        )
    )
    yield engine
    await engine.close()


class TestContract(AdapterContract):
    @pytest.fixture
    async def adapted(
        self, engine: TransformersEngine, tiny_model: Path, tmp_path: Path
    ) -> Adapted:
        return Adapted(engine, tiny_model, tmp_path)


async def test_some_layers(engine: TransformersEngine, tiny_model: Path, tmp_path: Path) -> None:
    await TestContract().test_every_adapter_counts(
        Adapted(engine, tiny_model, tmp_path, ("q_proj", "down_proj"))
    )


async def test_another_base_is_refused_by_name(
    engine: TransformersEngine, tiny_model: Path, tiny_untied: Path, tmp_path: Path
) -> None:
    other = Adapted(engine, tiny_untied, tmp_path)
    with pytest.raises(
        WeightSyncFailed, match=r"the adapter is for other weights .* than those in .*merge: true"
    ):
        await other.publish(other.adapter(1))
    mine = Adapted(engine, tiny_model, tmp_path)
    await mine.publish(mine.adapter(1))
    await engine.generate(ask())

"""vLLM for real with an adapter alone, tiny models on CPU: in our layers beside vLLM's, in vLLM's
LoRA layers, and cut in two.
"""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from rft.engine.environment import cpu_environment
from rft.engine.settings import EngineSettings
from rft.engine.vllm import VllmEngine
from rft.types.ports import LoadReport, ScoreRow, WeightManifest
from tests.helpers.adapter_contract import RANK, Adapted, AdapterContract

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's imports are full of other people's deprecations
]
FIRST_FAULT = 40  # faults fire at these loads of an engine, after all that the contract does
FAULTS = (
    "sync.skip",
    "sync.stale_head",
    "sync.corrupt_byte",
    "sync.missing_tensor",
    "sync.wrong_version",
)
SOME = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")  # of merged layers only some parts


class Counting(VllmEngine):
    loads = 0

    async def load(self, manifest: WeightManifest) -> LoadReport:
        self.loads += 1
        return await super().load(manifest)


def faulty(adapted: Adapted, engine: Counting) -> Adapted:
    """The engine's process has RFT_FAULT from its start: loads without a fault until the one before
    it.
    """

    async def arm(point: str) -> None:
        at = FIRST_FAULT + FAULTS.index(point)
        assert engine.loads < at, "raise FIRST_FAULT"
        while engine.loads < at - 1:
            await adapted.publish(adapted.adapter(30))

    adapted.arm = arm
    return adapted


async def started(folder: Path, patch: pytest.MonkeyPatch, **changes: Any) -> Counting:
    settings = EngineSettings(
        model_path=str(folder),
        max_model_len=501,
        max_num_seqs=64,
        kv_cache_bytes=1 << 28,
        max_num_batched_tokens=512,
        **changes,
    )
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_CPU_OMP_THREADS_BIND"):
        patch.delenv(name, raising=False)
    for name, value in cpu_environment(settings).items():
        patch.setenv(name, value)
    return await Counting.start(settings)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def beside(tiny_model: Path, environment: pytest.MonkeyPatch) -> AsyncIterator[Counting]:
    environment.setenv(
        "RFT_FAULT", ",".join(f"{point}:{FIRST_FAULT + i}" for i, point in enumerate(FAULTS))
    )
    engine = await started(tiny_model, environment)
    yield engine
    await engine.close()


class TestBeside(AdapterContract):
    @pytest_asyncio.fixture(loop_scope="module")
    async def adapted(self, beside: Counting, tiny_model: Path, tmp_path: Path) -> Adapted:
        return faulty(Adapted(beside, tiny_model, tmp_path, SOME), beside)

    async def test_given_tokens_are_scored_with_it(self, adapted: Adapted) -> None:
        await adapted.publish(adapted.adapter(20))
        await check_scores(adapted)


async def check_scores(adapted: Adapted) -> None:
    import numpy as np

    from rft.testing.engine_contract import ask

    (made,) = await adapted.engine.generate(ask(max_tokens=12))
    row = ScoreRow(
        tokens=np.concatenate([made.prompt_tokens, made.tokens]),
        prompt_length=len(made.prompt_tokens),
    )
    assert np.abs((await adapted.engine.score(row)).logprobs - made.logprobs).max() < 1e-4


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def native(tiny_untied: Path, environment: pytest.MonkeyPatch) -> AsyncIterator[Counting]:
    environment.setenv(
        "RFT_FAULT", ",".join(f"{point}:{FIRST_FAULT + i}" for i, point in enumerate(FAULTS))
    )
    engine = await started(tiny_untied, environment, lora_rank=RANK, max_cpu_loras=2)
    yield engine
    await engine.close()


@pytest.mark.slow
class TestNative(AdapterContract):
    @pytest_asyncio.fixture(loop_scope="module")
    async def adapted(self, native: Counting, tiny_untied: Path, tmp_path: Path) -> Adapted:
        return faulty(Adapted(native, tiny_untied, tmp_path), native)

    async def test_it_says_that_it_cannot_score(self, adapted: Adapted) -> None:
        await adapted.publish(adapted.adapter(20))
        with pytest.raises(ValueError, match="cannot score given tokens"):
            await check_scores(adapted)


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", [{}, {"lora_rank": RANK}, {"lora_rank": RANK, "fully_sharded_loras": True}], ids=str
)
async def test_two_shards(
    how: dict[str, Any], tiny_model: Path, environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Tensor parallel 2: each worker cuts its own part."""
    environment.delenv("RFT_FAULT", raising=False)
    engine = await started(tiny_model, environment, tensor_parallel_size=2, **how)
    try:
        adapted = Adapted(engine, tiny_model, tmp_path, SOME)
        await AdapterContract().test_every_adapter_counts(adapted)
        await AdapterContract().test_what_does_not_fit_never_touches_the_model(adapted)
    finally:
        await engine.close()

"""Mixtures of experts in a real vLLM: versions reach every expert, a wrong one is seen, and the
experts of tokens are told.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from rft.engine.environment import cpu_environment
from rft.engine.settings import EngineSettings
from rft.engine.vllm import VllmEngine
from rft.errors import WeightSyncFailed
from rft.sync.canary import Canary
from rft.sync.settings import FixedSync, SyncRuntime
from rft.testing import tiny
from rft.testing.engine_contract import Subject, ask, clean, shaken
from rft.types.ids import Version
from rft.types.ports import ScoreRow
from tests.helpers import experts, families

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's imports are full of other people's deprecations
]
FAULTY = 4  # the load that leaves the experts' packed copies behind


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[
        "qwen3_moe",
        *(pytest.param(f, marks=pytest.mark.slow) for f in ("mixtral", "gpt_oss")),
    ],
)
async def served(
    request: Any, tmp_path_factory: pytest.TempPathFactory, environment: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Subject, Any]]:
    """An engine, and transformers' model of the same folder."""
    sizes = {**families.TINY[request.param], "initializer_range": 0.1}
    folder = tiny.make(
        tmp_path_factory.mktemp("experts") / "m", family=request.param, tied=False, **sizes
    )
    settings = EngineSettings(
        model_path=str(folder),
        max_model_len=200,
        max_num_seqs=16,
        kv_cache_bytes=1 << 27,
        router_replay=True,
        block_size=32,
    )
    for name, value in cpu_environment(settings).items():
        environment.setenv(name, value)
    environment.setenv("RFT_FAULT", f"sync.stale_head:{FAULTY}")
    engine = await VllmEngine.start(settings)
    model = experts.model(folder)
    yield Subject(engine, experts.weights(model), {}, folder.parent), model
    await engine.close()


class Trainer:
    """Scores as a trainer does, through the model's own experts."""

    def __init__(self, model: Any) -> None:
        self.model = model

    async def score(self, rows: Sequence[ScoreRow]) -> list[np.ndarray]:
        import torch

        found = []
        for row in rows:
            ids = torch.from_numpy(row.tokens.astype(np.int64))[None]
            with torch.no_grad():
                logits = self.model(ids).logits[0, row.prompt_length - 1 : -1] / row.temperature
            found.append(
                logits.log_softmax(-1).gather(1, ids[0, row.prompt_length :, None])[:, 0].numpy()
            )
        return found


async def test_versions_reach_every_expert(served: tuple[Subject, Any]) -> None:
    subject, model = served
    canary = Canary(
        FixedSync(), SyncRuntime(), [[5, 6, 7, 8 + i] for i in range(16)], Trainer(model)
    )
    before: list[Any] = []
    for step in range(1, FAULTY):
        weights = shaken(subject.weights, step) if step > 1 else dict(subject.weights)
        experts.set_weights(model, weights)
        report = await subject.publish(weights, Version(1, step))
        assert clean(report), report
        layers = sum("layernorm" not in n for n in weights)
        assert report.probed_layers >= layers / 3, "experts, routers and all others"
        probe = await canary.probe(subject.engine, Version(1, step))
        verdict = await canary.check([probe], before)
        assert verdict.error.largest < 1e-4
        before = [probe]
    prompts = [
        ask("w" * n, n=3, max_tokens=1 + 5 * i, temperature=0.9)
        for i, n in enumerate((40, 40, 3, 17, 40))
    ]
    for _ in range(2):  # the second time prompts are in the cache
        made = [
            c
            for answers in await asyncio.gather(*map(subject.engine.generate, prompts))
            for c in answers
        ]
        for c in made:
            error, same = experts.compare(model, c)
            assert error < 1e-4 and same.all()
    assert {s.version for c in made for s in c.version_spans} == {Version(1, FAULTY - 1)}


async def test_a_stale_expert_is_rejected(served: tuple[Subject, Any]) -> None:
    """By the probe of its layer, and by the canary alone."""
    subject, model = served
    canary = Canary(
        FixedSync(), SyncRuntime(), [[5, 6, 7, 8 + i] for i in range(16)], Trainer(model)
    )
    weights = shaken(subject.weights, 11)
    experts.set_weights(model, weights)
    report = await subject.publish(weights, Version(1, 11))
    assert report.intact and report.probe_error > 1e-2
    if "sinks" not in "".join(weights):
        assert "experts" in report.probe_worst
    with pytest.raises(WeightSyncFailed, match="differ from the trainer's"):
        await canary.check([await canary.probe(subject.engine, Version(1, 11))], [])
    assert clean(await subject.publish(weights, Version(1, 12)))

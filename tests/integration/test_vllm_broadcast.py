"""vLLM with tensor parallel 2 receives broadcasts: the same answers as through a file, damage is
found, a killed worker is named.
"""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file

from rft.engine.environment import cpu_environment
from rft.engine.settings import EngineSettings
from rft.engine.vllm import VllmEngine
from rft.errors import EngineFailed
from rft.launch import leftovers
from rft.testing.engine_contract import ask, clean, shaken, stage
from rft.types.completion import Completion
from rft.types.ids import Version
from rft.types.ports import LoadReport, WeightManifest
from tests.helpers.broadcast import Sending

pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's imports are full of other people's deprecations
]
TIED = {"lm_head.weight": "model.embed_tokens.weight"}
BUCKET = 200_000  # bytes: the tiny model takes several


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tiny_model: Path) -> AsyncIterator[VllmEngine]:
    before = dict(os.environ)
    settings = EngineSettings(
        model_path=str(tiny_model),
        max_model_len=128,
        max_num_seqs=8,
        kv_cache_bytes=1 << 27,
        tensor_parallel_size=2,
    )
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_CPU_OMP_THREADS_BIND"):
        os.environ.pop(name, None)
    os.environ |= cpu_environment(settings) | {"RFT_FAULT": "sync.corrupt_byte:5"}
    with leftovers.collected():  # memory that the killed worker shared
        made = await VllmEngine.start(settings)
        yield made
        await made.close()
    os.environ.clear()
    os.environ.update(before)


def weights(folder: Path, seed: int) -> dict[str, np.ndarray]:
    return shaken({n: t.numpy() for n, t in load_file(folder / "model.safetensors").items()}, seed)


async def loaded(
    engine: VllmEngine, manifest: WeightManifest, sending: Sending | None = None
) -> tuple[LoadReport, Completion]:
    await engine.pause()
    report = await (engine.load(manifest) if sending is None else sending.load(engine, manifest))
    await engine.resume()
    return report, (await engine.generate(ask(max_tokens=24, ignore_eos=True, temperature=0)))[0]


async def test_two_workers(engine: VllmEngine, tiny_model: Path, tmp_path: Path) -> None:
    sending = Sending(tmp_path, workers=2)
    try:
        by_file = []
        by_broadcast = []
        for seed in (1, 2):
            report, made = await loaded(
                engine,
                stage(tmp_path / f"{seed}", weights(tiny_model, seed), Version(1, seed), TIED),
            )
            assert clean(report)
            by_file.append(made)
        for seed in (1, 2):
            tensors = ((n, torch.from_numpy(w)) for n, w in weights(tiny_model, seed).items())
            manifest = sending.stage(Version(2, seed), tensors, TIED)
            report, made = await loaded(engine, manifest, sending)
            assert clean(report) and report.probe_error < 1e-5 and made.version == Version(2, seed)
            by_broadcast.append(made)
        for a, b in zip(by_file, by_broadcast, strict=True):
            assert a.tokens.tolist() == b.tokens.tolist() and np.array_equal(a.logprobs, b.logprobs)
        assert by_file[0].tokens.tolist() != by_file[1].tokens.tolist()
        # the fifth load is damaged on its way: the weights before are served on
        manifest = sending.stage(
            Version(2, 3),
            ((n, torch.from_numpy(w)) for n, w in weights(tiny_model, 3).items()),
            TIED,
        )
        report, made = await loaded(engine, manifest, sending)
        assert (
            report.bad_hash
            and made.version == Version(2, 2)
            and np.array_equal(made.logprobs, by_file[1].logprobs)
        )
        report, made = await loaded(engine, manifest, sending)
        assert clean(report) and made.version == Version(2, 3)
        # a worker that is killed before it comes: the engine says so, and the trainer waits for
        # nobody
        await engine.pause()
        worker = next(
            p
            for p in psutil.Process().children(recursive=True)
            if "Worker" in p.name() or "Worker" in " ".join(p.cmdline())
        )
        worker.kill()
        with pytest.raises(EngineFailed, match="vLLM could not"):
            await sending.load(engine, manifest)
    finally:
        sending.close()

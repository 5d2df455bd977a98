"""vLLM for real, tiny models on CPU: the engine contract, log-probs after every load, and each
injected fault made visible.
"""

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from rft.engine.environment import cpu_environment
from rft.engine.settings import EngineSettings
from rft.engine.vllm import VllmEngine
from rft.errors import EngineFailed
from rft.sync.settings import FixedSync
from rft.testing.engine_contract import EngineContract, Subject, ask, clean, shaken, stage
from rft.types.completion import Completion
from rft.types.ids import Version
from rft.types.ports import GenerateRequest, LoadReport, ScoreRow, WeightManifest
from rft.types.task import SamplingArgs
from tests.helpers.broadcast import Sending
from tests.helpers.sync_config import SmallBuckets

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's imports are full of other people's deprecations
]
LENGTH = 501
FIRST_FAULT = 62  # faults fire at these loads of the tied engine, after all that the contract does
FAULTS = (
    "sync.skip",
    "sync.stale_head",
    "sync.corrupt_byte",
    "sync.missing_tensor",
    "sync.wrong_version",
)
TIED = {"lm_head.weight": "model.embed_tokens.weight"}


class Counting(VllmEngine):
    loads = 0

    async def load(self, manifest: WeightManifest) -> LoadReport:
        report = await super().load(manifest)
        self.loads += 1
        return report


def settings_for(folder: Path, **changes: Any) -> EngineSettings:
    return EngineSettings(
        model_path=str(folder),
        max_model_len=LENGTH,
        max_num_seqs=64,
        kv_cache_bytes=1 << 28,
        **changes,
    )


async def started(folder: Path, patch: pytest.MonkeyPatch, **changes: Any) -> Counting:
    settings = settings_for(folder, **changes)
    for name, value in cpu_environment(settings).items():
        patch.setenv(name, value)
    return await Counting.start(settings)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tied_engine(tiny_model: Path, environment: pytest.MonkeyPatch) -> AsyncIterator[Counting]:
    environment.setenv(
        "RFT_FAULT", ",".join(f"{point}:{FIRST_FAULT + i}" for i, point in enumerate(FAULTS))
    )
    counted = {"worker_cls": "tests.helpers.counting_worker.CountingWorker"}
    engine = await started(
        tiny_model, environment, sleep_level=2, extra_engine_args=counted, top_logprobs=25
    )
    with pytest.raises(EngineFailed, match="no weights were loaded"):
        await engine.generate(ask())
    yield engine
    await engine.close()
    await engine.close()


def weights_of(folder: Path) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    return load_file(folder / "model.safetensors")


def reference(folder: Path, weights: dict[str, np.ndarray]) -> Any:
    """The transformers model with `weights`."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.load_state_dict({n: torch.from_numpy(w) for n, w in weights.items()}, strict=False)
    model.tie_weights()
    return model


def difference(model: Any, made: list[Completion]) -> float:
    """Largest difference of log-probs, engine against model, at each completion's own temperature."""
    import torch

    worst = 0.0
    for c in made:
        ids = torch.from_numpy(np.concatenate([c.prompt_tokens, c.tokens]).astype(np.int64))[None]
        with torch.no_grad():
            logits = model(ids).logits[0, len(c.prompt_tokens) - 1 : -1] / c.sampling.temperature
        want = logits.log_softmax(-1).gather(1, ids[0, len(c.prompt_tokens) :, None])[:, 0].numpy()
        worst = max(worst, float(np.abs(want - c.logprobs).max()))
    return worst


class TestContract(EngineContract):
    @pytest_asyncio.fixture(loop_scope="module")
    async def subject(self, tied_engine: Counting, tiny_model: Path, tmp_path: Path) -> Subject:
        subject = Subject(tied_engine, weights_of(tiny_model), TIED, tmp_path)
        await subject.publish()
        return subject


async def test_vllm_sleeps_and_wakes_in_this_order(
    tied_engine: Counting, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's own calls, which do nothing on a CPU: the cache comes back after the weights are
    loaded and labelled.
    """
    said: list[tuple[object, ...]] = []

    def told(name: str) -> None:
        real = getattr(tied_engine._llm, name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            said.append((name, *args, *kwargs.values()))
            return await real(*args, **kwargs)

        monkeypatch.setattr(tied_engine._llm, name, call)

    for name in (
        "pause_generation",
        "sleep",
        "wake_up",
        "update_weight_version",
        "resume_generation",
    ):
        told(name)
    subject = Subject(tied_engine, weights_of(tiny_model), TIED, tmp_path)
    await tied_engine.pause()
    await tied_engine.sleep()
    with pytest.raises(EngineFailed, match="slept at level 2 and no weights were loaded"):
        await tied_engine.resume()
    version = Version(2, 1)
    assert clean(await subject.publish(version=version))
    assert said == [
        ("pause_generation", "keep", True),
        ("sleep", 2, "keep"),
        ("pause_generation", "keep", True),
        ("wake_up", ["weights"]),
        ("update_weight_version", str(version)),
        ("wake_up", ["kv_cache"]),
        ("resume_generation",),
    ]
    assert (await tied_engine.generate(ask()))[0].version == version


async def check_parity(
    engine: VllmEngine, folder: Path, tied: dict[str, str], tmp_path: Path
) -> None:
    for step, temperature in ((1001, 1.0), (1002, 0.7)):
        weights = shaken(weights_of(folder), step)
        subject = Subject(engine, weights, tied, tmp_path)
        report = await subject.publish(version=Version(1, step))
        assert clean(report), report
        made = await engine.generate(ask(n=4, max_tokens=24, temperature=temperature))
        assert difference(reference(folder, weights), made) < 1e-4
        row = ScoreRow(
            tokens=np.concatenate([made[0].prompt_tokens, made[0].tokens]),
            prompt_length=len(made[0].prompt_tokens),
            temperature=temperature,
        )
        if temperature == 1:
            assert np.abs((await engine.score(row)).logprobs - made[0].logprobs).max() < 1e-4
            await check_top(engine, reference(folder, weights), made[0], Version(1, step))
        else:
            with pytest.raises(ValueError, match="temperature 1 only"):
                await engine.score(row)


async def check_top(engine: VllmEngine, model: Any, made: Completion, version: Version) -> None:
    """The likeliest tokens behind another prompt are those of transformers."""
    import torch
    from transformers import AutoTokenizer

    chat = [{"role": "user", "content": "told more"}]
    told = GenerateRequest(messages=tuple(chat))
    row = ScoreRow(tokens=made.tokens, prompt_length=0, prompt=told, top=25)
    found = await engine.score(row)
    assert found.version == version
    tokenizer: Any = AutoTokenizer.from_pretrained(engine.settings.model_path)
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *made.tokens.tolist()]])).logits[0]
    logprobs = logits[len(prompt) - 1 : -1].log_softmax(-1)
    written = torch.from_numpy(made.tokens.astype(np.int64))[:, None]
    assert np.abs(found.logprobs - logprobs.gather(1, written)[:, 0].numpy()).max() < 1e-4
    assert found.top_ids is not None and found.top_logprobs is not None
    ids = torch.from_numpy(found.top_ids.astype(np.int64))
    assert ids.shape == (len(made.tokens), 25)
    assert (logprobs.gather(1, ids) - logprobs.topk(25).values).abs().max() < 1e-4
    others = logprobs.scatter(1, ids, -torch.inf).logsumexp(-1, keepdim=True)
    wanted = torch.cat([logprobs.gather(1, ids), others], 1).numpy()
    np.testing.assert_allclose(found.top_logprobs, wanted, rtol=2e-3, atol=2e-4)


async def test_log_probs_after_each_load(
    tied_engine: Counting, tiny_model: Path, tmp_path: Path
) -> None:
    await check_parity(tied_engine, tiny_model, TIED, tmp_path)


async def test_log_probs_after_a_broadcast(
    tied_engine: Counting, tiny_model: Path, tmp_path: Path
) -> None:
    import torch

    sending = Sending(
        tmp_path,
        config=FixedSync(
            sync_method="nccl",
            sync_timeout=120.0,
            nccl=SmallBuckets(size=200_000, overlap_broadcast_and_load=True),
        ),
    )
    try:
        for step in (1, 2):
            weights = shaken(weights_of(tiny_model), 70 + step)
            manifest = sending.stage(
                Version(1, 2000 + step),
                ((n, torch.from_numpy(w)) for n, w in weights.items()),
                TIED,
            )
            await tied_engine.pause()
            report = await sending.load(tied_engine, manifest)
            await tied_engine.resume()
            assert clean(report) and report.version == Version(1, 2000 + step)
            made = await tied_engine.generate(ask(n=4, max_tokens=24))
            assert difference(reference(tiny_model, weights), made) < 1e-4
    finally:
        sending.close()


async def test_prefill_is_shared_and_recomputed(
    tied_engine: Counting, tiny_model: Path, tmp_path: Path
) -> None:
    """After a load in the middle of an answer its later tokens have the new model's log-probs,
    prompt included.
    """
    old = shaken(weights_of(tiny_model), 5)
    new = shaken(weights_of(tiny_model), 6)
    subject = Subject(tied_engine, new, TIED, tmp_path)
    await subject.publish(old, Version(2, 1))
    task = asyncio.create_task(tied_engine.generate(ask(max_tokens=400, ignore_eos=True)))
    await asyncio.wait([task], timeout=0.1)
    held = (await subject.publish(new, Version(2, 2))).paused
    made = (await task)[0]
    cut = next(s for s in made.version_spans if s.version == Version(2, 2)).start
    assert 0 < cut < 400, made.version_spans
    prompt = (*made.prompt_tokens.tolist(), *made.tokens[:cut].tolist())
    sampling = SamplingArgs(max_tokens=400, ignore_eos=True)
    later = Completion(
        prompt_tokens=np.array(prompt, np.int32),
        tokens=made.tokens[cut:],
        logprobs=made.logprobs[cut:],
        text="",
        finish_reason="length",
        version_spans=(),
        sampling=sampling,
    )
    assert difference(reference(tiny_model, new), [later]) < 1e-4
    assert (held.requests, held.aborted) == (1, 0) and held.tokens_per_s > 0
    assert held.recomputed_tokens == len(made.prompt_tokens) + cut - 1, (
        "the newest token has no keys yet"
    )
    idle = (await subject.publish(new, Version(2, 3))).paused
    assert (idle.requests, idle.recomputed_tokens, idle.tokens_per_s) == (0, 0, 0)


@pytest.mark.parametrize("length", [2, 31, 32, 33, 44, 64, 70])
async def test_a_groups_prompt_is_computed_once(
    tied_engine: Counting, tiny_model: Path, tmp_path: Path, length: int
) -> None:
    """Around the ends of blocks, of 32 tokens: by answers that begin together, and by some that
    come while others run.
    """
    weights = shaken(weights_of(tiny_model), length)
    await Subject(tied_engine, weights, TIED, tmp_path).publish(version=Version(2, 10 + length))
    prompt = tuple(int(t) for t in np.random.default_rng(length).integers(5, 200, length))

    def group(tokens: int) -> GenerateRequest:
        return GenerateRequest(
            prompt_tokens=prompt, sampling=SamplingArgs(max_tokens=tokens, ignore_eos=True), n=4
        )

    async def computed() -> int:
        (tokens,) = await tied_engine._llm.collective_rpc("computed_tokens")
        return int(tokens)

    before = await computed()
    long = asyncio.create_task(tied_engine.generate(group(400)))
    while await computed() <= before + length + 3:
        assert not long.done()
    made = [*await tied_engine.generate(group(6)), *await long]
    assert await computed() - before == (length + 3 + 4 * 399) + (4 + 4 * 5)
    assert difference(reference(tiny_model, weights), made) < 1e-4


async def test_each_fault_is_visible(
    tied_engine: Counting, tiny_model: Path, tmp_path: Path
) -> None:
    """One load for each fault; what the synchronizer would see of it."""
    assert tied_engine.loads < FIRST_FAULT, "raise FIRST_FAULT"
    good = weights_of(tiny_model)
    subject = Subject(tied_engine, good, TIED, tmp_path)
    while tied_engine.loads < FIRST_FAULT - 1:
        await subject.publish()

    async def load(seed: int) -> tuple[LoadReport, Version, float]:
        """Publish other weights; the report, the version then served, and the error of the
        log-probs against these weights.
        """
        weights = shaken(good, seed)
        report = await subject.publish(weights, Version(3, seed))
        made = await tied_engine.generate(ask(n=2, max_tokens=16))
        return report, made[0].version, difference(reference(tiny_model, weights), made)

    report, served, error = await load(1)  # skip: the report lies, the log-probs do not
    assert clean(report) and served == Version(3, 1) and error > 1e-2
    report, served, error = await load(
        2
    )  # stale head: what vLLM's reload leaves behind on CPU when a tied head is not packed anew
    assert report.probe_error > 1e-2 and "embed" not in report.probe_worst and error > 1e-2, report
    report, served, _ = await load(3)
    assert report.bad_hash and served == Version(3, 2)
    report, served, _ = await load(4)
    assert report.missing and served == Version(3, 2)
    report, served, _ = await load(5)
    assert report.version == served == Version(3, 6)
    report, served, error = await load(7)  # and all is well again
    assert clean(report) and served == Version(3, 7) and error < 1e-4


async def test_stop_string_seed_and_finish(
    tied_engine: Counting, tiny_model: Path, tmp_path: Path
) -> None:
    await Subject(tied_engine, weights_of(tiny_model), TIED, tmp_path).publish(
        version=Version(4, 1)
    )
    first = await tied_engine.generate(ask(n=2, max_tokens=20, ignore_eos=True, seed=7))
    again = await tied_engine.generate(ask(n=2, max_tokens=20, ignore_eos=True, seed=7))
    assert [c.tokens.tolist() for c in first] == [c.tokens.tolist() for c in again]
    assert first[0].tokens.tolist() != first[1].tokens.tolist()


async def test_seeds_where_prompts_are_computed_in_pieces(
    tied_engine: Counting, tiny_model: Path, tmp_path: Path
) -> None:
    """More prompts at once than a step has room for."""
    subject = Subject(tied_engine, weights_of(tiny_model), TIED, tmp_path)
    await subject.publish(version=Version(4, 2))
    asked = [ask(f"{i} " * 99, max_tokens=4, ignore_eos=True, seed=i) for i in range(24)]
    alone = [await tied_engine.generate(request) for request in asked]
    await subject.publish(version=Version(4, 3))  # prompts are in no cache any more
    together = await asyncio.gather(*map(tied_engine.generate, asked))
    assert sum(len(c.prompt_tokens) for (c,) in together) > 2048
    assert [c.tokens.tolist() for (c,) in together] == [c.tokens.tolist() for (c,) in alone]


@pytest.mark.parametrize("top_k", [-1, 20])
async def test_draws_follow_the_models_probabilities(
    tied_engine: Counting, tiny_model: Path, tmp_path: Path, top_k: int
) -> None:
    """Of a first token, with seeds and without: chi-square, of tokens that are expected five times."""
    import torch

    weights = weights_of(tiny_model)
    await Subject(tied_engine, weights, TIED, tmp_path).publish(version=Version(4, 4 + (top_k > 0)))
    asked = [
        ask(n=64, max_tokens=1, temperature=0.5, top_k=top_k, seed=1000 * i if i % 2 else None)
        for i in range(64)
    ]
    made = [
        c for answers in await asyncio.gather(*map(tied_engine.generate, asked)) for c in answers
    ]
    with torch.no_grad():
        logits = (
            reference(tiny_model, weights)(
                torch.from_numpy(made[0].prompt_tokens.astype(np.int64))[None]
            ).logits[0, -1]
            / 0.5
        )
    if top_k > 0:
        logits[logits < logits.topk(top_k).values[-1]] = float("-inf")
    counts = np.bincount([c.tokens[0] for c in made], minlength=len(logits))
    expected = logits.softmax(-1).numpy() * len(made)
    often = expected >= 5
    counts, expected = (np.append(x[often], x[~often].sum()) for x in (counts, expected))
    chi2 = ((counts - expected)[expected > 0] ** 2 / expected[expected > 0]).sum()
    assert counts[expected == 0].sum() == 0
    assert often.sum() >= 15 and chi2 < often.sum() + 5 * (2 * often.sum()) ** 0.5


@pytest.mark.slow
async def test_untied(tiny_untied: Path, environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environment.delenv("RFT_FAULT", raising=False)
    engine = await started(tiny_untied, environment)
    try:
        await check_parity(engine, tiny_untied, {}, tmp_path)
    finally:
        await engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
async def test_two_shards(
    tiny_model: Path, tiny_untied: Path, tied: bool, environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Tensor parallel 2: each worker loads and probes its own part."""
    folder = tiny_model if tied else tiny_untied
    for name in ("RFT_FAULT", "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_CPU_OMP_THREADS_BIND"):
        environment.delenv(name, raising=False)
    engine = await started(folder, environment, tensor_parallel_size=2)
    try:
        await check_parity(engine, folder, TIED if tied else {}, tmp_path)
    finally:
        await engine.close()


@pytest.mark.slow
async def test_fixed_weights_serve_at_once(
    tiny_model: Path, environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environment.delenv("RFT_FAULT", raising=False)
    folder = os.environ.get("TMPDIR")
    before = set(os.listdir(tempfile.gettempdir()))
    engine = await started(tiny_model, environment, fixed_weights=True)
    try:
        new = set(os.listdir(tempfile.gettempdir())) - before
        assert [n for n in new if not n.startswith(f"rft-vllm-{os.getpid()}-")] == [], (
            "whatever vLLM leaves goes with its owner"
        )
        assert os.environ.get("TMPDIR") == folder
        made = await engine.generate(
            GenerateRequest(prompt_tokens=(3, 4, 5), sampling=SamplingArgs(max_tokens=8))
        )
        assert (
            made[0].version == Version(1, 0)
            and difference(reference(tiny_model, weights_of(tiny_model)), made) < 1e-4
        )
        with pytest.raises(EngineFailed, match="fixed"):
            await engine.load(stage(tmp_path / "w", weights_of(tiny_model), Version(1, 1), TIED))
    finally:
        await engine.close()

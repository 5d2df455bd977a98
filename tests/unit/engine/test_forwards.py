"""Rows that come and go in a model's cache give what a forward without a cache gives, whatever
kinds of layers it has.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.cache_utils import Cache

from rft.engine import forwards
from rft.engine.rowbatch import RowBatch
from rft.engine.settings import EngineSettings
from rft.engine.transformers import TransformersEngine
from rft.errors import SetupError
from rft.testing import tiny
from rft.testing.engine_contract import Subject, ask, clean, shaken
from rft.types.completion import Completion
from rft.types.ids import Version
from rft.types.ports import ScoreRow
from tests.helpers import experts, families

# what transformers says of kernels that are not installed
pytestmark = pytest.mark.filterwarnings("ignore")
# their caches do not follow rows that leave
REFUSED = {"minimax": "MiniMax", "deepseek_v4": "DeepseekV4"}


def loaded(family: str, folder: Path) -> Any:
    return of_folder(families.make(family, folder, words=True), torch.float32)


def of_folder(made: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(made, dtype=dtype).eval()


@pytest.mark.parametrize("family", families.each(f for f in families.FAMILIES if f not in REFUSED))
def test_a_cache_changes_nothing(family: str, tmp_path: Path) -> None:
    forwards.prove(loaded(family, tmp_path / "m"), "engine")


@pytest.mark.parametrize("family", REFUSED)
def test_a_cache_that_does_not_follow_rows_is_refused(family: str, tmp_path: Path) -> None:
    with pytest.raises(
        SetupError,
        match=rf"engine: {REFUSED[family]}ForCausalLM cannot write texts with a cache: .* Use vllm",
    ):
        forwards.prove(loaded(family, tmp_path / "m"), "engine")


def test_rows_that_are_mixed_up_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that leaves takes the place of another: only a comparison sees it."""
    model = loaded("lfm2", tmp_path / "m")
    forwards.prove(model, "engine")
    reorder = Cache.reorder_cache
    monkeypatch.setattr(
        Cache,
        "reorder_cache",
        lambda self, order: reorder(self, order.flip(0) if len(order) == 2 else order - order),
    )
    with pytest.raises(
        SetupError, match=r"differ by .* at most from those without one, allowed are 1\.00e-03"
    ):
        forwards.prove(model, "engine")


@pytest.fixture(params=[torch.bfloat16, torch.float16], ids=str)
def loud(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """A random model in a short type whose logits are as large as a trained one's (standard
    deviation 3.4).
    """
    return of_folder(
        tiny.make(tmp_path / "loud", initializer_range=0.3, num_hidden_layers=6), request.param
    )


def test_rounding_of_large_logits_is_no_broken_cache(loud: Any) -> None:
    """U2: among all tokens of the vocabulary some are always off by more than any fixed limit."""

    def otherwise(module: torch.nn.Module, given: Any, out: torch.Tensor) -> torch.Tensor:
        if out.shape[1] > 1:
            return out
        # every second number gets another last bit
        signs = 1 - 2 * (torch.arange(out.shape[-1]) % 2)
        return (out.double() * (1 + torch.finfo(out.dtype).eps / 2 * signs)).to(out.dtype)

    loud.get_input_embeddings().register_forward_hook(otherwise)
    with torch.inference_mode():
        of_any, _ = forwards._differences(loud, sampled=False)
        of_sampled, _ = forwards._differences(loud, sampled=True)
    assert of_any.largest > (0.1 if loud.dtype == torch.bfloat16 else 0.02) > of_sampled.mean > 0
    forwards.prove(loud, "engine")


@pytest.mark.parametrize("broken", ["rows are swapped", "one token is lost", "places are one off"])
def test_a_broken_cache_is_refused_in_short_types(
    loud: Any, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """U2: what rounding explains is far less than what a wrong cache does."""
    decode = forwards.CachedRows.decode

    def wrong(self: Any, tokens: Any, cached: Any, only: int | None = None) -> torch.Tensor:
        if broken == "rows are swapped":
            return decode(self, tokens, cached, only).flip(0)
        if broken == "one token is lost":
            return decode(self, [0, *tokens[1:]], cached, only)
        return decode(self, tokens, [place - 1 for place in cached], only)

    monkeypatch.setattr(forwards.CachedRows, "decode", wrong)
    with pytest.raises(
        SetupError,
        match=r"differ by .* on average and .* at most from those without one, allowed are .*Use "
        r"vllm",
    ):
        forwards.prove(loud, "engine")


@pytest.mark.parametrize(
    ("family", "windows"), [("deepseek_v3", False), ("qwen3_5_text", False), ("gpt_oss", True)]
)
def test_as_many_rows_fit_as_their_caches_have_bytes_for(
    family: str, windows: bool, tmp_path: Path
) -> None:
    """State that has no tokens, layers without keys, and keys that are wider than values, are all
    counted.
    """
    model = loaded(family, tmp_path / "m")
    rows = 3
    tokens = 20
    made = forwards.make(model, None, alone=False)
    with torch.inference_mode():
        made.prefill([[5] * tokens] * rows)
    real = made.waiting_bytes()
    state, token = made.row_bytes()
    counted = rows * (state + tokens * token)
    assert (state > 0) == (family != "deepseek_v3") and (
        counted > real if windows else counted == real
    )
    for spare, fits in ((0, True), (-1, False)):
        batch = RowBatch(
            model, EngineSettings(model_path="", max_num_seqs=9, kv_cache_bytes=counted + spare), {}
        )
        asked: Any = [SimpleNamespace(need=tokens)] * rows
        assert batch.fits(asked) == fits


@pytest.fixture(params=["qwen3_5_text", pytest.param("gemma3_text", marks=pytest.mark.slow)])
def folder(request: Any, tmp_path: Path) -> Path:
    return families.make(request.param, tmp_path / "m", words=True)


async def started(folder: Path, **more: Any) -> tuple[Subject, Any]:
    settings = EngineSettings(
        engine_type="transformers",
        model_path=str(folder),
        max_model_len=120,
        max_num_seqs=7,
        **more,
    )
    engine = await TransformersEngine.start(settings)
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return Subject(engine, experts.weights(model), {}, folder.parent), model


def apart(model: Any, c: Completion) -> np.ndarray:
    ids = torch.from_numpy(np.concatenate([c.prompt_tokens, c.tokens]).astype(np.int64))[None]
    with torch.no_grad():
        logits = (
            model(ids, use_cache=False).logits[0, len(c.prompt_tokens) - 1 : -1]
            / c.sampling.temperature
        )
    want = logits.log_softmax(-1).gather(1, ids[0, len(c.prompt_tokens) :, None])[:, 0].numpy()
    return np.abs(want - c.logprobs)


async def test_rows_of_a_hybrid_come_go_and_are_computed_again(folder: Path) -> None:
    subject, model = await started(folder)
    try:
        old = shaken(subject.weights, 1)
        new = shaken(subject.weights, 2)
        assert clean(await subject.publish(old, Version(1, 1)))
        sizes = ((3, 2, 60), (3, 1, 4), (11, 2, 60), (5, 3, 9), (5, 1, 2))
        asked = [
            subject.engine.generate(ask("w" * size, n=n, max_tokens=most, temperature=0.9))
            for size, n, most in sizes
        ]
        running = asyncio.gather(*asked)
        await asyncio.wait([running], timeout=0.1)
        assert clean(await subject.publish(new, Version(1, 2)))
        made = [c for answers in await running for c in answers]
        for weights, version in ((old, Version(1, 1)), (new, Version(1, 2))):
            experts.set_weights(model, weights)
            for c in made:
                for span in c.version_spans:
                    assert (
                        span.version != version
                        or apart(model, c)[span.start : span.end].max() < 1e-4
                    )
        row = ScoreRow(
            tokens=np.concatenate([made[0].prompt_tokens, made[0].tokens]),
            prompt_length=len(made[0].prompt_tokens),
        )
        again = (await subject.engine.score(row)).logprobs
        ids = torch.from_numpy(row.tokens.astype(np.int64))[None]
        with torch.no_grad():
            want = model(ids, use_cache=False).logits[0, row.prompt_length - 1 : -1].log_softmax(-1)
        assert (
            np.abs(again - want.gather(1, ids[0, row.prompt_length :, None])[:, 0].numpy()).max()
            < 1e-4
        )
    finally:
        await subject.engine.close()


async def test_a_deterministic_hybrid_writes_the_same_in_any_company(folder: Path) -> None:
    subject, _ = await started(folder, deterministic=True)
    try:
        assert clean(await subject.publish())
        asked = [
            ask("q" * (1 + i // 2), n=2, max_tokens=4 + 3 * i, seed=i, ignore_eos=True)
            for i in range(4)
        ]
        alone = [await subject.engine.generate(request) for request in asked]
        together = await asyncio.gather(*map(subject.engine.generate, asked))
        for a, b in zip(
            (c for made in alone for c in made), (c for made in together for c in made), strict=True
        ):
            assert (
                a.tokens.tobytes() == b.tokens.tobytes()
                and a.logprobs.tobytes() == b.logprobs.tobytes()
            )
    finally:
        await subject.engine.close()


async def test_experts_of_a_hybrid_are_told(tmp_path: Path) -> None:
    folder = families.make("qwen3_next", tmp_path / "m", words=True)
    subject, _ = await started(folder, router_replay=True)
    model = experts.model(folder)
    try:
        assert clean(await subject.publish())
        asked = [ask("w" * (1 + 3 * i), n=1 + i, max_tokens=3 + 5 * i) for i in range(3)]
        for answers in await asyncio.gather(*map(subject.engine.generate, asked)):
            for c in answers:
                error, same = experts.compare(model, c)
                assert error < 1e-4 and same.all()
    finally:
        await subject.engine.close()

"""The tests that every engine must pass which takes an adapter alone.

    class TestMine(AdapterContract):
        @pytest.fixture
        async def adapted(self, tiny_model, tmp_path):
            ...
            yield Adapted(engine, tiny_model, tmp_path, modules)

Needs pytest with asyncio_mode=auto.  Depends on engines only through `rft.types.ports.Engine`; what
is right is said by transformers, with the product of the two matrices added to the weights.  One
engine may serve all tests.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from rft.testing.engine_contract import ask, clean, stage
from rft.types.adapter import SIDES, AdapterSpec, key
from rft.types.completion import Completion
from rft.types.ids import Version
from rft.types.modelfiles import fingerprint
from rft.types.ports import Engine, LoadReport

RANK = 4
SCALE = 1.5
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
Tensors = dict[str, np.ndarray]
_steps = itertools.count(1)


@dataclass
class Adapted:
    """An engine under test that was started with `model`, a folder for what is published, and the
    layers that have an adapter.
    """

    engine: Engine
    model: Path
    folder: Path
    modules: tuple[str, ...] = LINEAR
    arm: Callable[[str], Awaitable[None]] | None = (
        None  # the next load meets this fault; None: the engine is in the test's own process
    )

    def __post_init__(self) -> None:
        from safetensors.numpy import load_file

        self.base = load_file(self.model / "model.safetensors")

    def adapter(self, seed: int, *, size: float = 0.3) -> Tensors:
        """Random values for every layer of `modules`; both sides are drawn, so that all of them
        count.
        """
        random = np.random.default_rng(seed)
        made: Tensors = {}
        for name, weight in self.base.items():
            module = name.removesuffix(".weight")
            if module.rpartition(".")[2] in self.modules:
                for side, shape in zip(
                    SIDES, ((RANK, weight.shape[1]), (weight.shape[0], RANK)), strict=True
                ):
                    made[key(module, side)] = (
                        size * shape[1] ** -0.5 * random.standard_normal(shape)
                    ).astype(np.float32)
        return made

    async def publish(
        self,
        tensors: Mapping[str, np.ndarray],
        *,
        damaged: bool = False,
        version: Version | None = None,
    ) -> LoadReport:
        """pause, load, resume.  `damaged`: a byte changes after the hashes were taken."""
        version = version or Version(1, next(_steps))
        path = self.folder / f"adapter-{version.step % 4}"
        manifest = stage(path, tensors, version)
        if damaged:
            raw = bytearray(path.read_bytes())
            raw[7] ^= 1
            path.write_bytes(raw)
        spec = AdapterSpec(rank=RANK, scale=SCALE, base=fingerprint(self.model))
        await self.engine.pause()
        try:
            report = await self.engine.load(msgspec.structs.replace(manifest, adapter=spec))
        finally:
            await self.engine.resume()
        for other in self.folder.glob("adapter-*"):
            if (
                other != path
            ):  # only the newest version and the one before are kept by a transport; what was loaded is the engine's own
                other.write_bytes(b"\0" * other.stat().st_size)
        return report

    def merged(self, tensors: Mapping[str, np.ndarray]) -> Any:
        """The transformers model with the adapter added to its weights."""
        import torch
        from transformers import AutoModelForCausalLM

        weights = {}
        for name, weight in self.base.items():
            a, b = (tensors.get(key(name.removesuffix(".weight"), side)) for side in SIDES)
            weights[name] = torch.from_numpy(
                weight if a is None or b is None else weight + SCALE * (b @ a)
            )
        model = AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.float32)
        model.load_state_dict(weights, strict=False)
        model.tie_weights()
        return model


def difference(model: Any, made: list[Completion], first: int = 0) -> float:
    """Largest difference of log-probs from token `first` on, engine against model."""
    import torch

    found = 0.0
    for c in made:
        ids = torch.from_numpy(np.concatenate([c.prompt_tokens, c.tokens]).astype(np.int64))[None]
        with torch.no_grad():
            logits = model(ids).logits[0, len(c.prompt_tokens) - 1 : -1] / c.sampling.temperature
        want = logits.log_softmax(-1).gather(1, ids[0, len(c.prompt_tokens) :, None])[:, 0].numpy()
        found = max(found, float(np.abs(want - c.logprobs)[first:].max()))
    return found


class AdapterContract:
    """Subclass it and give a fixture `adapted`."""

    async def test_every_adapter_counts(self, adapted: Adapted) -> None:
        before: Any = None
        for seed in (1, 2, 3):
            tensors = adapted.adapter(seed)
            report = await adapted.publish(tensors, version=Version(7, next(_steps)))
            assert (
                clean(report) and report.num_tensors == len(tensors) and report.probed_layers > 0
            ), report
            made = await adapted.engine.generate(ask(n=4, max_tokens=24, temperature=0.8))
            made += await adapted.engine.generate(ask("another, longer prompt", max_tokens=8))
            assert {c.version for c in made} == {report.version}
            model = adapted.merged(tensors)
            assert difference(model, made) < 1e-4
            assert before is None or difference(before, made) > 1e-2, "the adapter before is gone"
            before = model

    async def test_an_empty_adapter_is_the_base(self, adapted: Adapted) -> None:
        zero = {n: t * (".lora_A." in n) for n, t in adapted.adapter(1).items()}
        assert clean(await adapted.publish(zero))
        assert (
            difference(adapted.merged({}), await adapted.engine.generate(ask(n=2, max_tokens=16)))
            < 1e-4
        )

    async def test_what_does_not_fit_never_touches_the_model(self, adapted: Adapted) -> None:
        good = adapted.adapter(4)
        bad = adapted.adapter(5)
        assert clean(served := await adapted.publish(good))
        last = list(bad)[-1]
        module = key("lm_head", "A"), key("lm_head", "B")
        hidden = adapted.base["model.norm.weight"].shape[0]
        wrong = {
            "missing": {n: t for n, t in bad.items() if n != last},
            "a layer less": dict(list(bad.items())[2:]),
            "another name": {**bad, "model.norm.weight": adapted.base["model.norm.weight"]},
            "no such layer": {
                **bad,
                module[0]: np.ones((RANK, hidden), np.float32),
                module[1]: np.ones((300, RANK), np.float32),
            },
            "another rank": {**bad, last: np.ones((bad[last].shape[0], RANK + 1), np.float32)},
            "another shape": {**bad, last: np.ones((bad[last].shape[0] + 2, RANK), np.float32)},
        }
        for what, tensors in wrong.items():
            report = await adapted.publish(tensors)
            assert report.missing or report.unexpected, what
        assert (await adapted.publish(bad, damaged=True)).bad_hash
        made = await adapted.engine.generate(ask(n=2, max_tokens=16))
        assert {c.version for c in made} == {served.version} and difference(
            adapted.merged(good), made
        ) < 1e-4

    async def test_the_way_back(self, adapted: Adapted) -> None:
        old = adapted.adapter(6)
        new = adapted.adapter(7)
        request = ask(n=2, max_tokens=16, seed=5)
        await adapted.publish(old)
        first = await adapted.engine.generate(request)
        await adapted.publish(new)
        between = await adapted.engine.generate(request)
        await adapted.publish(old)
        again = await adapted.engine.generate(request)
        for one, two, other in zip(first, again, between, strict=True):
            assert (
                one.tokens.tolist() == two.tokens.tolist()
                and np.abs(one.logprobs - two.logprobs).max() < 1e-5
            )
            assert (
                one.tokens.tolist() != other.tokens.tolist()
                or np.abs(one.logprobs - other.logprobs).max() > 1e-2
            )

    async def test_a_request_under_way_goes_on_with_the_new_one(self, adapted: Adapted) -> None:
        """Its keys and values too: later tokens have the log-probs of the new model, prompt
        included.
        """
        old = adapted.adapter(8)
        new = adapted.adapter(9)
        await adapted.publish(old)
        task = asyncio.create_task(adapted.engine.generate(ask(max_tokens=400, ignore_eos=True)))
        await asyncio.wait([task], timeout=0.1)
        served = await adapted.publish(new)
        (made,) = await task
        cut = next(s for s in made.version_spans if s.version == served.version).start
        assert 0 < cut < 400, made.version_spans
        assert difference(adapted.merged(new), [made], first=cut) < 1e-4

    async def test_each_fault_is_visible(
        self, adapted: Adapted, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What the synchronizer would see of it."""

        async def load(fault: str, seed: int) -> tuple[LoadReport, float]:
            tensors = adapted.adapter(seed)
            if adapted.arm is not None and fault:
                await adapted.arm(fault)
            with monkeypatch.context() as patch:
                if adapted.arm is None:
                    patch.setenv("RFT_FAULT", fault)
                report = await adapted.publish(tensors)
            return report, difference(
                adapted.merged(tensors), await adapted.engine.generate(ask(n=2, max_tokens=16))
            )

        report, error = await load("sync.skip", 10)
        assert clean(report) and error > 1e-2, "the report lies, the log-probs do not"
        report, error = await load("sync.stale_head", 11)
        assert report.probe_error > 1e-2 and error > 1e-3, report
        assert (await load("sync.corrupt_byte", 12))[0].bad_hash and (
            await load("sync.missing_tensor", 13)
        )[0].missing
        before = next(_steps)
        assert (await load("sync.wrong_version", 14))[0].version.step == before + 2
        report, error = await load("", 15)
        assert clean(report) and error < 1e-4

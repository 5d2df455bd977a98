"""The tests that every engine must pass.  Ships to users.

    class TestMine(EngineContract):
        @pytest.fixture
        async def subject(self, tiny_model, tmp_path):
            ...
            yield Subject(engine, weights, tied, tmp_path)   # running, with `weights` loaded as version 1:0

Needs pytest with asyncio_mode=auto.  Depends on engines only through `rft.types.ports.Engine` and
writes published weights itself.  One engine may serve all tests; each test leaves it running with
the weights it loaded.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import xxhash

from rft.engine.base import PromptTooLong
from rft.errors import EngineFailed
from rft.types.completion import Completion
from rft.types.ids import Version
from rft.types.metrics import reduce
from rft.types.ports import Engine, GenerateRequest, LoadReport, TensorSpec, WeightManifest
from rft.types.task import SamplingArgs

Weights = Mapping[str, np.ndarray]  # float32, by Hugging Face parameter name; tied weights once
_steps = itertools.count(1)


def stage(
    path: Path, weights: Weights, version: Version, tied: dict[str, str] | None = None
) -> WeightManifest:
    """Write `weights` to `path` as a transport does, and return their manifest."""
    specs: list[TensorSpec] = []
    blob = bytearray()
    for name, array in weights.items():
        raw = np.ascontiguousarray(array, np.float32).tobytes()
        blob += b"\0" * (-len(blob) % 64)
        specs.append(
            TensorSpec(
                name, "F32", tuple(array.shape), len(blob), len(raw), xxhash.xxh3_128_hexdigest(raw)
            )
        )
        blob += raw
    path.write_bytes(blob)
    return WeightManifest(
        version=version,
        transport="checkpoint",
        path=str(path),
        tensors=tuple(specs),
        tied=tied or {},
    )


def shaken(weights: Weights, seed: int, scale: float = 0.3) -> dict[str, np.ndarray]:
    """Return other weights of the same shapes: each tensor plus noise of `scale` times its standard
    deviation.
    """
    random = np.random.default_rng(seed)
    return {
        n: (w + scale * (w.std() + 1e-3) * random.standard_normal(w.shape)).astype(np.float32)
        for n, w in weights.items()
    }


def ask(
    text: str = "hello", *, n: int = 1, max_tokens: int = 8, **sampling: object
) -> GenerateRequest:
    return GenerateRequest(
        messages=({"role": "user", "content": text},),
        n=n,
        sampling=SamplingArgs(max_tokens=max_tokens, **sampling),  # type: ignore[arg-type]
    )


@dataclass
class Subject:
    """An engine under test, the weights it serves, and a folder for further weights."""

    engine: Engine
    weights: Weights
    tied: dict[str, str]
    folder: Path
    max_prompt_tokens: int = 500
    # pause the next answers half-way, for fast engines
    hold: Callable[[], None] = field(default=lambda: None)
    release: Callable[[], None] = field(default=lambda: None)

    async def publish(
        self,
        weights: Weights | None = None,
        version: Version | None = None,
        *,
        clear_cache: bool = True,
    ) -> LoadReport:
        """Pause, load and resume."""
        version = version or Version(1, next(_steps))
        manifest = stage(
            self.folder / f"weights-{version.step % 4}",
            self.weights if weights is None else weights,
            version,
            self.tied,
        )
        await self.engine.pause(clear_cache=clear_cache)
        report = await self.engine.load(manifest)
        await self.engine.resume()
        return report


def clean(report: LoadReport) -> bool:
    return (
        not (report.missing or report.unexpected or report.bad_hash) and report.probe_error < 1e-4
    )


def check_completion(c: Completion, sampling: SamplingArgs) -> None:
    count = len(c.tokens)
    assert (
        c.prompt_tokens.dtype == np.int32
        and c.tokens.dtype == np.int32
        and c.logprobs.dtype == np.float32
    )
    assert len(c.logprobs) == count > 0 and count <= sampling.max_tokens
    assert np.isfinite(c.logprobs).all() and (c.logprobs <= 1e-4).all()
    assert c.finish_reason in ("stop", "length") and c.sampling == sampling and c.engine
    ends = [0, *(s.end for s in c.version_spans)]
    assert ends[-1] == count and [s.start for s in c.version_spans] == ends[:-1]


class EngineContract:
    """Subclass it and define a fixture `subject`."""

    async def test_completions_are_whole_and_as_many_as_asked(self, subject: Subject) -> None:
        request = ask(n=3)
        completions = await subject.engine.generate(request)
        assert len(completions) == 3
        for c in completions:
            check_completion(c, request.sampling)
            assert np.array_equal(c.prompt_tokens, completions[0].prompt_tokens)

    async def test_given_tokens_are_the_prompt(self, subject: Subject) -> None:
        first = (await subject.engine.generate(ask()))[0]
        prompt = tuple(int(t) for t in (*first.prompt_tokens, *first.tokens))
        again = await subject.engine.generate(
            GenerateRequest(prompt_tokens=prompt, sampling=SamplingArgs(max_tokens=4))
        )
        assert tuple(again[0].prompt_tokens.tolist()) == prompt

    async def test_a_conversation_goes_on_from_its_tokens(self, subject: Subject) -> None:
        request = ask(max_tokens=4)
        (first,) = await subject.engine.generate(request)
        before = np.concatenate([first.prompt_tokens, first.tokens])
        messages = (*request.messages, first.message, {"role": "user", "content": "more"})
        again = GenerateRequest(
            messages=messages,
            prefix_tokens=before,
            prefix_messages=2,
            sampling=SamplingArgs(max_tokens=4),
        )
        (second,) = await subject.engine.generate(again)
        assert np.array_equal(second.prompt_tokens[: len(before)], before) and len(
            second.prompt_tokens
        ) > len(before)

    async def test_a_long_prompt_is_refused_before_generating(self, subject: Subject) -> None:
        with pytest.raises(PromptTooLong, match="at most"):
            await subject.engine.generate(
                GenerateRequest(prompt_tokens=(5,) * (subject.max_prompt_tokens + 1))
            )

    async def test_token_ids_that_the_model_does_not_have_are_refused(
        self, subject: Subject
    ) -> None:
        for wrong in ((5, -1), (2**31 - 1,)):
            with pytest.raises(ValueError, match="token id"):
                await subject.engine.generate(GenerateRequest(prompt_tokens=wrong))
        check_completion((await subject.engine.generate(ask()))[0], ask().sampling)

    async def test_an_empty_request_is_refused(self, subject: Subject) -> None:
        with pytest.raises(ValueError, match="messages"):
            await subject.engine.generate(GenerateRequest())

    async def test_max_tokens_ends_a_completion(self, subject: Subject) -> None:
        completions = await subject.engine.generate(
            ask("a long story", max_tokens=5, ignore_eos=True)
        )
        assert len(completions[0].tokens) == 5 and completions[0].finish_reason == "length"

    async def test_greedy_answers_are_equal(self, subject: Subject) -> None:
        first, second = await subject.engine.generate(ask(n=2, temperature=0.0))
        assert first.tokens.tolist() == second.tokens.tolist()

    async def test_many_requests_at_once(self, subject: Subject) -> None:
        requests = [ask(f"question {i % 5}", n=1 + i % 3, max_tokens=1 + i % 7) for i in range(24)]
        for request, completions in zip(
            requests, await asyncio.gather(*map(subject.engine.generate, requests)), strict=True
        ):
            assert len(completions) == request.n
            for c in completions:
                check_completion(c, request.sampling)

    async def test_a_load_names_what_follows(self, subject: Subject) -> None:
        version = Version(1, next(_steps))
        report = await subject.publish(version=version)
        assert (
            clean(report)
            and report.version == version
            and report.num_tensors == len(subject.weights)
        )
        assert (
            report.nbytes == sum(w.nbytes for w in subject.weights.values())
            and report.probed_layers > 0
        )
        completions = await subject.engine.generate(ask())
        assert {s.version for s in completions[0].version_spans} == {version}

    async def test_a_paused_engine_keeps_its_requests(self, subject: Subject) -> None:
        await subject.engine.pause()
        task = asyncio.create_task(subject.engine.generate(ask()))
        done, _ = await asyncio.wait([task], timeout=0.1)
        assert not done
        await subject.engine.resume()
        check_completion((await task)[0], ask().sampling)

    async def test_a_load_while_an_answer_is_written(self, subject: Subject) -> None:
        subject.hold()
        request = ask("x" * 40, n=2, max_tokens=300, ignore_eos=True)
        task = asyncio.create_task(subject.engine.generate(request))
        await asyncio.wait([task], timeout=0.05)  # lets the request begin
        version = Version(1, next(_steps))
        assert clean(await subject.publish(version=version))
        subject.release()
        for c in await task:
            check_completion(c, request.sampling)
            assert c.version_spans[-1].version == version and len(c.version_spans) <= 2
            assert c.version_spans[0].version <= version

    async def test_an_engine_that_slept_wakes_with_the_next_weights(self, subject: Subject) -> None:
        """Memory is freed and reallocated; earlier requests continue.  An engine without memory to
        free does nothing.
        """
        subject.hold()
        request = ask("x" * 40, max_tokens=300, ignore_eos=True)
        task = asyncio.create_task(subject.engine.generate(request))
        await asyncio.wait([task], timeout=0.05)  # lets the request begin
        await subject.engine.pause()
        await subject.engine.sleep()
        await subject.engine.sleep()
        version = Version(1, next(_steps))
        assert clean(await subject.publish(version=version))
        subject.release()
        check_completion((await task)[0], request.sampling)
        assert (await subject.engine.generate(ask()))[0].version == version

    async def test_a_load_needs_a_pause(self, subject: Subject) -> None:
        manifest = stage(
            subject.folder / "unpaused", subject.weights, Version(1, next(_steps)), subject.tied
        )
        with pytest.raises(EngineFailed, match="pause"):
            await subject.engine.load(manifest)

    async def test_damaged_weights_are_named_and_not_loaded(self, subject: Subject) -> None:
        before = (await subject.engine.generate(ask()))[0].version
        path = subject.folder / "damaged"
        manifest = stage(path, shaken(subject.weights, 1), Version(1, next(_steps)), subject.tied)
        victim = manifest.tensors[len(manifest.tensors) // 2]
        raw = bytearray(path.read_bytes())
        raw[victim.offset] ^= 1
        path.write_bytes(raw)
        await subject.engine.pause()
        report = await subject.engine.load(manifest)
        await subject.engine.resume()
        assert report.bad_hash == (victim.name,) and report.num_tensors == 0
        assert (await subject.engine.generate(ask()))[0].version == before

    async def test_other_names_are_reported_and_not_loaded(self, subject: Subject) -> None:
        before = (await subject.engine.generate(ask()))[0].version
        names = list(subject.weights)
        some = {n: subject.weights[n] for n in names[1:]} | {
            "stranger.weight": np.zeros((2, 2), np.float32)
        }
        report = await subject.publish(some)
        assert (
            report.missing == (names[0],)
            and report.unexpected == ("stranger.weight",)
            and report.num_tensors == 0
        )
        assert (await subject.engine.generate(ask()))[0].version == before

    async def test_an_abandoned_request_does_no_harm(self, subject: Subject) -> None:
        await subject.engine.pause()
        task = asyncio.create_task(subject.engine.generate(ask(n=4, max_tokens=200)))
        await asyncio.wait([task], timeout=0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await subject.engine.resume()
        check_completion((await subject.engine.generate(ask()))[0], ask().sampling)

    async def test_health_and_metrics(self, subject: Subject) -> None:
        await subject.engine.health()
        await subject.engine.generate(ask())
        values = reduce(await subject.engine.metrics())
        assert values["engine/requests_running"] == 0 and values["engine/generated_tokens"] > 0

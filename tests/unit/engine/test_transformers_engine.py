"""What the transformers engine promises beyond the contract: exact log-probs, reproducible draws,
visible faults.
"""

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from rft import RunContext, Score, Task, Transcript, Workflow
from rft.engine.base import PromptTooLong
from rft.engine.built_in import make
from rft.engine.local_engine import LONG_CHARS
from rft.engine.settings import EngineSettings
from rft.engine.transformers import TransformersEngine, _end_tokens
from rft.errors import EngineFailed, SetupError
from rft.testing import run_workflow_async, tiny
from rft.testing.engine_contract import Subject, ask, clean, shaken
from rft.types.completion import Completion
from rft.types.ids import Version
from tests.helpers import experts, families

TIED = {"lm_head.weight": "model.embed_tokens.weight"}


@pytest.fixture
async def subject(tiny_model: Path, tmp_path: Path) -> AsyncIterator[Subject]:
    from safetensors.numpy import load_file

    settings = EngineSettings(
        engine_type="transformers", model_path=str(tiny_model), max_model_len=400, max_num_seqs=6
    )
    engine = await TransformersEngine.start(settings)
    subject = Subject(engine, load_file(tiny_model / "model.safetensors"), TIED, tmp_path)
    yield subject
    await engine.close()


def reference(folder: Path, weights: dict[str, np.ndarray]) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.load_state_dict({n: torch.from_numpy(w) for n, w in weights.items()}, strict=False)
    model.tie_weights()
    return model


def errors(model: Any, c: Completion) -> np.ndarray:
    """|log-prob of the engine - log-prob of the model| for each token."""
    ids = torch.from_numpy(np.concatenate([c.prompt_tokens, c.tokens]).astype(np.int64))[None]
    with torch.no_grad():
        logits = model(ids).logits[0, len(c.prompt_tokens) - 1 : -1] / c.sampling.temperature
    want = logits.log_softmax(-1).gather(1, ids[0, len(c.prompt_tokens) :, None])[:, 0].numpy()
    return np.abs(want - c.logprobs)


async def test_it_serves_nothing_before_the_first_load(subject: Subject) -> None:
    with pytest.raises(EngineFailed, match="no weights were loaded"):
        await subject.engine.generate(ask())


async def test_log_probs_with_rows_that_come_and_go(subject: Subject, tiny_model: Path) -> None:
    """Prompts and answers of many lengths through six rows: every log-prob is the model's own."""
    weights = shaken(subject.weights, 3)
    assert clean(await subject.publish(weights))
    model = reference(tiny_model, weights)
    requests = [
        ask(
            "w" * (1 + 7 * i % 40),
            n=1 + i % 4,
            max_tokens=1 + 5 * i % 30,
            temperature=1.0 - 0.05 * i,
        )
        for i in range(10)
    ]
    for made in await asyncio.gather(*map(subject.engine.generate, requests)):
        assert max(errors(model, c).max() for c in made) < 1e-5


async def test_choices_share_the_probability(subject: Subject, tiny_model: Path) -> None:
    weights = shaken(subject.weights, 5)
    await subject.publish(weights)
    request = msgspec.structs.replace(ask("which?", temperature=0.0), choices=("yes", "no"))
    (c,) = await subject.engine.generate(request)
    ids = torch.from_numpy(c.prompt_tokens.astype(np.int64))[None]
    with torch.no_grad():
        logits = reference(tiny_model, weights)(ids).logits[0, -1]
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    first = [
        tokenizer("\n" + word, add_special_tokens=False)["input_ids"][1] for word in request.choices
    ]
    shares = logits[first].softmax(0)
    assert len(c.tokens) == 1 and c.tokens[0] == first[int(shares.argmax())]
    assert np.exp(c.logprobs[0]) == pytest.approx(float(shares.max()), abs=1e-5)
    with pytest.raises(ValueError, match="begin with another token"):
        await subject.engine.generate(msgspec.structs.replace(request, choices=("yes", "yes")))


@pytest.mark.e2e
async def test_a_load_in_the_middle_recomputes_the_cache(
    subject: Subject, tiny_model: Path
) -> None:
    old = shaken(subject.weights, 1)
    new = shaken(subject.weights, 2)
    await subject.publish(old, Version(1, 1))
    task = asyncio.create_task(subject.engine.generate(ask(n=3, max_tokens=300, ignore_eos=True)))
    await asyncio.wait([task], timeout=0.1)
    await subject.publish(new, Version(1, 2))
    for c in await task:
        cut = c.version_spans[-1].start
        assert [s.version for s in c.version_spans] == [
            Version(1, 1),
            Version(1, 2),
        ] and 0 < cut < 300
        assert errors(reference(tiny_model, old), c)[:cut].max() < 1e-5
        assert errors(reference(tiny_model, new), c)[cut:].max() < 1e-5


async def test_a_seed_gives_the_same_answer_in_any_company(subject: Subject) -> None:
    await subject.publish()
    request = ask("seeded", n=2, max_tokens=20, seed=11, ignore_eos=True)
    alone = await subject.engine.generate(request)
    crowd = [subject.engine.generate(ask(f"other {i}", n=2, max_tokens=9)) for i in range(3)]
    beside, *_ = await asyncio.gather(subject.engine.generate(request), *crowd)
    assert [c.tokens.tolist() for c in alone] == [c.tokens.tolist() for c in beside]
    assert alone[0].tokens.tolist() != alone[1].tokens.tolist()


async def test_equal_batches_are_equal_to_the_bit(subject: Subject) -> None:
    await subject.publish()
    runs = []
    for _ in range(2):
        await subject.engine.pause()
        tasks = [
            asyncio.create_task(subject.engine.generate(ask(f"q{i}", n=2, max_tokens=12, seed=i)))
            for i in range(3)
        ]
        await asyncio.wait(tasks, timeout=0.05)  # all of them are queued
        await subject.engine.resume()
        runs.append([c for made in await asyncio.gather(*tasks) for c in made])
    for a, b in zip(*runs, strict=True):
        assert (
            a.tokens.tobytes() == b.tokens.tobytes()
            and a.logprobs.tobytes() == b.logprobs.tobytes()
        )


async def test_deterministic_answers_are_equal_to_the_bit_in_any_company(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Prompts that come alone, late, or among others that end at other times."""
    from safetensors.numpy import load_file

    settings = EngineSettings(
        engine_type="transformers",
        model_path=str(tiny_model),
        max_model_len=400,
        max_num_seqs=9,
        deterministic=True,
    )
    subject = Subject(
        await TransformersEngine.start(settings),
        load_file(tiny_model / "model.safetensors"),
        TIED,
        tmp_path,
    )
    try:
        await subject.publish(shaken(subject.weights, 3))
        asked = [
            ask(f"q{'x' * i}", n=2, max_tokens=5 + 4 * i, seed=i, ignore_eos=True) for i in range(4)
        ]
        alone = [await subject.engine.generate(request) for request in asked]
        together = await asyncio.gather(*map(subject.engine.generate, asked))
        late = asyncio.create_task(
            subject.engine.generate(ask("other", max_tokens=200, ignore_eos=True))
        )
        backwards = await asyncio.gather(
            *(subject.engine.generate(request) for request in reversed(asked))
        )
        late.cancel()
        for runs in zip(alone, together, reversed(backwards), strict=True):
            for a, b, c in zip(*runs, strict=True):
                assert a.tokens.tobytes() == b.tokens.tobytes() == c.tokens.tobytes()
                assert a.logprobs.tobytes() == b.logprobs.tobytes() == c.logprobs.tobytes()
    finally:
        await subject.engine.close()


async def test_a_stop_string_ends_and_is_cut_off(subject: Subject) -> None:
    await subject.publish()
    whole = (await subject.engine.generate(ask(max_tokens=60, seed=1, ignore_eos=True)))[0]
    stop = next(ch for ch in whole.text if ch.isascii() and ch.isalnum())
    cut = (
        await subject.engine.generate(ask(max_tokens=60, seed=1, ignore_eos=True, stop=(stop,)))
    )[0]
    assert (
        cut.finish_reason == "stop"
        and cut.text == whole.text.split(stop, 1)[0]
        and len(cut.tokens) < len(whole.tokens)
    )


@pytest.mark.parametrize(
    "point", ["skip", "stale_head", "corrupt_byte", "missing_tensor", "wrong_version"]
)
async def test_each_fault_is_visible(
    subject: Subject, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    await subject.publish(version=Version(1, 1))
    monkeypatch.setenv("RFT_FAULT", f"sync.{point}")
    weights = shaken(subject.weights, 4)
    report = await subject.publish(weights, Version(1, 2))
    made = (await subject.engine.generate(ask(max_tokens=16)))[0]
    error = errors(reference(tiny_model, weights), made).max()
    match point:
        case "skip":
            assert clean(report) and error > 1e-2
        case "stale_head":
            assert report.probe_error > 1e-2 and report.probe_worst == "lm_head" and error > 1e-2
        case "corrupt_byte":
            assert report.bad_hash and made.version == Version(1, 1)
        case "missing_tensor":
            assert report.missing and made.version == Version(1, 1)
        case "wrong_version":
            assert report.version == made.version == Version(1, 3) and error < 1e-5
    monkeypatch.delenv("RFT_FAULT")
    assert clean(await subject.publish(weights, Version(1, 5)))
    assert (
        errors(reference(tiny_model, weights), (await subject.engine.generate(ask()))[0]).max()
        < 1e-5
    )


async def test_what_a_pause_holds_up(subject: Subject) -> None:
    await subject.publish()
    task = asyncio.create_task(subject.engine.generate(ask(n=2, max_tokens=300, ignore_eos=True)))
    await asyncio.wait([task], timeout=0.1)
    held = (await subject.publish(version=Version(1, 900))).paused
    made = await task
    assert (held.requests, held.aborted) == (2, 0)
    before = [c.version_spans[-1].start for c in made]
    assert held.recomputed_tokens == sum(
        len(c.prompt_tokens) + n - 1 for c, n in zip(made, before, strict=True) if n
    )
    idle = (await subject.publish(version=Version(1, 901))).paused
    assert (idle.requests, idle.recomputed_tokens) == (0, 0)


async def test_a_closed_engine_fails_what_waits(subject: Subject) -> None:
    await subject.publish()
    await subject.engine.pause()
    task = asyncio.create_task(subject.engine.generate(ask()))
    await asyncio.wait([task], timeout=0.05)
    await subject.engine.close()
    await subject.engine.close()
    with pytest.raises(EngineFailed, match="closed"):
        await task
    with pytest.raises(EngineFailed, match="closed"):
        await subject.engine.health()


async def test_a_long_prompt_is_tokenised_while_others_have_the_event_loop(
    tiny_model: Path,
) -> None:
    settings = EngineSettings(
        engine_type="transformers",
        model_path=str(tiny_model),
        max_model_len=400,
        fixed_weights=True,
    )
    engine = await TransformersEngine.start(settings)
    try:
        asked = asyncio.ensure_future(engine.generate(ask("a word " * LONG_CHARS)))
        turns = 0  # of the event loop
        while not asked.done():
            await asyncio.sleep(0)
            turns += 1
        with pytest.raises(PromptTooLong):
            asked.result()
        assert turns > 10
    finally:
        await engine.close()


async def test_no_model_is_said_plainly(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="no model could be loaded"):
        await TransformersEngine.start(
            EngineSettings(engine_type="transformers", model_path=str(tmp_path))
        )


async def test_a_tied_model_has_no_output_layer_of_its_own(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Also where its files hold one: trainer and vLLM do not read it, and none is published."""
    from safetensors.numpy import load_file, save_file

    weights = load_file(tiny_model / "model.safetensors")
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    save_file(
        weights | {"lm_head.weight": np.zeros((259, 128), np.float32)},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    engine = await TransformersEngine.start(
        EngineSettings(engine_type="transformers", model_path=str(folder), max_model_len=400)
    )
    await Subject(engine, weights, TIED, tmp_path).publish()
    (c,) = await engine.generate(ask(max_tokens=20))
    await engine.close()
    assert errors(reference(tiny_model, weights), c).max() < 1e-4


@pytest.mark.parametrize(
    ("page", "ends"),
    [('{"eos_token_id": [50, 70]}', {2, 50, 70}), ('{"top_k": 5}', {2}), (None, {2, 60})],
)
def test_answers_end_where_they_end_in_vllm(
    page: str | None, ends: set[int], tmp_path: Path
) -> None:
    """By the tokenizer (2) and generation_config.json; by config.json (60) only where that file is
    missing.
    """
    from transformers import AutoModelForCausalLM

    folder = tiny.make(tmp_path / "model", eos_token_id=60)
    (folder / "generation_config.json").unlink()
    if page is not None:
        (folder / "generation_config.json").write_text(page)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert set(_end_tokens(model, AutoTokenizer.from_pretrained(folder))) == ends


async def test_a_model_of_texts_and_images_writes_texts(tmp_path: Path) -> None:
    """Its configuration may name no end token: then the tokenizer does."""
    from transformers import AutoModelForCausalLM

    folder = families.with_images(tmp_path / "model")
    settings = EngineSettings(
        engine_type="transformers", model_path=str(folder), max_model_len=100, fixed_weights=True
    )
    engine = await TransformersEngine.start(settings)
    (c,) = await engine.generate(ask(max_tokens=12, ignore_eos=True))
    await engine.close()
    assert len(c.tokens) == 12
    assert (
        errors(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), c).max()
        < 1e-3
    )


async def test_it_tells_the_experts_of_every_token(tmp_path: Path) -> None:
    """Of prompts that are shared, rows that come and go, and a cache that is computed again."""
    sizes = {**families.TINY["qwen3_moe"], "initializer_range": 0.1}
    folder = tiny.make(tmp_path / "m", family="qwen3_moe", tied=False, **sizes)
    model = experts.model(folder)
    settings = EngineSettings(
        engine_type="transformers",
        model_path=str(folder),
        max_model_len=200,
        max_num_seqs=6,
        router_replay=True,
    )
    engine = await TransformersEngine.start(settings)
    try:
        subject = Subject(engine, experts.weights(model), {}, tmp_path)
        assert clean(await subject.publish())
        requests = [
            ask("w" * (1 + 7 * i % 40), n=1 + i % 4, max_tokens=1 + 5 * i % 30) for i in range(8)
        ]
        running = asyncio.gather(*map(engine.generate, requests))
        assert clean(await subject.publish())
        for c in (c for answers in await running for c in answers):
            error, same = experts.compare(model, c)
            assert error < 1e-4 and same.all()
    finally:
        await engine.close()


async def test_a_library_registers_the_models_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, library = families.with_own_class(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    own = {"model_path": str(folder), "external_lib": library}
    engine = await make(
        EngineSettings(engine_type="transformers", max_model_len=100, fixed_weights=True, **own)
    )
    (c,) = await engine.generate(ask(max_tokens=4, ignore_eos=True))
    await engine.close()
    assert len(c.tokens) == 4


class AsksATool(Workflow):
    """Answers a call of a tool, as a workflow of one's own does."""

    async def run(self, task: Task, ctx: RunContext) -> Transcript:
        messages = task.chat()
        answer = await ctx.chat(messages, max_tokens=4)
        await ctx.chat(
            [*messages, answer.message, {"role": "tool", "content": "RESULT42"}], max_tokens=4
        )
        return ctx.transcript(score=Score(value=1.0))


async def test_a_tool_result_that_the_template_drops_fails_the_run(tiny_model: Path) -> None:
    """Finding M2: such a run was done, and its row had no RESULT42."""
    template = (Path(__file__).parents[2] / "data" / "chat_templates" / "phi3.jinja").read_text()
    whole = template.replace("m.role == 'user'", "m.role in ['user', 'tool']")
    for text, ok in ((whole, True), (template, False)):
        settings = EngineSettings(
            engine_type="transformers",
            model_path=str(tiny_model),
            max_model_len=400,
            fixed_weights=True,
            chat_template=text,
        )
        engine = await TransformersEngine.start(settings)
        try:
            result = await run_workflow_async(
                AsksATool, {"prompt": "Which?"}, engine, may_fail=True
            )
        finally:
            await engine.close()
        (run,) = result.runs
        if ok:
            tokens = run.experiences[0].tokens.tolist()
            assert "RESULT42" in AutoTokenizer.from_pretrained(tiny_model).decode(tokens)
        else:
            assert run.reason.startswith(
                "MessageLeftOut: the chat template does not write message 2 (role tool: 'RESULT42')"
            )

"""A teacher with another tokenizer scores the policy's tokens by spans of their text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rft.engine.built_in import make
from rft.engine.chat import Chat
from rft.engine.settings import EngineSettings
from rft.engine.spans import TextSpans, common, divided
from rft.testing import tiny
from rft.types.completion import Completion, Turn, VersionSpan
from rft.types.ids import Version
from rft.types.images import ImagePlace
from rft.types.ports import GenerateRequest, ScoreRow
from rft.types.task import SamplingArgs, Task
from rft.workflow.base import RunContext
from tests.helpers import other_tokenizer

SAID = GenerateRequest(messages=({"role": "user", "content": "which number?"},))
TEXT = "the answer is 34, and naïve 🙂 tests are right: 789"


def test_spans_and_their_parts_by_hand() -> None:
    """ab|c|d|ef and a|bc|d|e|f: ends together after 3, 4 and 6 characters."""
    spans = common([2, 3, 4, 6], [1, 3, 4, 5, 6])
    assert spans == [(2, 2), (3, 3), (4, 5)]
    teacher = np.array([-0.5, -1.5, -0.7, -0.2, -0.1])
    policy = np.array([-1.0, -3.0, -0.5, -2.0])
    # -2 in parts of 1/4 and 3/4; one to one: the teacher's own; the sum of two to one token
    assert divided(spans, teacher, policy).tolist() == pytest.approx([-0.5, -1.5, -0.7, -0.3])
    # tokens that the policy was sure of share alike; one in the middle of a character ends nowhere
    assert divided([(2, 1)], np.array([-1.0]), np.zeros(2)).tolist() == [-0.5, -0.5]
    assert common([0, 1, 2], [0, 0, 2]) == [(3, 3)]


def reader() -> tuple[TextSpans, Any, Any]:
    policy, teacher = tiny.tokenizer(), other_tokenizer.tokenizer()
    chat = Chat(EngineSettings(name="t", model_path="teacher"), teacher)
    return TextSpans(chat, policy), policy, teacher


def row(ids: Sequence[int], **more: Any) -> ScoreRow:
    logprobs = -np.arange(1, len(ids) + 1, dtype=np.float32) / 7
    fields = {"tokens": np.array([5, 5, *ids], np.int32), "prompt_length": 2, "chat": SAID}
    return ScoreRow(**{**fields, "logprobs": logprobs, **more})


@settings(max_examples=30, deadline=None)
@given(text=st.text(min_size=1, max_size=40), ended=st.booleans(), seed=st.integers(0, 99))
def test_every_token_gets_a_part_and_nothing_is_lost(text: str, ended: bool, seed: int) -> None:
    spans, policy, teacher = reader()
    ids = policy(text, add_special_tokens=False)["input_ids"] + [policy.eos_token_id] * ended
    asked = row(ids)
    read, found = spans.read(asked)
    assert read.prompt == SAID and read.prompt_length == 0
    theirs = read.tokens.tolist()
    assert teacher.decode(theirs) == text + teacher.eos_token * ended
    assert found[-1] == (len(ids), len(theirs))
    if ended:
        assert found[-2] == (len(ids) - 1, len(theirs) - 1), "the end of one is that of the other"
    scores = -np.random.default_rng(seed).random(len(theirs))
    assert asked.logprobs is not None
    given_to = divided(found, scores, asked.logprobs)
    assert len(given_to) == len(ids) and (given_to <= 0).all()
    before = (0, 0)
    for here in found:
        (a, b), (c, d) = before, here
        assert given_to[a:c].sum() == pytest.approx(scores[b:d].sum(), rel=1e-5)
        assert policy.decode(ids[a:c], skip_special_tokens=True) == teacher.decode(
            theirs[b:d], skip_special_tokens=True
        )
        before = here


def test_tokens_that_are_no_characters() -> None:
    spans, policy, _ = reader()
    ids = policy("🙂a")["input_ids"]
    _, found = spans.read(row([*ids[:2], *ids[-1:]]))  # two of the four bytes
    assert found[-1][0] == 3


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"chat": None}, "needs calls with messages"),
        ({"places": (ImagePlace("a", 0, 1),)}, "without images"),
        ({"top": 3}, "most likely tokens need the policy's tokenizer"),
    ],
)
def test_what_cannot_be_aligned(changed: dict[str, Any], says: str) -> None:
    spans, policy, _ = reader()
    with pytest.raises(ValueError, match=says):
        spans.read(row(policy("ab")["input_ids"], **changed))


def test_a_tokenizer_that_changes_the_text_is_refused() -> None:
    from tokenizers.normalizers import Lowercase

    spans, policy, teacher = reader()
    teacher.backend_tokenizer.normalizer = Lowercase()
    with pytest.raises(ValueError, match="reads the answer 'Ab' as 'ab'"):
        spans.read(row(policy("Ab")["input_ids"]))


async def test_the_teachers_sums_behind_its_own_prompt(tiny_model: Path, tmp_path: Path) -> None:
    """Against transformers, token by token of the teacher."""
    folder = other_tokenizer.model(tmp_path / "teacher")
    engine = await make(
        EngineSettings(
            engine_type="transformers",
            name="aux-t-0",
            model_path=str(folder),
            max_model_len=120,
            fixed_weights=True,
            policy_tokenizer=str(tiny_model),
        )
    )
    policy, teacher = tiny.tokenizer(), other_tokenizer.tokenizer()
    ids = [*policy(TEXT)["input_ids"], policy.eos_token_id]
    task = Task(taskset="t", index=0, prompt="which number?", workflow="w")
    ctx = RunContext(engine, task, run=0, request_id="r", models={"t": engine})
    logprobs = -np.arange(1, len(ids) + 1, dtype=np.float32) / 7
    answer = Completion(
        prompt_tokens=np.array([1, 2, 3], np.int32),
        tokens=np.array(ids, np.int32),
        logprobs=logprobs,
        text=TEXT,
        finish_reason="stop",
        version_spans=(VersionSpan(Version(1, 4), 0, len(ids)),),
        sampling=SamplingArgs(),
    )
    ctx.record(Turn(messages=SAID.messages, completion=answer))
    told = [{"role": "user", "content": "which number? 34"}]
    try:
        await ctx.teach("t")
        plain = ctx.transcript().turns[0].teacher
        await ctx.teach("t", messages=told)
        privileged = ctx.transcript().turns[0].teacher
        with pytest.raises(ValueError, match="prompt_tokens are of another tokenizer"):
            await engine.generate(GenerateRequest(prompt_tokens=(1, 2)))
    finally:
        await engine.close()
    found = [
        sums(folder, teacher, prompt, [*teacher(TEXT)["input_ids"], teacher.eos_token_id])
        for prompt in (SAID.messages, told)
    ]
    for scores, (expected, ends) in zip((plain, privileged), found, strict=True):
        assert scores is not None and scores.version == Version(1, 0)
        # every character of the policy's byte tokens ends where a token of it does
        counts = [len(TEXT[:end].encode()) for end in ends] + [len(ids)]
        starts = [0, *counts[:-1]]
        assert np.add.reduceat(scores.logprobs, starts).tolist() == pytest.approx(
            expected, abs=1e-4
        )
    assert plain is not None and privileged is not None
    assert not np.array_equal(plain.logprobs, privileged.logprobs)


def sums(
    folder: Path, tokenizer: Any, messages: Sequence[dict[str, Any]], ids: list[int]
) -> tuple[list[float], list[int]]:
    """The log-probs of the teacher's tokens, and after how many characters each ends."""
    from transformers import AutoModelForCausalLM

    prompt = tokenizer.apply_chat_template(
        list(messages), add_generation_prompt=True, return_dict=False
    )
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.tensor([[*prompt, *ids]])
    with torch.no_grad():
        logprobs = model(tokens).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    values = logprobs.gather(1, tokens[0, len(prompt) :, None])[:, 0].tolist()
    merged: list[float] = []
    ends: list[int] = []
    held = 0.0
    for i, value in enumerate(values[:-1], 1):
        held += value
        if not (text := tokenizer.decode(ids[:i])).endswith("\ufffd"):
            merged.append(held)
            ends.append(len(text))
            held = 0.0
    return [*merged, values[-1]], ends

"""thinking_budget_workflow with an engine that has real tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rft.engine.base import PromptTooLong
from rft.engine.settings import EngineSettings
from rft.engine.transformers import TransformersEngine
from rft.plugins import load_all
from rft.testing import run_workflow_async
from rft.types.ports import GenerateRequest
from rft.types.task import SamplingArgs, Task


@pytest.fixture
async def engine(tiny_model: Path) -> AsyncIterator[TransformersEngine]:
    load_all()
    made = await TransformersEngine.start(
        EngineSettings(
            engine_type="transformers", name="e", model_path=str(tiny_model), fixed_weights=True
        )
    )
    yield made
    await made.close()


async def played(engine: TransformersEngine, max_tokens: int = 12, **args: Any) -> Any:
    task = Task(
        taskset="t",
        index=0,
        prompt="1+1?",
        truth="2",
        workflow="x",
        sampling=SamplingArgs(max_tokens=max_tokens, seed=1),
    )
    return await run_workflow_async(
        "thinking_budget_workflow", task, engine, workflow_args=args, reward="format_reward"
    )


async def test_a_thought_that_is_too_long_is_ended_and_its_end_is_not_trained(
    engine: TransformersEngine,
) -> None:
    result = await played(engine, thinking_token_budget=4, think_end="#", reasoning_end_str="7#8")
    first, second = result.runs[0].transcript.turns
    (row,) = result.group.rows
    prompt = len(first.completion.prompt_tokens)
    whole = len(second.completion.prompt_tokens)
    assert len(first.completion.tokens) == 4 and whole == prompt + 4 + 3, (
        "thought, then the three tokens of its end"
    )
    assert len(second.completion.tokens) <= 12 - 7
    assert (
        row.loss_mask[prompt : prompt + 4].all()
        and not row.loss_mask[prompt + 4 : whole].any()
        and row.loss_mask[whole:].all()
    )
    assert row.metrics["thinking_ended"] == 1.0 and np.isfinite(row.logprobs).all()


async def test_a_thought_that_ends_in_time_is_followed_by_the_answer(
    engine: TransformersEngine,
) -> None:
    free = await played(engine, thinking_token_budget=4, think_end="#")
    tokens = free.runs[0].transcript.turns[0].completion.tokens
    text = engine._chat.tokenizer.decode([int(tokens[1])])
    result = await played(engine, thinking_token_budget=4, think_end=text)
    first, second = result.runs[0].transcript.turns
    assert first.completion.finish_reason == "stop" and list(first.completion.tokens) == list(
        tokens[:2]
    )
    assert len(second.completion.prompt_tokens) == len(first.completion.prompt_tokens) + 2
    (row,) = result.group.rows
    assert (
        row.loss_mask[len(first.completion.prompt_tokens) :].all()
        and row.metrics["thinking_ended"] == 0.0
    )


async def test_what_leaves_no_room_for_an_answer_is_truncated(engine: TransformersEngine) -> None:
    result = await played(engine, max_tokens=4, thinking_token_budget=9, think_end="#")
    (row,) = result.group.rows
    assert len(result.runs[0].transcript.turns) == 1 and row.status == "truncated"


async def test_an_end_of_several_tokens_is_refused(engine: TransformersEngine) -> None:
    with pytest.raises(Exception, match="is 8 tokens of this model; name the one token"):
        await played(engine, thinking_token_budget=4)
    with pytest.raises(Exception, match="must have '#'"):
        await played(engine, thinking_token_budget=4, think_end="#", reasoning_end_str="so")


async def test_a_thought_may_be_longer_than_prompts_are(engine: TransformersEngine) -> None:
    """max_prompt_tokens is about openings: what goes on from the tokens of an earlier call has the
    whole context.
    """
    args = {"thinking_token_budget": 4, "think_end": "#", "reasoning_end_str": "7#8"}
    (free,) = (await played(engine, **args)).group.rows
    longest = int(free.loss_mask.argmax())  # the opening prompt
    engine._chat.settings = dataclasses.replace(engine.settings, max_prompt_tokens=longest)
    (row,) = (await played(engine, **args)).group.rows
    assert row.tokens.tolist() == free.tokens.tolist() and row.metrics["thinking_ended"] == 1.0
    with pytest.raises(PromptTooLong):
        await engine.generate(GenerateRequest(prompt_tokens=(65,) * (longest + 1)))

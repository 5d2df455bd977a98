"""A teacher scores the policy's own tokens, perhaps behind a prompt that the policy never sees."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from rft.engine.built_in import make
from rft.engine.pool import EnginePool
from rft.engine.scripted import ScriptedEngine, conversation, decode
from rft.engine.scripted import logprobs as scripted_logprobs
from rft.engine.settings import EngineSettings
from rft.errors import DeadlineExceeded
from rft.types.block import decode as decode_block
from rft.types.block import encode
from rft.types.completion import Score
from rft.types.experience import Experience
from rft.types.ids import GroupId, Version
from rft.types.ports import GenerateRequest, ScoreRow
from rft.types.task import SamplingArgs, Task
from rft.workflow.base import RunContext, Workflow, workflow
from rft.workflow.group import run_group
from rft.workflow.play_run import RunLimits
from rft.workflow.recipes import Recipes

SECRET = "the answer is xyzzy"
TOLD = [{"role": "user", "content": f"2+2? {SECRET}"}]
ID = GroupId(1, 0, 3, 5)


def context(engine: Any, **models: Any) -> RunContext:
    task = Task(taskset="t", index=0, prompt="2+2?", workflow="w")
    return RunContext(engine, task, run=0, request_id="r", models=models)


async def rows(run: Any, engine: Any, **models: Any) -> list[Experience]:
    """Rows of one run of a workflow with the method `run`."""
    name = f"taught_{run.__name__}"
    workflow(name)(type(name, (Workflow,), {"run": run}))
    task = Task(taskset="t", index=0, prompt="2+2?", workflow=name)
    recipes = Recipes()
    recipes.find(task)
    limits = RunLimits(max_timeout_s=20.0)
    group = await run_group(task, await recipes.get(task), engine, ID, limits=limits, models=models)
    return group.rows


async def test_a_told_policy_scores_its_own_tokens() -> None:
    async def run(self: Any, task: Task, ctx: RunContext) -> Any:
        await ctx.chat(task.chat())
        await ctx.teach("self", messages=TOLD)
        return ctx.transcript(score=Score(value=0.0))

    engine = ScriptedEngine("five")
    (row,) = await rows(run, engine)
    prompt = conversation(GenerateRequest(messages=tuple(TOLD)))
    written = row.tokens[row.loss_mask]
    assert row.teacher_logprobs is not None
    expected = scripted_logprobs(prompt, written, engine._key)
    assert np.array_equal(row.teacher_logprobs[row.loss_mask], expected)
    assert not np.array_equal(expected, row.logprobs[row.loss_mask]), "another prompt, other values"
    assert not row.teacher_logprobs[~row.loss_mask].any()
    assert "xyzzy" not in decode(row.tokens) + str((row.messages, row.prompt_text, row.info))
    (again,) = decode_block(encode([row]))
    assert again.teacher_spans == row.teacher_spans == row.version_spans


async def test_the_scoring_version_is_that_of_the_scored_tokens() -> None:
    engine = ScriptedEngine("a", "b")
    ctx = context(engine)
    await ctx.chat([{"role": "user", "content": "2+2?"}])
    engine.version = Version(1, 7)
    await ctx.teach("self", messages=TOLD)
    await ctx.chat([{"role": "user", "content": "3+3?"}])
    engine.version = Version(1, 8)
    await ctx.teach("self")  # the call that has no teacher yet
    versions = [t.teacher.version for t in ctx.transcript().turns if t.teacher is not None]
    assert versions == [Version(1, 7), Version(1, 8)]


async def test_one_of_several_calls_is_taught() -> None:
    ctx = context(ScriptedEngine("a", "b"))
    first = await ctx.chat([{"role": "user", "content": "2+2?"}])
    await ctx.chat([{"role": "user", "content": "3+3?"}])
    await ctx.teach("self", messages=TOLD, completion=first)
    assert [t.teacher is not None for t in ctx.transcript().turns] == [True, False]
    with pytest.raises(ValueError, match="of no call of this run"):
        await ctx.teach("self", messages=TOLD, completion=msgspec.structs.replace(first))
    with pytest.raises(ValueError, match="no model call to teach yet"):
        await context(ScriptedEngine()).teach("self", messages=TOLD)


async def test_a_policy_that_was_told_is_not_taught() -> None:
    """What only the teacher may read reached the policy, so its tokens must not train."""

    async def told(self: Any, task: Task, ctx: RunContext) -> Any:
        await ctx.chat([{"role": "system", "content": SECRET}, *task.chat()])
        await ctx.teach("self", messages=[{"role": "system", "content": SECRET}, *task.chat()])
        return ctx.transcript(score=Score(value=0.0))

    async def swapped(self: Any, task: Task, ctx: RunContext) -> Any:
        await ctx.chat([{"role": "system", "content": SECRET}, *task.chat()])
        await ctx.teach("self", messages=task.chat())
        return ctx.transcript(score=Score(value=0.0))

    for run in (told, swapped):
        (row,) = await rows(run, ScriptedEngine("five"))
        assert row.status == "failed" and "says nothing that the call's own prompt" in row.reason
        assert not row.num_tokens


class Late(ScriptedEngine):
    async def score(self, row: ScoreRow) -> Any:
        raise DeadlineExceeded("aux-t-0: the engine did not score tokens within 1 s")


class Broken(ScriptedEngine):
    async def score(self, row: ScoreRow) -> Any:
        found = await super().score(row)
        return msgspec.structs.replace(found, logprobs=found.logprobs * np.float32("nan"))


@pytest.mark.parametrize(
    ("teacher", "reason"),
    [
        (Late(), "TeacherLate: teacher 't': aux-t-0: the engine did not score tokens within 1 s"),
        (Broken(), "teacher_logprobs: not finite"),
        (
            ScriptedEngine(settings=EngineSettings(max_model_len=40)),
            "the prompt for teacher 't' with an answer of 5 tokens has",
        ),
        (EnginePool([ScriptedEngine()], unscorable="t has another tokenizer"), "t has another"),
    ],
    ids=["late", "not finite", "too long", "other tokenizer"],
)
async def test_a_teacher_that_cannot_score_fails_its_run(teacher: Any, reason: str) -> None:
    async def run(self: Any, task: Task, ctx: RunContext) -> Any:
        await ctx.chat(task.chat())
        await ctx.teach("t", messages=TOLD)
        return ctx.transcript(score=Score(value=0.0))

    (row,) = await rows(run, ScriptedEngine("five"), t=teacher)
    assert row.status == "failed" and reason in row.reason
    assert row.teacher_logprobs is None


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_the_same_tokens_behind_another_prompt(tiny_model: Path, temperature: float) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    engine = await make(
        EngineSettings(
            engine_type="transformers",
            model_path=str(tiny_model),
            max_model_len=80,
            max_prompt_tokens=16,  # of the policy's own prompt
            fixed_weights=True,
        )
    )
    try:
        sampling = SamplingArgs(temperature=temperature, max_tokens=12, seed=3)
        task = Task(taskset="t", index=0, prompt="2+2?", workflow="w", sampling=sampling)
        ctx = RunContext(engine, task, run=0, request_id="r")
        c = await ctx.chat(task.chat())
        await asyncio.gather(ctx.teach("self", messages=TOLD))
        (turn,) = ctx.transcript().turns
        too_long = [{"role": "user", "content": "x" * 70}]
        with pytest.raises(ValueError, match=r"answer of 12 tokens has 7\d tokens, .* at most 68"):
            await ctx.teach("self", messages=too_long)
    finally:
        await engine.close()
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_model)
    prompt = tokenizer.apply_chat_template(TOLD, add_generation_prompt=True, return_dict=False)
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    ids = torch.tensor([[*prompt, *c.tokens.tolist()]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1] / temperature
    wanted = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()
    assert turn.teacher is not None and np.abs(turn.teacher.logprobs - wanted).max() < 1e-5
    assert turn.completion is c

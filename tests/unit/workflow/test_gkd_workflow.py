"""gkd's workflow: the policy writes a share of the answers, the teacher the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from rft.engine.built_in import make
from rft.engine.scripted import ScriptedEngine
from rft.engine.scripted import logprobs as scripted_logprobs
from rft.engine.settings import EngineSettings
from rft.plugins import load_all
from rft.types.experience import Experience, check
from rft.types.ids import GroupId
from rft.types.ports import GenerateRequest
from rft.types.task import SamplingArgs, Task
from rft.workflow.group import run_group
from rft.workflow.play_run import RunLimits
from rft.workflow.recipes import Recipes

RUNS = 64


async def played(
    on_policy: float, lineage: int = 1, truth: Any = None
) -> tuple[list[Experience], ScriptedEngine]:
    load_all()
    policy = ScriptedEngine(answer=lambda messages: "mine")
    teacher = ScriptedEngine(answer=lambda messages: "theirs")
    args: dict[str, Any] = {"teacher": "t", "on_policy": on_policy}
    if truth is not None:
        args["off_policy"] = "data"
    task = Task(
        taskset="t",
        index=0,
        prompt="2+2?",
        truth=truth,
        workflow="gkd_workflow",
        workflow_args=args,
        num_runs=RUNS,
    )
    recipes = Recipes()
    recipes.find(task)
    limits = RunLimits(max_timeout_s=20.0)
    recipe = await recipes.get(task)
    found = await run_group(
        task, recipe, policy, GroupId(lineage, 0, 3, 5), limits=limits, models={"t": teacher}
    )
    return found.rows, teacher


async def test_a_share_of_answers_is_the_teachers() -> None:
    rows, teacher = await played(0.5)
    theirs = [x for x in rows if x.is_expert]
    assert len(rows) == RUNS and RUNS / 4 < len(theirs) < 3 * RUNS / 4
    prompts = {x.tokens[~x.loss_mask].tobytes() for x in rows}
    assert len(prompts) == 1, "the policy renders the prompt of all"
    for x in rows:
        check(x)
        assert x.trainable and not x.reason
        assert x.response_text == ("theirs" if x.is_expert else "mine")
        prompt = x.tokens[~x.loss_mask].tolist()
        scored = scripted_logprobs(prompt, x.tokens[x.loss_mask], teacher._key)
        assert x.teacher_logprobs is not None
        assert np.array_equal(x.teacher_logprobs[x.loss_mask], scored)
        assert x.has_logprobs != x.is_expert and bool(x.version_spans) != x.is_expert
        assert x.metrics["written_by_teacher"] == float(x.is_expert)
    again, _ = await played(0.5, lineage=2)
    assert [x.is_expert for x in again] == [x.is_expert for x in rows], (
        "a resumed run draws it again"
    )


@pytest.mark.parametrize(("on_policy", "share"), [(1.0, 0), (0.0, RUNS)])
async def test_all_or_none(on_policy: float, share: int) -> None:
    rows, _ = await played(on_policy)
    assert sum(x.is_expert for x in rows) == share


async def test_a_share_of_answers_is_the_datas() -> None:
    rows, teacher = await played(0.5, truth="four")
    gold = [x for x in rows if x.is_expert]
    assert RUNS / 4 < len(gold) < 3 * RUNS / 4 and not teacher.calls
    assert len({x.tokens[~x.loss_mask].tobytes() for x in rows}) == 1
    for x in rows:
        check(x)
        assert x.trainable and x.response_text == ("four" if x.is_expert else "mine")
        prompt = x.tokens[~x.loss_mask].tolist()
        scored = scripted_logprobs(prompt, x.tokens[x.loss_mask], teacher._key)
        assert x.teacher_logprobs is not None
        assert np.array_equal(x.teacher_logprobs[x.loss_mask], scored)
        assert x.metrics["taken_from_data"] == float(x.is_expert)


async def test_a_task_without_a_gold_text_fails_its_runs() -> None:
    rows, _ = await played(0.0, truth=4)
    assert all(x.status == "failed" and "no text as gold answer" in x.reason for x in rows)


async def test_an_engine_takes_a_text_as_its_answer(tiny_model: Path) -> None:
    """As the chat template writes it, up to the end of the turn."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_model)
    engine = await make(
        EngineSettings(
            engine_type="transformers",
            model_path=str(tiny_model),
            max_model_len=80,
            fixed_weights=True,
        )
    )
    chat: list[dict[str, Any]] = [{"role": "user", "content": "2+2?"}]
    request = GenerateRequest(
        messages=tuple(chat), written="four", sampling=SamplingArgs(max_tokens=5)
    )
    try:
        (c,) = await engine.generate(request)
        short = msgspec.structs.replace(request, sampling=SamplingArgs(max_tokens=4))
        with pytest.raises(ValueError, match="answer of 5 tokens was given, and at most 4 fit"):
            await engine.generate(short)
    finally:
        await engine.close()
    whole = [*chat, {"role": "assistant", "content": "four"}]
    expected = tokenizer.apply_chat_template(whole, return_dict=False)
    assert [*c.prompt_tokens, *c.tokens] == expected
    assert c.text == "four" and c.finish_reason == "stop" and not c.logprobs.any()

"""Prompts that are too long: left out or refused when a taskset is opened, in one process or
several, or cut by the engine.
"""

from __future__ import annotations

import json

import pytest

from rft.engine.base import PromptTooLong
from rft.engine.chat import Chat, cut
from rft.engine.settings import EngineSettings
from rft.errors import ConfigError
from rft.taskset import parallel
from rft.taskset.open_source import open_taskset
from rft.taskset.settings import PromptLimit, TasksetSettings
from rft.types.ports import GenerateRequest
from rft.workflow.base import RunContext


def write(tmp_path, lengths):
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": f"{i}" + "x" * n}) + "\n" for i, n in enumerate(lengths))
    )
    return str(path)


def opened(path, model, limit, *, refuse=False, **changes):
    limits = PromptLimit(model_path=str(model), max_tokens=limit, refuse=refuse)
    return open_taskset(
        TasksetSettings(name="t", path=path, workflow="w", prompt_limit=limits, **changes)
    )


@pytest.mark.e2e
def test_several_processes_leave_out_the_same_rows(tmp_path, tiny_model, monkeypatch):
    path = write(tmp_path, [i * 13 % 40 for i in range(30)])
    alone = opened(path, tiny_model, 30)
    monkeypatch.setattr(parallel, "AT_ONCE", 12)
    several = opened(path, tiny_model, 30, num_process=3)
    assert several.left_out == alone.left_out and 0 < len(alone.left_out.rows) < 30
    assert several.fingerprint == alone.fingerprint
    with pytest.raises(ConfigError, match=r"is neither a folder|does not exist"):
        opened(path, tmp_path / "none", 30, num_process=3)


def test_error_refuses_the_taskset_and_names_the_row(tmp_path, tiny_model):
    path = write(tmp_path, [1, 2, 60, 3])
    with pytest.raises(
        ConfigError,
        match=r"the prompt of row 2 of .*rows\.jsonl has \d+ tokens, more than .* 40 "
        r".*filter_overlong_prompts",
    ):
        opened(path, tiny_model, 40, refuse=True)
    assert len(opened(path, tiny_model, 400, refuse=True)) == 4


def test_the_first_rows_are_taken_before_long_ones_are_left_out(tmp_path, tiny_model):
    taskset = opened(write(tmp_path, [60, 1, 2, 3]), tiny_model, 40, max_rows=2)
    assert [taskset.task(i).index for i in range(len(taskset))] == [1]


@pytest.mark.parametrize(
    ("side", "kept"),
    [
        ("left", [6, 7, 8, 9, 10]),
        ("right", [0, 1, 2, 3, 4]),
        ("middle", [0, 1, 8, 9, 10]),
        ("error", list(range(11))),
    ],
)
def test_sides(side, kept):
    assert cut(list(range(11)), 5, side) == kept
    assert cut([1, 2], 5, side) == [1, 2]
    with pytest.raises(ValueError, match="use error, left, right or middle"):
        cut([1, 2, 3], 2, "top")


def test_the_engine_cuts_what_the_request_says(tiny_model):
    from transformers import AutoTokenizer

    chat = Chat(
        EngineSettings(model_path=str(tiny_model), max_prompt_tokens=8),
        AutoTokenizer.from_pretrained(tiny_model),
    )
    asked = {"messages": ({"role": "user", "content": "a long question of many tokens"},)}
    with pytest.raises(PromptTooLong):
        chat.encode(GenerateRequest(**asked))
    whole = Chat(
        EngineSettings(model_path=str(tiny_model), max_prompt_tokens=100), chat.tokenizer
    ).encode(GenerateRequest(**asked))
    assert chat.encode(GenerateRequest(**asked, prompt_truncation="left")) == whole[-8:]
    assert (
        chat.encode(GenerateRequest(**asked, prompt_truncation="middle")) == whole[:4] + whole[-4:]
    )


async def test_only_the_opening_prompt_is_cut(tmp_path):
    task = open_taskset(
        TasksetSettings(name="t", path=write(tmp_path, [1]), workflow="w", prompt_truncation="left")
    ).task(0)
    asked = []

    class Model:
        async def generate(self, request):
            asked.append(request.prompt_truncation)
            return [object()]

    ctx = RunContext(Model(), task, run=0, request_id="r")
    await ctx.chat(task.chat())
    await ctx.chat(task.chat())
    assert asked == ["left", "error"]

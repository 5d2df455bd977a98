"""Rows as veRL writes them, keys with dots, files named after their split, and prompts that are too
long.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rft.config.load import from_dict
from rft.config.plan import Facts
from rft.config.resolve import resolve
from rft.errors import ConfigError, ConfigErrors
from rft.taskset.chatfiles import open_chat
from rft.taskset.open_source import open_taskset
from rft.taskset.settings import FormatSettings, PromptLimit, TasksetSettings

VERL = FormatSettings(
    preset="verl",
    prompt_type="messages",
    messages_key="prompt",
    response_key="reward_model.ground_truth",
    reward_fn_key="data_source",
)


def settings(path: Path, **changes: Any) -> TasksetSettings:
    return TasksetSettings(
        **{"name": "t", "path": str(path), "workflow": "simple_workflow", **changes}
    )


def row(i: int, source: str = "openai/gsm8k", **changes: Any) -> dict[str, Any]:
    made = {
        "data_source": source,
        "prompt": [{"role": "user", "content": f"{i}+1?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(i + 1)},
        "extra_info": {"index": i, "split": "train"},
    }
    return made | changes


def parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def test_parquet_of_verl(tmp_path: Path) -> None:
    made = [
        row(0),
        row(
            1,
            "aime2024",
            prompt=[
                {"role": "system", "content": "s"},
                {"role": "user", "content": "?", "name": "me"},
            ],
        ),
    ]
    taskset = open_taskset(settings(parquet(tmp_path / "train.parquet", made), format=VERL))
    first = taskset.task(0)
    second = taskset.task(1)
    assert (first.chat(), first.truth, first.reward) == (
        [{"role": "user", "content": "0+1?"}],
        "1",
        "openai/gsm8k",
    )
    assert first.row["extra_info"] == {"index": 0, "split": "train"}
    assert second.chat() == made[1]["prompt"]  # the table's empty fields are not there
    assert taskset.rewards() == {"openai/gsm8k": 0, "aime2024": 1}


def test_the_data_source_of_another_column(tmp_path: Path) -> None:
    fmt = FormatSettings(
        preset="verl",
        prompt_type="messages",
        messages_key="prompt",
        data_source_key="extra_info.split",
    )
    task = open_taskset(
        settings(parquet(tmp_path / "a.parquet", [row(0)]), format=fmt, reward="exact_answer")
    ).task(0)
    assert (task.row["data_source"], task.reward) == ("train", "exact_answer")


def test_keys_with_dots(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(
        json.dumps({"q": {"text": "1+1?"}, "a": {"b": {"c": 2}}, "a.b": "column"}) + "\n"
    )
    fmt = {"prompt_key": "q.text"}
    assert (
        open_taskset(settings(file, format=FormatSettings(**fmt, response_key="a.b.c")))
        .task(0)
        .truth
        == 2
    )
    assert (
        open_taskset(settings(file, format=FormatSettings(**fmt, response_key="a.b"))).task(0).truth
        == "column"
    )
    with pytest.raises(ConfigError, match=r"the row has no key 'a\.x'; its keys are a, a\.b, q"):
        open_taskset(settings(file, format=FormatSettings(**fmt, response_key="a.x")))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"images": [{"bytes": "x"}]},
            "column 'images' is not empty; multimodal inputs are not offered",
        ),
        (
            {"reward_model": {"style": "model", "ground_truth": "1"}},
            "reward_model.style is 'model'",
        ),
        ({"reward_model": {"style": "rule"}}, "no key 'reward_model.ground_truth'"),
        ({"prompt": "1+1?"}, "key 'prompt' is '1\\+1\\?' .*must be a list of messages"),
    ],
)
def test_rows_that_cannot_be_used(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_taskset(settings(parquet(tmp_path / "a.parquet", [row(0, **changes)]), format=VERL))


def test_a_folder_with_a_file_for_each_split(tmp_path: Path) -> None:
    parquet(tmp_path / "train.parquet", [row(0), row(1)])
    parquet(tmp_path / "test.parquet", [row(5)])
    assert len(open_taskset(settings(tmp_path, format=VERL))) == 2
    assert open_taskset(settings(tmp_path, format=VERL, split="test")).task(0).truth == "6"
    (tmp_path / "test.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match=r"holds test\.jsonl and test\.parquet; name one"):
        open_taskset(settings(tmp_path, format=VERL, split="test"))


# ---------------------------------------------------------------- prompts that are too long


@pytest.fixture
def long(tmp_path: Path) -> Path:
    """Prompts of 10, 11, 12 ... 29 letters; the tiny model's template adds five tokens."""
    made = [row(i, prompt=[{"role": "user", "content": "x" * (10 + i)}]) for i in range(20)]
    return parquet(tmp_path / "long.parquet", made)


def limit(model: Path, tokens: int, **more: Any) -> PromptLimit:
    return PromptLimit(model_path=str(model), max_tokens=tokens, **more)


def test_long_prompts_are_left_out(
    long: Path, tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = open_taskset(settings(long, format=VERL))
    with caplog.at_level(logging.INFO):
        some = open_taskset(settings(long, format=VERL, prompt_limit=limit(tiny_model, 20)))
    assert (len(whole), len(some), whole.left_out) == (20, 6, None)
    assert [some.task(i).index for i in range(6)] == [0, 1, 2, 3, 4, 5]
    with pytest.raises(IndexError, match="has 6 rows"):
        some.task(6)
    assert some.left_out is not None and (some.left_out.rows, some.left_out.longest) == (
        tuple(range(6, 20)),
        34,
    )
    assert (
        "taskset t: 14 of 20 rows are left out" in caplog.text
        and "Rows 6, 7, 8, 9, 10, ..." in caplog.text
    )
    other = open_taskset(settings(long, format=VERL, prompt_limit=limit(tiny_model, 21)))
    assert len({t.fingerprint for t in (whole, some, other)}) == 3
    everything = open_taskset(settings(long, format=VERL, prompt_limit=limit(tiny_model, 34)))
    assert len(everything) == 20 and everything.fingerprint == whole.fingerprint


def test_the_template_counts(long: Path, tiny_model: Path) -> None:
    plain = limit(
        tiny_model,
        20,
        chat_template="{{ messages[0].content }}{{ more }}",
        chat_template_args={"more": "yy"},
    )
    assert len(open_taskset(settings(long, format=VERL, prompt_limit=plain))) == 9


def test_rewards_of_rows_that_are_left(tmp_path: Path, tiny_model: Path) -> None:
    made = [
        row(0, "aime1", prompt=[{"role": "user", "content": "x" * 90}]),
        row(1, "aime2"),
        row(2, "aime3"),
        row(3, "aime3"),
    ]
    taskset = open_taskset(
        settings(
            parquet(tmp_path / "a.parquet", made), format=VERL, prompt_limit=limit(tiny_model, 50)
        )
    )
    assert taskset.rewards() == {"aime2": 0, "aime3": 1} and taskset.task(0).reward == "aime2"


def test_nothing_left_and_nothing_to_count_with(
    long: Path, tiny_model: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="leaves nothing; raise it"):
        open_taskset(settings(long, format=VERL, prompt_limit=limit(tiny_model, 5)))
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        (tmp_path / "empty").mkdir()
        open_taskset(settings(long, format=VERL, prompt_limit=limit(tmp_path / "empty", 5)))


def test_tokens_are_those_of_the_engine(tiny_model: Path) -> None:
    from transformers import AutoTokenizer

    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "wie spät ist es? 時刻"},
    ]
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    ids = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    chat = open_chat(str(tiny_model))
    assert chat.count_tokens(chat.render(messages, [], template=None)) == len(ids)


# ---------------------------------------------------------------- from the written form


def planned(**taskset: Any) -> Any:
    explorer_input: dict[str, Any] = {
        "default_workflow_type": "simple_workflow",
        "taskset": {"path": "a.parquet", **taskset},
    }
    if reward := explorer_input["taskset"].pop("above", None):
        explorer_input["default_reward_fn_type"] = reward
    values = {
        "model": {
            "model_path": "m",
            "max_prompt_tokens": 7,
            "max_response_tokens": 2,
            "enable_thinking": True,
        },
        "buffer": {"total_steps": 1, "explorer_input": explorer_input},
    }
    return resolve(from_dict(values), Facts(cpus=1, gpus=0)).explorer.tasksets[0]


def test_the_preset_fills_what_is_not_written() -> None:
    assert planned(format={"preset": "verl"}).format == VERL
    written = planned(
        format={
            "preset": "VERL",
            "prompt_key": "chat",
            "response_key": "gold",
            "reward_fn_key": "source",
        }
    ).format
    assert (written.messages_key, written.response_key, written.reward_fn_key) == (
        "chat",
        "gold",
        "source",
    )
    assert (
        planned(
            format={"preset": "verl", "prompt_type": "messages", "messages_key": "m"}
        ).format.messages_key
        == "m"
    )
    for named in ({"default_reward_fn_type": "exact_answer"}, {"above": "exact_answer"}):
        taskset = planned(format={"preset": "verl", "reward_fn_key": "source"}, **named)
        assert (taskset.reward, taskset.format.reward_fn_key, taskset.format.data_source_key) == (
            "exact_answer",
            "",
            "source",
        )


def test_prompt_limit_and_template_of_a_taskset() -> None:
    assert planned().prompt_limit is None
    fmt = {
        "chat_template": "{{ messages }}",
        "chat_template_args": {"tone": "dry"},
        "enable_thinking": False,
    }
    taskset = planned(filter_overlong_prompts=True, format=fmt)
    args = {"tone": "dry", "enable_thinking": False}
    assert taskset.prompt_limit == PromptLimit(
        model_path="m", max_tokens=7, chat_template="{{ messages }}", chat_template_args=args
    )
    assert (taskset.format.chat_template, taskset.format.chat_template_args) == (
        "{{ messages }}",
        args,
    )
    assert planned(filter_overlong_prompts=True).prompt_limit.chat_template_args == {
        "enable_thinking": True
    }
    with pytest.raises(
        ConfigErrors, match=r"format\.enable_thinking: chat_template_args says otherwise"
    ):
        planned(format={"enable_thinking": False, "chat_template_args": {"enable_thinking": True}})

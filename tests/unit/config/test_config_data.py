"""Keys of a data set that is trained on: which are read, and which of them others leave without
effect.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rft.config.load import from_dict
from rft.config.plan import Facts, Plan
from rft.config.resolve import resolve
from rft.errors import ConfigError, ConfigErrors

DATA = "buffer.trainer_input.experience_buffer"
EXPERT = "buffer.trainer_input.auxiliary_buffers.sft"


def given(kind: str, keys: dict[str, Any], **more: Any) -> Plan:
    config = {
        "mode": "train",
        "model": {"model_path": "m", "max_model_len": 9},
        "algorithm": {"algorithm_type": kind},
        "buffer": {
            "train_batch_size": 2,
            "total_steps": 1,
            "trainer_input": {"experience_buffer": {"path": "data", **keys}},
        },
    }
    config |= {section: {**config.get(section, {}), **value} for section, value in more.items()}
    return resolve(from_dict(config), Facts(cpus=2, gpus=0))


def mixed(keys: dict[str, Any]) -> Plan:
    config = {
        "model": {"model_path": "m", "max_model_len": 9},
        "algorithm": {"algorithm_type": "mix", "sample_strategy_args": {"sft_dataset_name": "sft"}},
        "buffer": {
            "total_steps": 1,
            "explorer_input": {"taskset": {"path": "tasks.jsonl", "default_workflow_type": "w"}},
            "trainer_input": {"auxiliary_buffers": {"sft": {"path": "answers", **keys}}},
        },
    }
    return resolve(from_dict(config), Facts(cpus=2, gpus=0))


def idle(plan: Plan) -> set[str]:
    return {w.partition(" has no effect: ")[0] for w in plan.warnings if " has no effect: " in w}


@pytest.mark.parametrize(
    ("keys", "without"),
    [
        ({"path": "one.jsonl", "split": "test", "subset_name": "main"}, {"split", "subset_name"}),
        (
            {"split": "test", "subset_name": "main", "data_selector": {"selector_type": "shuffle"}},
            set(),
        ),
        ({"capacity": 3, "durability": "power"}, {"capacity", "durability"}),
        ({"replay_buffer": {"enable": True}}, {"replay_buffer"}),
        ({"format": {"chosen_key": "better"}}, {"format.chosen_key"}),
        (
            {
                "format": {
                    "prompt_key": "q",
                    "response_key": "a",
                    "enable_concatenated_multi_turn": True,
                }
            },
            set(),
        ),
    ],
)
def test_what_is_not_read_of_chats_is_said(keys: dict[str, Any], without: set[str]) -> None:
    for plan, at in ((given("sft", keys), DATA), (mixed(keys), EXPERT)):
        assert idle(plan) == {f"{at}.{name}" for name in without}


@pytest.mark.parametrize(
    ("keys", "unread", "other"),
    [
        ({"messages_key": "chat"}, "messages_key", "messages"),
        ({"prompt_type": "messages", "prompt_key": "q"}, "prompt_key", "plaintext"),
    ],
)
def test_the_column_of_another_prompt_type_is_refused(
    keys: dict[str, Any], unread: str, other: str
) -> None:
    with pytest.raises(ConfigErrors, match=rf"format\.{unread}: belongs to prompt_type {other}; "):
        given("sft", {"format": keys})


def test_what_only_one_of_them_reads() -> None:
    assert idle(given("sft", {"eval_split": "test"})) == set() and idle(
        mixed({"eval_split": "test"})
    ) == {f"{EXPERT}.eval_split"}
    pairs = {"format": {"chosen_key": "better", "response_key": "a"}}
    assert idle(given("dpo", pairs)) == {f"{DATA}.format.response_key"}
    texts = {"format": {"prompt_key": "text", "system_prompt": "be brief"}}
    assert idle(given("cpt", texts)) == {f"{DATA}.format.system_prompt"}
    sizes = {"buffer": {"batch_size": 4, "max_refill": 3, "train_batch_size": 2, "total_steps": 1}}
    sizes["buffer"]["trainer_input"] = {"experience_buffer": {"path": "data"}}  # type: ignore[assignment]
    assert idle(given("sft", {}, **sizes)) == {"buffer.batch_size", "buffer.max_refill"}
    assert idle(given("sft", {}, algorithm={"repeat_times": 4})) == {"algorithm.repeat_times"}
    assert idle(given("sft", {}, algorithm={"repeat_times": 1})) == set()
    played = {
        "eval_interval": 5,
        "max_concurrent_runs": 7,
        "rollout_model": {"engine_type": "transformers"},
    }
    assert idle(given("sft", {}, explorer=played)) == {
        "explorer.eval_interval",
        "explorer.max_concurrent_runs",
    }


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"path": "sqlite:///rows.db"}, "path: is a database"),
        ({"storage_type": "sql"}, "storage_type: is sql; a data set is read with file"),
    ],
)
def test_rows_are_read_from_no_storage(keys: dict[str, Any], why: str) -> None:
    for plan in (lambda: given("sft", keys), lambda: mixed(keys)):
        with pytest.raises(ConfigError, match=why):
            plan()


def test_an_expert_s_rows_have_no_tasks() -> None:
    with pytest.raises(
        ConfigError, match=r"sft\.format\.workflow_key: .*is for tasks|workflow_key: unknown key"
    ):
        mixed({"format": {"workflow_key": "w"}})
    assert Path(mixed({}).expert.rows.path).name == "answers"  # type: ignore[union-attr]

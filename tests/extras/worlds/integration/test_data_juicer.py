"""Data-Juicer's own filters over rows of a group, in this process."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path

import pytest

from rft.buffer.operators.base import GroupView
from rft.buffer.operators.built_in_operators import RewardShapingMapper
from rft.errors import ConfigError
from rft.extras.worlds.juicer_operators import KEPT, DataJuicer, DataJuicerFilter
from rft.taskset.settings import TaskOperatorSettings, TaskPipelineSettings
from rft.taskset.task_pipeline import prepare
from rft.types.task import Task
from tests.unit.buffer.test_operators import row

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("data_juicer") is None, reason="py-data-juicer is not installed"
)
GROUP = GroupView(
    task=Task(taskset="sums", index=7, prompt="?", workflow="w", num_runs=2), members=()
)
LONG = {"name": "text_length_filter", "args": {"min_len": 5}}


def test_filters_measure_and_rewards_are_shaped_by_it(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "project_name: x\nprocess:\n  - text_length_filter: {min_len: 5}\n  - words_num_filter: "
        "{min_num: 1}\n"
    )
    rows = [row(0, 1.0, "one two three"), row(1, 0.0, "one")]
    made = list(DataJuicer(config_path=str(recipe)).process(rows, GROUP).rows)
    assert [(r.metrics["text_len"], r.metrics["num_words"], r.metrics[KEPT]) for r in made] == [
        (13.0, 3.0, 1.0),
        (3.0, 1.0, 0.0),
    ]
    shaped = RewardShapingMapper(
        reward_shaping_configs=[{"stats_key": "num_words", "op_type": "ADD", "weight": 0.5}]
    )
    assert [r.reward for r in asyncio.run(shaped.process(made, GROUP)).rows] == [2.5, 0.5]


def test_rows_of_a_taskset_are_filtered_and_measured(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(
        '{"prompt": "one two three", "answer": "3"}\n{"prompt": "one", "answer": "1"}\n'
    )
    operator = TaskOperatorSettings(name="data_juicer_filter", args={"operators": [LONG]}, key="x")
    made = prepare(
        TaskPipelineSettings(
            inputs=(str(tmp_path / "rows.jsonl"),),
            output=str(tmp_path / "made.jsonl"),
            operators=(operator,),
        )
    )
    assert list(made.rows) == [{"prompt": "one two three", "answer": "3", "text_len": 13.0}]


def test_rows_are_dropped_where_that_is_asked() -> None:
    rows = [row(0, 1.0, "one two three"), row(1, 0.0, "one")]
    assert [r.id.run for r in DataJuicerFilter(operators=[LONG]).process(rows, GROUP).rows] == [0]


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"fix_unicode_mapper": {}}, "is no filter; texts stay as they are"),
        ({"name": "x", "min": 1}, "is no operator of Data-Juicer"),
    ],
)
def test_what_is_no_filter_is_refused(entry: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        DataJuicer(operators=[entry]).process([row(0, 1.0)], GROUP)
    with pytest.raises(ConfigError, match="needs operators"):
        DataJuicer()

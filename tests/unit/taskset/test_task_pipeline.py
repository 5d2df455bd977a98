"""Operators on rows: what they do, what they refuse, and that the result is written once, whole,
and never over something else.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from rft.errors import ConfigError
from rft.taskset import parallel
from rft.taskset import task_pipeline as pipeline
from rft.taskset.base import Taskset
from rft.taskset.open_source import open_taskset
from rft.taskset.row_operators import RowOperator, SetOperator, task_operator
from rft.taskset.settings import TaskOperatorSettings, TaskPipelineSettings, TasksetSettings
from rft.taskset.task_pipeline import prepare, write

KEY = "data_processor.task_pipeline"
ROWS = [
    {"prompt": "What is 1+1?", "pass_rate": 0.9, "quality": 0.2, "kind": "sum"},
    {"prompt": "what is  1+1?", "pass_rate": 0.8, "quality": 0.9, "kind": "sum"},
    {"prompt": "Prove it.", "pass_rate": 0.0, "quality": 0.6, "kind": "proof"},
    {
        "prompt": "What is 2+2, and why is that so, dear?",
        "pass_rate": 0.4,
        "quality": 0.5,
        "kind": "sum",
    },
    {"prompt": "Name a prime.", "pass_rate": 0.5, "quality": 1.0, "kind": "other"},
]
WEIGHTS = {"difficulty": -0.7, "diversity": 0.8, "usage_frequency": -0.5, "quality": 1.0}


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch):
    monkeypatch.setattr(pipeline, "_KEPT", {})


@pytest.fixture
def make(tmp_path):
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps(r) + "\n" for r in ROWS))

    def made(*operators, **changes) -> TaskPipelineSettings:
        listed = tuple(
            TaskOperatorSettings(name=name, args=args, key=f"{KEY}.operators[{i}]")
            for i, (name, args) in enumerate(operators)
        )
        values = {
            "inputs": (str(source),),
            "output": str(tmp_path / "out" / "result.jsonl"),
            "operators": listed,
        }
        return TaskPipelineSettings(**{**values, "priority_weights": WEIGHTS, **changes})

    return made


def numbers(prepared) -> list[int]:
    return [[r["prompt"] for r in ROWS].index(row["prompt"]) for row in prepared.rows]


@pytest.mark.parametrize(
    ("operator", "args", "stay"),
    [
        ("length_filter", {"max": 13}, [0, 1, 2, 4]),
        ("length_filter", {"field": "prompt", "min": 4, "unit": "words"}, [3]),
        ("range_filter", {"field": "pass_rate", "min": 0.4, "max": 0.8}, [1, 3, 4]),
        ("value_filter", {"field": "kind", "keep": ["sum", "proof"]}, [0, 1, 2, 3]),
        ("value_filter", {"field": "kind", "drop": ["sum"]}, [2, 4]),
        ("deduplicate", {}, [0, 2, 3, 4]),
        ("deduplicate", {"normalize": False}, [0, 1, 2, 3, 4]),
        ("deduplicate", {"field": "kind"}, [0, 2, 4]),
        ("sort_rows", {"field": "pass_rate"}, [2, 3, 4, 1, 0]),
        ("sort_rows", {"field": "quality", "descending": True}, [4, 1, 2, 3, 0]),
        ("pass_rate_score", {}, [0, 1, 2, 3, 4]),
    ],
)
def test_each_operator(make, operator, args, stay):
    settings = make((operator, args))
    if operator == "length_filter" and "max" in args:
        assert numbers(prepare(settings)) == [
            i for i, r in enumerate(ROWS) if len(r["prompt"]) <= 13
        ]
    else:
        assert numbers(prepare(settings)) == stay


def test_order_and_top_k(make):
    # difficulty 0.1 .2 1 .6 .5 and quality .2 .9 .6 .5 1 scaled to 0..1, weighted -0.7 and 1
    prepared = prepare(make(("pass_rate_score", {}), order="sort", top_k=3))
    difficulty = [0, 1 / 9, 1, 5 / 9, 4 / 9]
    quality = [0, 7 / 8, 0.5, 3 / 8, 1]
    score = [q - 0.7 * d for d, q in zip(difficulty, quality, strict=True)]
    assert numbers(prepared) == sorted(range(5), key=lambda i: -score[i])[:3]
    assert prepared.rows[0]["difficulty"] == pytest.approx(0.2)
    assert str(prepared) == "inputs 5 → pass_rate_score 5 → sort 5 → top 3 3"
    shuffled = [numbers(prepare(make(order="shuffle", seed=s))) for s in (1, 1, 2)]
    assert shuffled[0] == shuffled[1] != shuffled[2] and sorted(shuffled[0]) == [0, 1, 2, 3, 4]
    with pytest.raises(
        ConfigError,
        match="there is no column for any weight; the columns are prompt, pass_rate, quality, kind",
    ):
        prepare(make(order="sort", priority_weights={**WEIGHTS, "quality": 0}))


@pytest.mark.parametrize("lacks", [0, 3])
def test_a_column_to_sort_by_is_there_in_all_rows_or_in_none(lacks, tmp_path) -> None:
    rows = [
        {"prompt": str(i), "quality": 0.5, **({} if i == lacks else {"difficulty": i / 4})}
        for i in range(4)
    ]
    source = tmp_path / "some.jsonl"
    source.write_text("".join(json.dumps(r) + "\n" for r in rows))
    given = TaskPipelineSettings(
        inputs=(str(source),),
        output=str(tmp_path / "out.jsonl"),
        order="sort",
        priority_weights=WEIGHTS,
    )
    with pytest.raises(ConfigError, match=f"row {lacks}: there is no column 'difficulty'"):
        prepare(given)


def test_operators_see_their_fields_alone_and_the_rest_is_kept(make):
    seen = []

    @task_operator("test_shout")
    class Shout(RowOperator):
        def apply(self, row):
            seen.append(set(row))
            row["prompt"] = row["prompt"].upper()
            return {**row, "added": 1}

    @task_operator("test_last_two")
    class LastTwo(SetOperator):
        def arrange(self, rows):
            assert all(set(r) == {"prompt", "kind"} for r in rows)
            return [4, 3]

    rows = prepare(
        make(("test_shout", {}), ("test_last_two", {}), target_fields=("prompt", "kind"))
    ).rows
    assert seen == [{"prompt", "kind"}] * 5
    assert rows[0] == {**ROWS[4], "prompt": "NAME A PRIME.", "added": 1} and len(rows) == 2
    with pytest.raises(
        ConfigError, match=r"rows\.jsonl:1: there is no column 'level'; there are prompt"
    ):
        prepare(make(("deduplicate", {}), target_fields=("prompt", "level")))


@task_operator("test_task_pipeline_wrong")
class Wrong(RowOperator):
    def __init__(self, *, how: str) -> None:
        self.how = how

    def apply(self, row):
        return {
            "raise": lambda: row if 1 / (len(row["prompt"]) - 9) else None,
            "type": lambda: "text",
        }[self.how]()


@task_operator("test_task_pipeline_wrong_set")
class WrongSet(SetOperator):
    def arrange(self, rows):
        return [0, 0]


@pytest.mark.parametrize(
    ("operator", "args", "message"),
    [
        (
            "text_length_filter",
            {},
            r"A filter of Data-Juicer's is {name: data_juicer_filter, args: {operators: \[{name: "
            r"text_length_filter}\]}}",
        ),
        (
            "llm_difficulty_score_filter",
            {},
            "of Data-Juicer asks a service or a person; do so beforehand",
        ),
        ("deduplicat", {}, "Did you mean deduplicate"),
        (
            "value_filter",
            {"field": "kind", "drop": [False]},
            r"'sum'; it must be of the kind of False \(in quotes they are texts",
        ),
        (
            "value_filter",
            {"field": "quality", "keep": ["0.2"]},
            "0.2; it must be of the kind of '0.2'",
        ),
        ("length_filter", {}, "write min, max or both"),
        ("length_filter", {"min": 3, "max": 2}, "min 3 is above max 2"),
        ("value_filter", {"field": "kind"}, "write either keep or drop"),
        (
            "deduplicate",
            {"feld": "x"},
            "unknown argument 'feld' for task_operator 'deduplicate'.  Known: field, normalize",
        ),
        (
            "range_filter",
            {"field": "kind", "min": 0},
            r"rows\.jsonl:1: column 'kind' is 'sum'; it must be a finite number",
        ),
        (
            "range_filter",
            {"field": "level", "min": 0},
            r"rows\.jsonl:1: there is no column 'level'; there are prompt, pass_rate",
        ),
        ("pass_rate_score", {"field": "quality", "score": "x"}, ""),
        ("test_task_pipeline_wrong", {"how": "raise"}, r"rows\.jsonl:3: ZeroDivisionError"),
        (
            "test_task_pipeline_wrong",
            {"how": "type"},
            r"rows\.jsonl:1: apply returned str; it must return the row or None",
        ),
        (
            "test_task_pipeline_wrong_set",
            {},
            "arrange must return numbers of rows .0 to 4., each at most once",
        ),
        (
            "range_filter",
            {"field": "pass_rate", "min": 2},
            "no row is left: inputs 5 → range_filter 0",
        ),
    ],
)
def test_refused(make, operator, args, message):
    if not message:
        assert prepare(make((operator, args))).rows[4]["x"] == 0.0
        return
    with pytest.raises(ConfigError, match=message) as caught:
        prepare(make((operator, args)))
    assert caught.value.key.startswith(KEY)


# ---------------------------------------------------------------- the file


def test_the_result_is_written_once_and_reused(make, tmp_path):
    settings = make(("deduplicate", {}), top_k=2)
    made = write(settings)
    out = tmp_path / "out"
    assert {p.name for p in out.iterdir()} == {"result.jsonl", "result.jsonl.pipeline.json"}
    before = (out / "result.jsonl").stat().st_mtime_ns
    again = write(replace(settings, num_process=3))
    assert (
        again.reused
        and again.rows == made.rows
        and (out / "result.jsonl").stat().st_mtime_ns == before
    )
    assert "2 rows, made before from the same inputs and operators" in str(again)
    tasks = open_taskset(TasksetSettings(name="t", path=settings.output, workflow="w"))
    in_memory = Taskset(
        TasksetSettings(name="t", path=settings.output, workflow="w"), made.source(settings)
    )
    assert (
        [tasks.task(i).prompt for i in range(2)]
        == [in_memory.task(i).prompt for i in range(2)]
        == ["What is 1+1?", "Prove it."]
    )


def test_a_run_writes_what_its_check_has_made(make, monkeypatch):
    settings = make(("deduplicate", {}))
    found = prepare(settings)
    monkeypatch.setattr(pipeline, "_step", None)  # nothing is made again
    assert write(settings) is found
    assert not pipeline._KEPT


def test_what_was_made_from_something_else_is_never_overwritten(make, tmp_path):
    settings = make(("deduplicate", {}))
    write(settings)
    text = (tmp_path / "out" / "result.jsonl").read_text()
    for other in (make(("deduplicate", {}), top_k=1), make(("length_filter", {"min": 1}))):
        with pytest.raises(
            ConfigError, match="made from other inputs or operators; it is not overwritten"
        ):
            write(other)
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    with pytest.raises(ConfigError, match="made from other inputs"):
        write(settings)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in ROWS))
    (tmp_path / "out" / "result.jsonl").write_text(text + "\n")
    with pytest.raises(ConfigError, match="it was changed since"):
        prepare(settings)
    mine = tmp_path / "mine.jsonl"
    mine.write_text("{}\n")
    with pytest.raises(ConfigError, match="there is no record of what it was made from"):
        write(make(("deduplicate", {}), output=str(mine)))
    assert mine.read_text() == "{}\n"


def test_a_change_of_any_row_of_a_large_parquet_file_makes_another_result(make, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    def settings(**other):
        rows = [{"prompt": other.get(f"row{i}", f"What is {i}?")} for i in range(1500)]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
        return make(("length_filter", {"min": 1}), inputs=(str(tmp_path / "rows.parquet"),))

    first = write(settings()).fingerprint
    note = tmp_path / "out" / "result.jsonl.pipeline.json"
    # as an earlier version wrote it
    note.write_text(note.read_text().replace(first, first.rpartition("-")[2]))
    assert prepare(settings()).reused
    note.write_text(note.read_text().replace(first.rpartition("-")[2], first))
    assert prepare(settings()).reused
    with pytest.raises(ConfigError, match="made from other inputs"):
        prepare(settings(row2="What is it?"))


def test_an_own_operator_that_changes_makes_another_result(make, tmp_path):
    path = tmp_path / "mine.py"
    source = (
        "from rft.taskset.row_operators import RowOperator\nclass Cut(RowOperator):\n    def "
        "apply(self, row):\n        return row\n"
    )
    path.write_text(source)
    settings = make((f"{path}:Cut", {}))
    first = prepare(settings).fingerprint
    path.write_text(source + "# other\n")
    assert prepare(settings).fingerprint != first


@pytest.mark.e2e
def test_several_processes_give_the_same(make, tmp_path, monkeypatch):
    monkeypatch.setattr(parallel, "AT_ONCE", 3)
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "mine.py").write_text(
        "from rft.taskset.row_operators import RowOperator, task_operator\n"
        "@task_operator('test_in_a_process')\n"
        "class Tag(RowOperator):\n"
        "    def apply(self, row):\n"
        "        print('noise')\n"
        "        if row['prompt'] == 'boom':\n            raise ValueError('boom')\n"
        "        return {**row, 'tag': len(row['prompt'])} if row['quality'] > 0.4 else None\n"
    )
    own = make((f"{tmp_path}/plugins/mine.py:Tag", {}), num_process=2)
    found = prepare(own)
    assert [r["tag"] for r in found.rows] == [len(r["prompt"]) for r in ROWS if r["quality"] > 0.4]
    pipeline._KEPT.clear()
    assert found == prepare(replace(own, num_process=1))
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps(r) + "\n" for r in [*ROWS, {"prompt": "boom", "quality": 1}])
    )
    with pytest.raises(ConfigError, match=r"mine\.py:Tag: .*rows\.jsonl:6: ValueError: boom"):
        prepare(own)

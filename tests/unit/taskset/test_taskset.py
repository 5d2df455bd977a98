from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from rft.errors import ConfigError, PluginError
from rft.taskset.generated_tasks import countdown, digit_sums
from rft.taskset.open_source import open_taskset
from rft.taskset.settings import FormatSettings, TasksetSettings
from rft.types.task import SamplingArgs


def settings(path, **changes):
    return TasksetSettings(
        **{"name": "sums", "path": str(path), "workflow": "simple_workflow", **changes}
    )


ROWS = [{"prompt": "1+1?", "response": "2"}, {"prompt": "2+2?", "response": "4"}]


def jsonl(tmp_path, text: str | bytes):
    path = tmp_path / "data.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
def test_jsonl(tmp_path, end, bom):
    path = jsonl(tmp_path, bom + (end.join(map(json.dumps, ROWS)) + end + end).encode())
    taskset = open_taskset(
        settings(path, sampling=SamplingArgs(temperature=0.5), num_runs=4, reward="exact_answer")
    )
    assert len(taskset) == 2
    task = taskset.task(1)
    assert (task.prompt, task.truth, task.index, task.num_runs, task.sampling.temperature) == (
        "2+2?",
        "4",
        1,
        4,
        0.5,
    )
    with pytest.raises(IndexError, match="has 2 rows; asked for 2"):
        taskset.task(2)
    assert len(open_taskset(settings(path, max_rows=1))) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"prompt": "a"}\n{"prompt": \n', r"data\.jsonl:2: not JSON .*column"),
        (b'{"prompt": "a"}\n\n[1]\n', r"data\.jsonl:3: a line must be a JSON object, not list"),
        (
            b'{"prompt": "a", "response": "1"}\n{"prompt": "b"}\n',
            r"data\.jsonl:2: the row has no key 'response'; its keys are prompt",
        ),
        (
            b'{"question": "a"}\n',
            r"data\.jsonl:1: the row has no key 'prompt'; its keys are question\.  "
            r".*format\.prompt_key",
        ),
        (
            b'{"prompt": 3}\n',
            r"data\.jsonl:1: key 'prompt' is 3 \(int\); it must be a non-empty text",
        ),
        (b'{"prompt": ""}\n', r"must be a non-empty text"),
        (b"", "has no rows"),
        (b"\n\n", "has no rows"),
        (b'{"prompt": "a"}\n{"prompt": "\xff"}', r"data\.jsonl:2: not UTF-8 \(byte 0xff"),
    ],
)
def test_broken_jsonl_names_file_and_line(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        open_taskset(settings(jsonl(tmp_path, text)))
    assert caught.value.key.startswith("taskset sums.")


def test_other_files(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    (tmp_path / "a.json").write_text(json.dumps(ROWS))
    (tmp_path / "a.csv").write_text('prompt,response\n"1+1?",2\n2+2?,4\n')
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    for name in ("a.json", "a.csv", "a.parquet"):
        taskset = open_taskset(settings(tmp_path / name))
        assert [(t.prompt, t.truth) for t in map(taskset.task, range(len(taskset)))] == [
            ("1+1?", "2"),
            ("2+2?", "4"),
        ], name
        assert taskset.fingerprint == open_taskset(settings(tmp_path / name)).fingerprint


@pytest.mark.parametrize("kind", ["parquet", "saved"])
def test_a_change_of_any_row_of_a_large_table_is_seen(tmp_path, kind):
    import datasets

    def mark(name, count, **other):
        made = datasets.Dataset.from_list(
            [{"prompt": other.get(f"row{i}", f"What is {i}?")} for i in range(count)]
        )
        path = tmp_path / f"{name}.{kind}"
        made.to_parquet(path) if kind == "parquet" else made.save_to_disk(path)
        return open_taskset(settings(path)).fingerprint

    whole, changed = (
        mark("a", 1500),
        mark("b", 1500, row2="What is it?"),
    )  # two of every three rows are in the sample, not this one
    assert whole == mark("c", 1500) and changed != whole
    assert changed[-33:] == whole[-33:], (
        "the mark of earlier versions is its end, which runs that go on are known by"
    )
    assert "-" not in mark("d", 1000)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", '{"prompt": 1}', "must hold a JSON list"),
        ("a.json", "[1]", "element 0: must be a JSON object"),
        ("a.json", "[\n,", "a.json:2: not JSON"),
        ("a.csv", "prompt,response\na\n", "a.csv:2: the line does not have 2 columns"),
        (
            "a.csv",
            "prompt,response,response\na,1,2\n",
            "a.csv:1: the column 'response' is there twice",
        ),
        ("a.parquet", "hello", "not a readable Parquet file"),
        ("a.txt", "hello", r"suffix '\.txt' is not known"),
    ],
)
def test_other_broken_files(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        open_taskset(settings(tmp_path / name))


def test_missing_file_suggests_a_neighbour(tmp_path):
    jsonl(tmp_path, "")
    with pytest.raises(ConfigError, match=r"does not exist; did you mean .*data\.jsonl"):
        open_taskset(settings(tmp_path / "dta.jsonl"))
    with pytest.raises(ConfigError, match="does not exist either"):
        open_taskset(settings(tmp_path / "no" / "data.jsonl"))
    # and is not looked for on a hub
    with pytest.raises(ConfigError, match=r"data\.ndjson does not exist"):
        open_taskset(settings("no/data.ndjson"))


def test_messages_tools_and_per_row_names(tmp_path):
    row = {
        "message": [{"role": "user", "content": "hi"}],
        "tools": json.dumps([{"type": "function"}]),
        "sys": "Be short.",
        "flow": "math_workflow",
        "score": "math_reward",
    }
    fmt = FormatSettings(
        prompt_type="messages", workflow_key="flow", reward_fn_key="score", system_prompt_key="sys"
    )
    task = open_taskset(settings(jsonl(tmp_path, json.dumps(row)), format=fmt)).task(0)
    assert task.chat() == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "hi"},
    ]
    assert (task.tools, task.workflow, task.reward, task.system_prompt, task.truth) == (
        ({"type": "function"},),
        "math_workflow",
        "math_reward",
        "Be short.",
        None,
    )
    bad = {**row, "message": "hello"}
    with pytest.raises(ConfigError, match="must be a list of messages"):
        open_taskset(settings(jsonl(tmp_path, json.dumps(bad)), format=fmt))
    with pytest.raises(ConfigError, match="must be a list of tools"):
        open_taskset(settings(jsonl(tmp_path, json.dumps({**row, "tools": "x"})), format=fmt))


def test_a_written_response_key_must_exist(tmp_path):
    path = jsonl(tmp_path, '{"prompt": "a"}')
    assert open_taskset(settings(path)).task(0).truth is None
    with pytest.raises(ConfigError, match="no key 'answer'"):
        open_taskset(settings(path, format=FormatSettings(response_key="answer")))


def test_folders_through_datasets(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf"))
    import datasets

    made = datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)})
    made.save_to_disk(str(tmp_path / "saved"))
    taskset = open_taskset(settings(tmp_path / "saved"))
    assert (len(taskset), taskset.task(1).truth) == (2, "4")
    with pytest.raises(ConfigError, match="no split 'test'; it has train"):
        open_taskset(settings(tmp_path / "saved", split="test"))
    with pytest.raises(
        ConfigError, match="it has no subsets, and 'socratic' is asked for; leave subset_name out"
    ):
        open_taskset(settings(tmp_path / "saved", subset_name="socratic"))
    with pytest.raises(ConfigError, match="cannot be loaded"):
        (tmp_path / "empty").mkdir()
        open_taskset(settings(tmp_path / "empty"))


@pytest.mark.extra
def test_reasoning_gym():
    made = open_taskset(
        settings(
            "reasoning_gym://chain_sum", args={"size": 7, "seed": 3, "min_terms": 2, "max_terms": 2}
        )
    )
    again = open_taskset(
        settings(
            "chain_sum",
            storage_type="reasoning_gym",
            args={"size": 7, "seed": 3, "min_terms": 2, "max_terms": 2},
        )
    )
    other = open_taskset(
        settings(
            "reasoning_gym://chain_sum", args={"size": 7, "seed": 4, "min_terms": 2, "max_terms": 2}
        )
    )
    assert len(made) == 7
    assert made.task(2).prompt == again.task(2).prompt
    assert made.fingerprint == again.fingerprint != other.fingerprint
    with pytest.raises(ConfigError, match="Did you mean chain_sum"):
        open_taskset(settings("reasoning_gym://chan_sum"))
    with pytest.raises(ConfigError, match=r"does not take these arguments.*min_trms"):
        open_taskset(settings("reasoning_gym://chain_sum", args={"min_trms": 2}))
    with pytest.raises(ConfigError, match="does not take these arguments"):
        open_taskset(settings("reasoning_gym://chain_sum", args={"min_terms": 9, "max_terms": 2}))
    mixed = open_taskset(
        settings(
            "reasoning_gym://composite",
            args={"datasets": [{"name": "chain_sum"}, {"name": "leg_counting"}]},
        )
    )
    assert {mixed.task(i).row["metadata"]["source_dataset"] for i in range(20)} == {
        "chain_sum",
        "leg_counting",
    }


HASHED = """
import json, sys
from rft.taskset.open_source import open_taskset
from rft.taskset.settings import TasksetSettings
found = {}
for name in sys.argv[1:]:
    made = open_taskset(TasksetSettings(name="t", workflow="w", path=f"reasoning_gym://{name}", args={"size": 6}))
    found[name] = [made.fingerprint, *(str(made.task(i).prompt) for i in (3, 1))]
print("found", json.dumps(found))
"""


def reasoning_gym_found(*names):
    """What processes with different hashes of texts find in the data sets: one dict for each
    process.
    """
    for seed in "1", "2":
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", HASHED, *names],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        yield json.loads(done.stdout.rpartition("found ")[2])


@pytest.mark.e2e
def test_rows_of_reasoning_gym_are_those_of_every_other_process():
    """Keys that are numbers (graph_color), shared random generators (codeio), the order of sets
    (the others).
    """
    first, second = reasoning_gym_found(
        "graph_color", "codeio", "isomorphic_strings", "knight_swap", "ransom_note", "word_ladder"
    )
    assert first == second


@pytest.mark.slow
def test_every_data_set_of_reasoning_gym_is_the_same_in_every_process():
    from reasoning_gym.factory import DATASETS

    # that one is made of others, which are given
    first, second = reasoning_gym_found(*sorted(set(DATASETS) - {"composite"}))
    assert first == second


def test_python_factories(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "def rows(*, split, count=2):\n    return [{'prompt': f'{split} {i}'} for i in "
        "range(count)]\ndef bad(split): return 3\n"
    )
    taskset = open_taskset(settings(f"{path}:rows", args={"count": 3}))
    assert [taskset.task(i).prompt for i in range(3)] == ["train 0", "train 1", "train 2"]
    with pytest.raises(ConfigError, match=r"cannot be called with split, .*cnt by name: .*'cnt'"):
        open_taskset(settings(f"{path}:rows", args={"cnt": 3}))
    with pytest.raises(ConfigError, match="returned int; it must return a list of dicts"):
        open_taskset(settings(f"{path}:bad"))
    with pytest.raises(PluginError, match="has no 'nothing'"):
        open_taskset(settings(f"{path}:nothing"))


@pytest.mark.parametrize("seed", range(5))
def test_digit_sums_hold_out_whole_pairs(seed):
    def pairs(split):
        rows = digit_sums(split=split, seed=seed)
        texts = [r["prompt"].removeprefix("What is ").partition("?")[0].split("+") for r in rows]
        assert all(
            int(a) + int(b) == int(r["response"]) for (a, b), r in zip(texts, rows, strict=True)
        )
        return {(int(a), int(b)) for a, b in texts}, len(rows)

    (train, n_train), (test, n_test) = pairs("train"), pairs("test")
    unordered = {tuple(sorted(p)) for p in test}
    assert (n_train, n_test, len(train | test), len(unordered)) == (72, 28, 100, 15)
    assert all((b, a) in test for a, b in test) and not any(
        tuple(sorted(p)) in unordered for p in train
    )


def test_countdown_refuses_numbers_that_cannot_be_held_out():
    assert len(countdown(split="train", size=2, highest=2, count=3)) == 3
    with pytest.raises(
        ValueError, match="no set of numbers belongs to the split test; raise highest"
    ):
        countdown(split="test", size=2, highest=2)


def test_a_system_prompt_stands_before_messages_that_have_none(tmp_path):
    system = {"role": "system", "content": "Own."}
    rows = [
        {"message": [{"role": "user", "content": "a"}]},
        {"message": [system, {"role": "user", "content": "b"}]},
    ]
    fmt = FormatSettings(prompt_type="messages", system_prompt="Be short.")
    taskset = open_taskset(settings(jsonl(tmp_path, "\n".join(map(json.dumps, rows))), format=fmt))
    assert [taskset.task(i).chat()[0]["content"] for i in range(2)] == ["Be short.", "Own."]


@pytest.mark.parametrize("key", ["workflow_key", "reward_fn_key", "system_prompt_key"])
@pytest.mark.parametrize("value", [3, {"style": "rule"}, ["a"]])
def test_names_in_columns_are_texts(tmp_path, key, value):
    path = jsonl(tmp_path, json.dumps({"prompt": "a", "x": value}))
    with pytest.raises(ConfigError, match=r"data\.jsonl:1: key 'x' is .*; it must be a text") as e:
        open_taskset(settings(path, format=FormatSettings(**{key: "x"})))
    assert e.value.key == f"taskset sums.format.{key}"


def test_a_row_that_names_nothing_has_what_the_taskset_names(tmp_path):
    path = jsonl(
        tmp_path,
        '{"prompt": "a", "flow": null, "score": ""}\n{"prompt": "a", "flow": "math_workflow", '
        '"score": "mine"}\n',
    )
    fmt = FormatSettings(workflow_key="flow", reward_fn_key="score")
    taskset = open_taskset(settings(path, format=fmt, reward="exact_answer"))
    assert [(t.workflow, t.reward) for t in map(taskset.task, range(2))] == [
        ("simple_workflow", "exact_answer"),
        ("math_workflow", "mine"),
    ]
    assert (taskset.workflows(), taskset.rewards()) == ({"math_workflow": 1}, {"mine": 1})


def test_tools_of_a_table_have_no_keys_of_other_tools(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    tools = [
        {"name": "a", "parameters": {"city": {"type": "string"}}},
        {"name": "b", "parameters": {"x": {"type": "number"}}},
    ]
    pq.write_table(
        pa.Table.from_pylist([{"prompt": "a", "extra": {"tools": tools}}]),
        tmp_path / "rows.parquet",
    )
    task = open_taskset(
        settings(tmp_path / "rows.parquet", format=FormatSettings(tools_key="extra.tools"))
    ).task(0)
    assert list(task.tools) == tools


def test_long_cells_and_lines_in_a_json_file(tmp_path):
    (tmp_path / "long.csv").write_text(f"prompt,response\n{'a' * 200_000},3\n")
    assert len(open_taskset(settings(tmp_path / "long.csv")).task(0).prompt) == 200_000
    (tmp_path / "lines.json").write_text("".join(json.dumps(r) + "\n" for r in ROWS))
    assert [
        t.truth for t in map(open_taskset(settings(tmp_path / "lines.json")).task, range(2))
    ] == ["2", "4"]


def test_a_call_of_a_table_has_no_arguments_of_other_calls(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    def call(**arguments):
        said = {
            "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": arguments}}]
        }
        return {"role": "assistant", "content": None, **said}

    chats = [
        [{"role": "user", "content": "a"}, call(city="Ulm"), {"role": "tool", "content": "4"}],
        [call(content="x"), call(x=3)],
    ]
    pq.write_table(
        pa.Table.from_pylist([{"message": chat} for chat in chats]), tmp_path / "rows.parquet"
    )
    taskset = open_taskset(
        settings(tmp_path / "rows.parquet", format=FormatSettings(prompt_type="messages"))
    )
    assert [taskset.task(i).chat() for i in range(2)] == chats


def test_the_content_of_a_message_is_text(tmp_path):
    def opened(*parts):
        rows = json.dumps({"message": [{"role": "user", "content": list(parts)}]})
        return open_taskset(
            settings(jsonl(tmp_path, rows), format=FormatSettings(prompt_type="messages"))
        ).task(0)

    said = [{"type": "text", "text": "2+"}, {"type": "text", "text": "2?", "image_url": None}]
    assert opened(*said).chat() == [{"role": "user", "content": "2+2?"}]
    with pytest.raises(
        ConfigError,
        match=r"data\.jsonl:1: .*content is text; parts of images need format.image_key, sound",
    ):
        opened(*said, {"type": "image_url", "image_url": {"url": "x.png"}})


def test_rows_without_any_gold_answer_are_not_bad(tmp_path):
    path = jsonl(tmp_path, '{"prompt": ""}\n{"prompt": "a"}\n{"prompt": "b"}\n')
    taskset = open_taskset(settings(path, skip_bad_rows=True))
    assert [(t.prompt, t.truth) for t in map(taskset.task, range(len(taskset)))] == [
        ("a", None),
        ("b", None),
    ]
    some = open_taskset(
        settings(
            jsonl(tmp_path, '{"prompt": "a"}\n{"prompt": "b", "response": "1"}\n'),
            skip_bad_rows=True,
        )
    )
    assert [t.truth for t in map(some.task, range(len(some)))] == ["1"], (
        "where some have one, a row without is a bad one"
    )
    with pytest.raises(ConfigError, match=r"none of 3 rows can be read.*no key 'gold'"):
        open_taskset(
            settings(
                jsonl(tmp_path, '{"prompt": "a"}\n' * 3),
                skip_bad_rows=True,
                format=FormatSettings(response_key="gold"),
            )
        )


def test_a_row_without_a_system_prompt_of_its_own_has_that_of_all(tmp_path):
    path = jsonl(tmp_path, '{"prompt": "a", "system": "Own."}\n{"prompt": "b", "system": null}\n')
    fmt = FormatSettings(system_prompt_key="system", system_prompt="Be short.")
    taskset = open_taskset(settings(path, format=fmt))
    assert [taskset.task(i).chat()[0]["content"] for i in range(2)] == ["Own.", "Be short."]


def test_calls_of_a_table_hold_no_keys_of_other_calls(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        {
            "prompt": "a",
            "response": [{"name": "f", "arguments": {"x": 1, "y": None}}],
            "extra": {"x": 1},
            "cases": [{"y": 1}],
        },
        {
            "prompt": "b",
            "response": [{"name": "g", "arguments": {"z": [1, None]}}],
            "extra": {"x": None},
            "cases": [{"y": None}],
        },
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    taskset = open_taskset(settings(tmp_path / "rows.parquet"))
    assert [t.truth for t in map(taskset.task, range(2))] == [
        [{"name": "f", "arguments": {"x": 1}}],
        [{"name": "g", "arguments": {"z": [1, None]}}],
    ]
    assert taskset.task(1).row["extra"] == {"x": None} and taskset.task(1).row["cases"] == [
        {"y": None}
    ], "others stay as they are"
    path = jsonl(tmp_path, json.dumps(rows[0]))
    assert open_taskset(settings(path)).task(0).truth == rows[0]["response"], (
        "lines say what they mean"
    )


def test_a_data_set_with_pictures_is_refused(tmp_path):
    import datasets
    import pyarrow.parquet as pq

    pictures = datasets.Features(
        {"prompt": datasets.Value("string"), "shown": datasets.List(datasets.Image())}
    )
    made = datasets.Dataset.from_dict({"prompt": ["a"], "shown": [[]]}, features=pictures)
    made.save_to_disk(tmp_path / "pictures")
    with pytest.raises(
        ConfigError,
        match=r"column 'shown' holds images, sound or videos; name .* in "
        r"format.image_key, .*save_to_disk",
    ):
        open_taskset(settings(tmp_path / "pictures"))
    made.remove_columns("shown").save_to_disk(tmp_path / "texts")
    assert open_taskset(settings(tmp_path / "texts")).task(0).prompt == "a"
    pq.write_table(
        made.data.table.replace_schema_metadata(), tmp_path / "rows.parquet"
    )  # also without Hugging Face's own account
    with pytest.raises(
        ConfigError,
        match=r"rows\.parquet: column 'shown' holds images, sound or videos; .*to_parquet",
    ):
        open_taskset(settings(tmp_path / "rows.parquet"))
    with pytest.raises(
        ConfigError,
        match="it was saved without splits, and 'test' is asked for; save a DatasetDict",
    ):
        open_taskset(settings(tmp_path / "texts", split="test"))

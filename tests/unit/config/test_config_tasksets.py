"""Tasksets in a configuration: selectors, readers, databases, prompts that are cut, the task
pipeline, and veRL's `data` section.
"""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
from pathlib import Path

import pytest

from rft.config.plan import Facts
from rft.launch.execute import execute
from rft.preflight import model_folder
from rft.preflight.check import check
from rft.testing import tiny

IN = "buffer.explorer_input"
OFFLINE = "buffer.trainer_input.experience_buffer"
PIPE = "data_processor.task_pipeline"
ROWS = [
    {
        "prompt": f"{i}+1?",
        "response": str(i + 1),
        "weak": i / 20,
        "strong": i / 10,
        "pass_rate": i / 10,
    }
    for i in range(10)
]


READER = """
import json
from pathlib import Path


class Rows:
    def __init__(self, path, split):
        self.rows = [json.loads(line) for line in Path(path).read_text().splitlines()]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]
"""
SELECTOR = """
from rft.taskset.selectors import TaskSelector


class Mine(TaskSelector):
    def rows(self, batch, first, count):
        return [0] * count
"""


@pytest.fixture
def here(tmp_path, monkeypatch, tiny_model):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in ROWS))
    (tmp_path / "run.yaml").write_text(
        f"""
name: run
checkpoint_root_dir: {tmp_path}/runs
model: {{model_path: {tiny_model}, max_prompt_tokens: 64, max_response_tokens: 2}}
algorithm: {{repeat_times: 2}}
buffer:
  batch_size: 2
  total_steps: 1
  explorer_input:
    default_workflow_type: simple_workflow
    default_reward_fn_type: exact_answer
    taskset: {{name: t, path: rows.jsonl}}
explorer: {{rollout_model: {{engine_type: transformers}}}}
"""
    )
    return tmp_path


def report(*overrides: str, schema_only: bool = False):
    return check("run.yaml", list(overrides), schema_only=schema_only, facts=Facts(cpus=3, gpus=0))


def errors(*overrides: str) -> dict[str, str]:
    return {e.key: e.message for e in report(*overrides).errors}


BOTS = (
    f"{IN}.taskset.data_selector.selector_type=Difficulty_Based",
    f"{IN}.taskset.data_selector.feature_keys=[weak,strong]",
)


def test_selectors(here):
    made = report(
        *BOTS,
        f"{IN}.taskset.data_selector.kwargs={{tau: 0}}",
        "synchronizer.sync_interval=3",
        "synchronizer.sync_offset=1",
    )
    assert made.ok, made.errors
    (t,) = made.plan.explorer.tasksets
    assert (t.selector, t.feature_keys, t.selector_args) == (
        "difficulty_based",
        ("weak", "strong"),
        {"tau": 0},
    )
    assert made.plan.explorer.feedback_lag == 3, (
        "as many as the schedule lets run ahead: offset + interval - 1"
    )
    assert report(*BOTS).plan.explorer.feedback_lag == 0
    where = f"{IN}.taskset.data_selector"
    assert (
        "Did you mean shuffle" in errors(f"{where}.selector_type=shufle")[f"{where}.selector_type"]
    )
    assert "Known: m, lamb" in errors(*BOTS, f"{where}.kwargs={{lmb: 1}}")[f"{where}.kwargs"]
    assert "exactly 2" in errors(BOTS[0])[f"{where}.feature_keys"]
    assert (
        "column 'hard'"
        in errors(BOTS[0], f"{where}.feature_keys=[weak,hard]")[f"{where}.feature_keys"]
    )
    evals = (
        f"{IN}.eval_tasksets=[{{path: rows.jsonl, data_selector: {{selector_type: "
        f"difficulty_based, feature_keys: [weak, strong]}}}}]"
    )
    assert (
        "evaluation takes every row once"
        in errors(evals)[f"{IN}.eval_tasksets[0].data_selector.selector_type"]
    )
    (here / "mine.py").write_text(SELECTOR)
    own = report(f"{where}.selector_type=mine.py:Mine")
    assert own.ok and own.plan.explorer.tasksets[0].selector.endswith("mine.py:Mine")
    assert not report(f"{where}.selector_type=mine.py:Other").ok


def test_readers_and_databases(here):
    (here / "mine.py").write_text(READER)
    made = report(f"{IN}.taskset.storage_type=mine.py:Rows")
    assert made.ok and made.tasksets[0].num_rows == 10, made.errors
    with sqlite3.connect(here / "tasks.db") as db:
        db.execute("CREATE TABLE sums (id INTEGER PRIMARY KEY, prompt TEXT, response TEXT)")
        db.executemany(
            "INSERT INTO sums VALUES (?, ?, ?)", [(i, f"{i}+0?", str(i)) for i in range(4)]
        )
    db.close()
    sql = (f"{IN}.taskset.path=tasks.db", f"{IN}.taskset.storage_type=sql")
    made = report(*sql, f"{IN}.taskset.args={{table: sums}}")
    assert made.ok and made.tasksets[0].num_rows == 4, made.errors
    assert "there is no table 't'" in errors(*sql)[f"{IN}.taskset.args"]


def test_bad_rows(here):
    with (here / "rows.jsonl").open("a") as file:
        file.write("nonsense\n")
    assert "rows.jsonl:11: not JSON" in errors()[f"{IN}.taskset.path"]
    made = report(f"{IN}.taskset.skip_bad_rows=true")
    assert made.ok and any("1 of 11 rows are left out (skip_bad_rows)" in w for w in made.warnings)


def test_a_chat_that_ends_with_an_answer_is_told(here):
    told = "the chat of row 0 ends with an answer, which the model reads before it answers"
    asked = [{"role": "user", "content": "1+1?"}]
    (here / "rows.jsonl").write_text(json.dumps({"message": asked, "response": "2"}) + "\n")
    assert not any(told in w for w in report(f"{IN}.taskset.format.prompt_type=messages").warnings)
    asked.append({"role": "assistant", "content": "2"})
    (here / "rows.jsonl").write_text(json.dumps({"message": asked, "response": "2"}) + "\n")
    assert any(told in w for w in report(f"{IN}.taskset.format.prompt_type=messages").warnings)


def test_rows_that_name_workflows(here):
    lines = [
        {**r, "flow": "simple_workflow" if i else "simple_workflo"} for i, r in enumerate(ROWS)
    ]
    (here / "rows.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines[1:]))
    assert report(f"{IN}.taskset.format.workflow_key=flow").ok
    (here / "rows.jsonl").write_text("".join(json.dumps(x) + "\n" for x in [*lines[1:], lines[0]]))
    found = errors(f"{IN}.taskset.format.workflow_key=flow")[f"{IN}.taskset.format.workflow_key"]
    assert "row 9 of" in found and "Did you mean simple_workflow" in found


def test_prompts_that_are_too_long(here):
    (here / "rows.jsonl").write_text(
        json.dumps({"prompt": "x" * 90, "response": "1"}) + "\n" + json.dumps(ROWS[0]) + "\n"
    )
    cut = report("model.enable_prompt_truncation=false", "model.prompt_truncation_side=Left")
    assert (
        cut.plan.explorer.tasksets[0].prompt_truncation == "left"
        and cut.plan.explorer.tasksets[0].prompt_limit is None
    )
    assert (
        report("model.prompt_truncation_side=left").plan.explorer.tasksets[0].prompt_truncation
        == "error"
    )
    refused = errors("model.enable_prompt_truncation=false")["model.prompt_truncation_side"]
    assert re.search(r"the prompt of row 0 of .* has \d+ tokens", refused)
    out = report(
        "model.enable_prompt_truncation=false", f"{IN}.taskset.filter_overlong_prompts=true"
    )
    assert out.ok and out.tasksets[0].num_rows == 1
    assert [
        report(*o).plan.explorer.tasksets[0].num_process for o in ((), (f"{PIPE}.num_process=7",))
    ] == [3, 7]


def test_another_tokenizer(here, tmp_path):
    other = tiny.make(tmp_path / "other")
    made = report(f"model.tokenizer_path={other}", f"{IN}.taskset.filter_overlong_prompts=true")
    assert made.ok, made.errors
    plan = made.plan
    assert {
        plan.engines[0].tokenizer_path,
        plan.learner.tokenizer_path,
        plan.explorer.tasksets[0].prompt_limit.model_path,
    } == {str(other)}
    given = "{path: rows.jsonl, format: {response_key: response}}"
    made = report(
        f"model.tokenizer_path={other}",
        "mode=train",
        "algorithm={algorithm_type: sft}",
        f"{OFFLINE}={given}",
    )
    assert made.plan is not None and made.plan.trainer.offline_data.model_path == str(other), (
        "what is trained is written by it, too"
    )
    file = other / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["added_tokens"].append(
        {**tokenizer["added_tokens"][-1], "id": 99_999, "content": "<far>"}
    )
    file.write_text(json.dumps(tokenizer))
    assert (
        "has token 99999, and the model knows"
        in errors(f"model.tokenizer_path={other}")["model.model_path"]
    )


# ---------------------------------------------------------------- the task pipeline

MADE = (
    f"{IN}.taskset.path=made.jsonl",
    f"{PIPE}.inputs=[rows.jsonl]",
    f"{PIPE}.operators=[{{name: pass_rate_score}}]",
    f"{PIPE}.top_k=4",
)


def test_the_pipeline_is_shown_and_not_run_by_check(here):
    made = report(*MADE)
    assert made.ok, made.errors
    assert made.tasksets[0].num_rows == 4 and not (here / "made.jsonl").exists()
    assert any(
        "inputs 10 → pass_rate_score 10 → sort 10 → top 4 4; goes into" in n for n in made.notes
    )
    assert made.plan.task_pipeline.order == "sort" and made.plan.task_pipeline.output == str(
        here / "made.jsonl"
    )
    assert made.tasksets[0].rows[0].truth == "10", "difficulty counts -0.7: the easiest first"


def test_operators_from_a_file(here):
    (here / "operators.yaml").write_text(
        "operators:\n- name: deduplicate\n- {name: range_filter, args: {field: weak, min: 0.2}}\n"
    )
    made = report(*MADE, f"{PIPE}.config_path=operators.yaml")
    assert [o.name for o in made.plan.task_pipeline.operators] == [
        "deduplicate",
        "range_filter",
        "pass_rate_score",
    ], made.errors
    for text, message in (
        (
            "process:\n- text_length_filter: {min_len: 1}\n",
            "recipe of Data-Juicer; write operators: .{name: data_juicer_filter, args: "
            "{config_path: operators.yaml}}",
        ),
        ("operators: 3\n", "must hold the key operators alone"),
        ("operators:\n- name: range_filter\n", "Field required|field"),
    ):
        (here / "operators.yaml").write_text(text)
        found = errors(*MADE, f"{PIPE}.config_path=operators.yaml")
        assert any(
            k.startswith(f"{PIPE}.config_path") and re.search(message, m) for k, m in found.items()
        ), found
    assert f"{PIPE}.config_path" in errors(*MADE, f"{PIPE}.config_path=none.yaml")


@pytest.mark.parametrize(
    ("change", "key", "message"),
    [
        (f"{PIPE}.inputs=[]", f"{PIPE}.inputs", "name the files"),
        (f"{PIPE}.inputs=[made.jsonl]", f"{PIPE}.inputs", "cannot go into one of the inputs"),
        (f"{PIPE}.inputs=[nothing.jsonl]", "taskset inputs.path", "does not exist"),
        (f"{IN}.taskset.path=made.parquet", IN, "must be a file that ends with .jsonl"),
        (
            f"{PIPE}.operators=[{{name: text_length_filter}}]",
            f"{PIPE}.operators[0].name",
            "data_juicer_filter",
        ),
        (
            f"{PIPE}.operators=[{{name: deduplicate, args: {{feld: x}}}}]",
            f"{PIPE}.operators[0].args",
            "Known: field, normalize",
        ),
        (f"{PIPE}.priority_weights.difficulty=0", "", ""),
        (f"{PIPE}.target_fields=[nothing]", f"{PIPE}.target_fields", "there is no column"),
    ],
)
def test_pipelines_refused(here, change, key, message):
    found = errors(*MADE, change)
    if not message:
        assert "there is no column for any weight" in found[f"{PIPE}.order"]
        return
    assert any(k.startswith(key) and message in m for k, m in found.items()), found


@pytest.mark.e2e
def test_a_run_makes_the_file_once_and_goes_on_with_it(here, capsys):
    def run(*more: str) -> str:
        execute(Path("run.yaml"), [*MADE, *more], in_process=True)
        return capsys.readouterr().out

    assert "task pipeline: inputs 10 → pass_rate_score 10 → sort 10 → top 4 4 → " in run()
    written = (here / "made.jsonl").read_bytes()
    assert len(written.splitlines()) == 4
    again = run("buffer.total_steps=2")
    assert "task pipeline: 4 rows, made before from the same inputs and operators" in again
    assert (here / "made.jsonl").read_bytes() == written
    found = errors(*MADE, f"{PIPE}.top_k=3")
    assert "it was made from other inputs or operators" in found[f"{PIPE}.output"]


# ---------------------------------------------------------------- veRL's data section


@pytest.mark.parametrize(("extra", "warned"), [(0, False), (3, True)])
def test_a_tokenizer_beyond_the_embedding_is_warned_of(
    tiny_model: Path, tmp_path: Path, extra: int, warned: bool
) -> None:
    """Prompts without these tokens train; the folder may be the model's own."""
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["added_tokens"] += [
        {**tokenizer["added_tokens"][0], "id": size + n, "content": f"<more{n}>"}
        for n in range(extra)
    ]
    file.write_text(json.dumps(tokenizer))
    warnings = model_folder.look(str(folder)).warnings
    says = f"has token {size + 2}, and the model knows {size}: a prompt with a token from there on"
    assert any(says in w for w in warnings) == warned

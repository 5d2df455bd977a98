"""`rft bench --input`: what veRL's main_eval does with a file of stored answers, and the same with
a taskset's own reward.
"""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.main import get_command
from typer.testing import CliRunner

from rft.cli.main import make
from rft.errors import ConfigError
from rft.extras.migrate.convert import verl_eval
from rft.testing.judge import FakeJudge
from tests.helpers.judge_server import JudgeServer

SCORE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "broken":
        raise ValueError("cannot read this")
    return float(solution_str == ground_truth)
"""
ROWS = [
    ("gsm8k", "2+2?", ["4", "5", "4", "4"], "4"),
    ("gsm8k", "1+1?", ["3", "3", "3", "2"], "2"),
    ("math", "3+3?", ["6", "6", "broken", "7"], "6"),
]


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A table as main_generation writes it."""
    rows = [
        {
            "data_source": source,
            "prompt": [{"role": "user", "content": prompt}],
            "responses": answers,
            "reward_model": {"style": "rule", "ground_truth": truth},
        }
        for source, prompt, answers, truth in ROWS
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "out.parquet")
    (tmp_path / "score.py").write_text(SCORE)
    return tmp_path / "out.parquet"


def run(*arguments: str) -> str:
    result = CliRunner().invoke(make("bench"), ["bench", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_stored_answers_are_split_by_source(stored: Path) -> None:
    score = f"{stored.parent / 'score.py'}:compute_score"
    told = json.loads(run("--input", str(stored), "--reward-fn", score, "--json"))
    sources = told["sources"]
    assert {s: v["mean"] for s, v in sources.items()} == {
        "gsm8k": pytest.approx((0.75 + 0.25) / 2),
        "math": pytest.approx(2 / 3),  # the one that could not be scored is left out
        "all": pytest.approx((0.75 + 0.25 + 2 / 3) / 3),
    }
    assert (
        sources["math"]["unscored"] == 1
        and sources["all"]["answers"] == 12
        and sources["gsm8k"]["pass@4"] == 1.0
    )
    assert sources["gsm8k"]["pass@2"] == pytest.approx((1.0 + 0.5) / 2)
    assert "row 2: ValueError: cannot read this" in told["unscored"]
    lines = run("--input", str(stored), "--reward-fn", score).splitlines()
    assert (
        lines[0].split()[:3] == ["source", "rows", "answers"]
        and lines[1].startswith("gsm8k")
        and "not scored" in lines[-1]
    )


def test_columns_may_have_other_names_and_answers_may_be_single(tmp_path: Path) -> None:
    (tmp_path / "score.py").write_text(SCORE)
    rows = [{"q": "2+2?", "said": "4", "kind": k, "gold": "4"} for k in ("a", "b")]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    keys = (
        "--prompt-key",
        "q",
        "--response-key",
        "said",
        "--group-key",
        "kind",
        "--truth-key",
        "gold",
    )
    told = json.loads(
        run(
            "--input",
            str(tmp_path / "x.jsonl"),
            "--reward-fn",
            f"{tmp_path / 'score.py'}:compute_score",
            *keys,
            "--json",
        )
    )
    assert {s: v["mean"] for s, v in told["sources"].items()} == {"a": 1.0, "b": 1.0, "all": 1.0}


def test_a_configuration_s_taskset_says_how(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text(
        json.dumps({"question": "2+2?", "answer": "4", "responses": ["It is 4.", "5"]}) + "\n"
    )
    file = tmp_path / "c.yaml"
    file.write_text(
        f"""
model: {{model_path: {tmp_path}, max_model_len: 64}}
buffer:
  batch_size: 2
  total_steps: 1
  explorer_input:
    default_workflow_type: simple_workflow
    default_reward_fn_type: exact_answer
    taskset: {{name: sums, path: rows.jsonl, format: {{prompt_key: question, response_key: answer}}}}
    eval_tasksets: [{{name: other, path: rows.jsonl, format: {{prompt_key: question, response_key: answer}}}}]
"""
    )
    told = json.loads(
        run(
            "--input",
            str(tmp_path / "x.jsonl"),
            "--config",
            str(file),
            "--taskset",
            "sums",
            "--json",
        )
    )
    assert told["sources"]["sums"]["mean"] == 0.5 and told["reward"] == "exact_answer"
    with pytest.raises(ConfigError, match="write one of sums, other"):
        run("--input", str(tmp_path / "x.jsonl"), "--config", str(file))


def test_a_judge_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    (tmp_path / "x.jsonl").write_text(
        json.dumps({"prompt": "2+2?", "responses": ["It is 4.", "It is 5."]}) + "\n"
    )
    with JudgeServer(FakeJudge(lambda prompt: 10 if "is 4" in prompt else 1)) as server:
        file = tmp_path / "c.yaml"
        file.write_text(
            f"""
model: {{model_path: not-needed, max_model_len: 64}}
checkpoint_root_dir: {tmp_path / "runs"}
buffer:
  batch_size: 2
  total_steps: 1
  explorer_input:
    default_workflow_type: simple_workflow
    default_reward_fn_type: rubric_judge
    taskset: {{name: sums, path: rows.jsonl}}
explorer:
  auxiliary_models:
    - {{name: judge, engine_type: external, model_path: judge-1, external_model_config: {{base_url: "{server.url}"}}}}
"""
        )
        result = CliRunner().invoke(
            make("bench"),
            ["bench", "-i", str(tmp_path / "x.jsonl"), "-c", str(file), "--json"],
            catch_exceptions=False,
        )
        assert result.exit_code == 0 and len(server.asked) == 2
    assert json.loads(result.stdout)["sources"]["sums"]["mean"] == pytest.approx(0.55)


def test_what_is_missing_is_named(stored: Path, tmp_path: Path) -> None:
    score = f"{stored.parent / 'score.py'}:compute_score"
    with pytest.raises(ConfigError, match="row 0 has no column 'said'; it has data_source, prompt"):
        run("--input", str(stored), "--reward-fn", score, "--response-key", "said")
    with pytest.raises(ConfigError, match="name the reward with --reward-fn"):
        run("--input", str(stored))
    with pytest.raises(ConfigError, match="is not a file"):
        run("--input", str(tmp_path / "no.parquet"), "--reward-fn", score)


def test_the_converter_writes_options_that_exist() -> None:
    offered = {
        o for c in get_command(make("bench")).commands.values() for p in c.params for o in p.opts
    }  # type: ignore[attr-defined]
    assert set(verl_eval.OPTIONS.values()) <= offered


def test_a_file_without_rows_is_refused(stored: Path) -> None:
    (empty := stored.parent / "empty.jsonl").write_text("")
    with pytest.raises(ConfigError, match="has no rows"):
        run("--input", str(empty), "--reward-fn", f"{stored.parent / 'score.py'}:compute_score")

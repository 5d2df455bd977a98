"""`rft judge report`: a judge beside labels."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rft.cli.main import make
from rft.errors import ConfigError
from rft.testing.judge import FakeJudge
from tests.helpers.judge_server import JudgeServer

CONFIG = """
model: {{model_path: not-needed, max_prompt_tokens: 64, max_response_tokens: 64}}
buffer:
  batch_size: 2
  total_epochs: 1
  explorer_input:
    taskset:
      name: questions
      path: {folder}/tasks.jsonl
      default_workflow_type: simple_workflow
      default_reward_fn_type: {reward}
      reward_fn_args: {{cache: {folder}/cache.db}}
explorer:
  auxiliary_models:
    - {{name: judge, engine_type: external, model_path: judge-1, external_model_config: {{base_url: "{url}"}}}}
"""
ROWS = [
    ("good one", True),
    ("good two", 1),
    ("good, in more words", "yes"),
    ("bad", False),
    ("bad bad", 0),
    ("flip", "no"),
]


def opinion(prompt: str) -> float:
    """Right about good and bad; taken in by one of them."""
    return (
        9
        if "good" in prompt.split("<<<answer")[-1] or "flip" in prompt.split("<<<answer")[-1]
        else 2
    )


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[JudgeServer]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with JudgeServer(FakeJudge(opinion)) as made:
        yield made


def written(folder: Path, url: str, reward: str = "rubric_judge") -> Path:
    (folder / "tasks.jsonl").write_text(json.dumps({"prompt": "Is it?", "response": "good"}) + "\n")
    lines = [json.dumps({"prompt": "Is it?", "said": text, "ok": label}) for text, label in ROWS]
    (folder / "labelled.jsonl").write_text("\n".join(lines))
    path = folder / "config.yaml"
    path.write_text(CONFIG.format(folder=folder, url=url, reward=reward))
    return path


def run(*arguments: str) -> str:
    result = CliRunner().invoke(
        make("judge"), ["judge", "report", *arguments], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_file_with_labels(server: JudgeServer, tmp_path: Path) -> None:
    config = written(tmp_path, server.url)
    options = (
        "-c",
        str(config),
        "-i",
        str(tmp_path / "labelled.jsonl"),
        "--response-key",
        "said",
        "--label-key",
        "ok",
    )
    told = json.loads(run(*options, "--repeats", "2", "--json", "--to", str(tmp_path / "out.json")))
    assert json.loads((tmp_path / "out.json").read_text()) == told
    assert (
        told["judge"] == "rubric_judge"
        and told["answers"] == told["labelled"] == 6
        and told["unscored"] == 0
    )
    assert told["accuracy"] == pytest.approx(5 / 6) and told["kappa"] == pytest.approx(2 / 3)
    assert told["auc"] == pytest.approx((3 * 2 + 3 * 0.5) / 9)
    assert (
        told["self_consistency"] == 1.0
        and told["repeat_std"] == 0.0
        and told["position_bias"] is None
        and told["drift"] == []
    )
    assert len(server.asked) == 12 and told["asked"]["calls"] == 12
    table = run(*options)
    assert len(server.asked) == 12, "the first repeat was in the cache"
    assert "Cohen's kappa" in table and "0.6667" in table and "AUC" in table


def test_position_bias_of_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with JudgeServer(FakeJudge("first")) as server:
        config = written(tmp_path, server.url, "pairwise_judge")
        (tmp_path / "pairs.jsonl").write_text(
            json.dumps({"prompt": "Is it?", "response": "7", "said": ["7", "8", "9"]})
        )
        told = json.loads(
            run(
                "-c",
                str(config),
                "-i",
                str(tmp_path / "pairs.jsonl"),
                "--response-key",
                "said",
                "--gold",
                "exact_answer",
                "--json",
            )
        )
    assert told["position_bias"] == 1.0 and told["mean_score"] == 0.5 and told["labelled"] == 3


def test_what_is_wrong_is_said(server: JudgeServer, tmp_path: Path) -> None:
    config = written(tmp_path, server.url)
    for more, why in (
        ((), "--input, or the folder of a run"),
        (("-i", str(tmp_path / "none.jsonl")), "is not a file"),
        (
            ("-i", str(tmp_path / "labelled.jsonl"), "--to", str(tmp_path / "none" / "r.json")),
            "--to: must be a file in a folder",
        ),
        (("-i", str(tmp_path / "labelled.jsonl")), "no column 'response'"),
        (("-i", str(tmp_path / "labelled.jsonl"), "--response-key", "said"), "no column 'label'"),
        (
            (
                "-i",
                str(tmp_path / "labelled.jsonl"),
                "--response-key",
                "said",
                "--label-key",
                "said",
            ),
            "is no label",
        ),
        (
            ("-i", str(tmp_path / "labelled.jsonl"), "--taskset", "x"),
            "--taskset: write one of questions",
        ),
    ):
        with pytest.raises(ConfigError, match=why):
            run("-c", str(config), *more)

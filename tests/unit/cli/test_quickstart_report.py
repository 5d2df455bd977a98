"""What `rft quickstart` says at its end: accuracy before and after, as far as it was measured."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from rft.cli.quickstart_command import report
from tests.helpers.stored_metrics import metrics


def _said(run_dir: Path) -> str:
    console = Console(file=io.StringIO(), soft_wrap=True, width=200)
    report(run_dir, 75.0, console)
    assert "<polyline" in (run_dir / "reward_curve.svg").read_text()
    return console.file.getvalue()  # type: ignore[attr-defined]


def _sample(run_dir: Path, step: int, answer: str) -> None:
    row = {"prompt": "2 + 3 =", "answer": answer, "truth": 5, "reward": float(answer == "5")}
    folder = run_dir / "samples"
    folder.mkdir(exist_ok=True)
    (folder / f"eval_held_out_{step}.jsonl").write_text(json.dumps(row) + "\n")


def test_accuracy_is_compared_between_the_first_and_the_last_evaluation(tmp_path: Path) -> None:
    metrics(tmp_path)  # evaluated after steps 5 and 10
    _sample(tmp_path, 5, "six")
    _sample(tmp_path, 10, "5")
    (tmp_path / "checkpoints/global_step_10/huggingface").mkdir(parents=True)
    said = _said(tmp_path)
    assert "0.33 -> 0.67 in 10 steps, 75 s" in said
    assert "after 5 steps" in said
    assert "untrained" not in said
    assert "✗ six" in said
    assert "✓ 5" in said
    assert f"model     {tmp_path}/checkpoints/global_step_10/huggingface" in said


@pytest.mark.parametrize("steps", [4, 5], ids=["no evaluation", "one"])
def test_without_two_evaluations_it_says_what_is_missing(tmp_path: Path, steps: int) -> None:
    metrics(tmp_path, steps)
    said = _said(tmp_path)
    assert "no evaluation before and after training" in said
    assert "->" not in said
    assert "model " not in said


def test_without_kept_answers_the_accuracy_is_told_all_the_same(tmp_path: Path) -> None:
    metrics(tmp_path)  # monitor.log_eval_samples=0
    said = _said(tmp_path)
    assert "0.33 -> 0.67 in 10 steps, 75 s" in said and "held-out questions" not in said


def test_what_a_model_says_is_no_markup(tmp_path: Path) -> None:
    metrics(tmp_path)
    _sample(tmp_path, 5, "[/INST] [red]5\x1b[2J")
    _sample(tmp_path, 10, "5")
    assert "[/INST] [red]5\\x1b[2J" in _said(tmp_path)


def test_the_seconds_of_a_resumed_run_are_not_those_of_the_whole(tmp_path: Path) -> None:
    metrics(tmp_path)
    console = Console(file=io.StringIO(), soft_wrap=True, width=200)
    report(tmp_path, None, console)
    assert "0.33 -> 0.67 in 10 steps\n" in console.file.getvalue()  # type: ignore[attr-defined]

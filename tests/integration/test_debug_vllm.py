"""`rft debug workflow --engine vllm`: a task on a real engine, without Ray."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CONFIG = Path(__file__).parents[2] / "examples" / "tiny" / "config.yaml"


@pytest.mark.slow
@pytest.mark.vllm
def test_a_task_on_vllm(tiny_model: Path, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "rft.cli.main",
        "debug",
        "workflow",
        "--config",
        str(CONFIG),
        "--engine",
        "vllm",
        "--tokens",
    ]
    more = ["--runs", "2", f"model.model_path={tiny_model}", "model.max_response_tokens=4"]
    done = subprocess.run(
        [*command, *more], cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    for line in (
        "simple_workflow plays copy[0], run 1",
        "user       hz7",
        "are trained, mean log-prob",
        "not trained  <|im_start|>uhz7",
    ):
        assert line in done.stdout, (line, done.stdout)

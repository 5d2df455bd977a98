"""Runs with rows of steps and with a teacher train from a configuration alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml

from rft.cli.main import main
from rft.launch.execute import execute
from rft.testing import tiny

STAIRS = """
from rft.workflow.turns import EnvWorkflow, Step


class Stairs(EnvWorkflow):
    def reset(self, task):
        self.at = 0
        return "0"

    def step(self, action):
        self.at += 1
        return Step(str(self.at), reward=float(len(action) % 2), done=self.at == 2, info={"success": True})
"""


def config(
    folder: Path, model: Path, algorithm: str, taskset: dict[str, Any], **explorer: Any
) -> Path:
    made = {
        "name": algorithm,
        "checkpoint_root_dir": str(folder / "runs"),
        "model": {"model_path": str(model), "max_prompt_tokens": 60, "max_response_tokens": 4},
        "algorithm": {"algorithm_type": algorithm, "repeat_times": 2, "optimizer": {"lr": 1e-3}},
        "buffer": {"batch_size": 2, "total_steps": 2, "explorer_input": {"taskset": taskset}},
        "explorer": {
            "rollout_model": {"engine_type": "transformers"},
            "eval_on_startup": False,
            "eval_at_end": False,
            **explorer,
        },
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(made))
    return folder / "config.yaml"


def rows(folder: Path, run: Path) -> list[dict[str, Any]]:
    with pytest.raises(SystemExit) as e:
        main(["buffer", "export", str(run), "--to", str(folder / "rows.parquet"), "--tokens"])
    assert not e.value.code
    read: list[dict[str, Any]] = pq.read_table(folder / "rows.parquet").to_pylist()
    return read


def test_rows_of_steps(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stairs.py").write_text(STAIRS)
    taskset = {
        "path": "rft.taskset.generated_tasks:seeds",
        "split": "train",
        "default_workflow_type": "stairs.py:Stairs",
        "workflow_args": {"layout": "steps", "credit": "run", "max_turn_tokens": 1},
    }
    run = execute(
        config(tmp_path, tiny_model, "multi_step_grpo", taskset), [], in_process=True
    ).run_dir
    found = rows(tmp_path, run)
    assert len(found) == 2 * 2 * 2 * 2, "two steps of two tasks, two runs each, two moves each"
    assert {r["step"] for r in found} == {0, 1} and all(r["used_step"] is not None for r in found)


def test_a_teacher(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    taskset = {
        "path": "rft.testing.tiny:copy_tasks",
        "default_workflow_type": "on_policy_distill_workflow",
        "split": "train",
    }
    teacher = [
        {
            "name": "teacher",
            "model_path": str(tiny.make(tmp_path / "teacher", seed=5)),
            "engine_type": "transformers",
        }
    ]
    run = execute(
        config(tmp_path, tiny_model, "on_policy_distill", taskset, auxiliary_models=teacher),
        [],
        in_process=True,
    ).run_dir
    found = rows(tmp_path, run)
    assert len(found) == 8 and all(r["used_step"] is not None for r in found)
    for r in found:
        mask, taught, said = (
            np.array(r[name]) for name in ("loss_mask", "teacher_logprobs", "logprobs")
        )
        assert (
            (taught[mask] < 0).all()
            and not taught[~mask].any()
            and not np.allclose(taught[mask], said[mask])
        )

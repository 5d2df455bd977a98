"""An expert's rows beside the policy's own in every train batch: which rows, what is learnt of
them, and after a resume.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rft.launch.execute import execute
from rft.monitor.read import read, series
from rft.preflight.check import check
from rft.testing import tiny


def config(tmp_path: Path, model: Path, kind: str = "mix", **more: Any) -> Path:
    answers = tmp_path / "answers.jsonl"
    answers.write_text("".join(json.dumps(row) + "\n" for row in tiny.copy_tasks("train", n=12)))
    tasks = {
        "path": "rft.testing.tiny:copy_tasks",
        "default_workflow_type": "simple_workflow",
        "default_reward_fn_type": "exact_answer",
    }
    values = {
        "name": kind,
        "checkpoint_root_dir": str(tmp_path / "runs"),
        "model": {"model_path": str(model), "max_prompt_tokens": 63, "max_response_tokens": 1},
        "algorithm": {
            "algorithm_type": kind,
            "repeat_times": 4,
            "sample_strategy_args": {"expert_data_ratio": 0.2},
            "optimizer": {"lr": 1e-3},
        },
        "buffer": {
            "batch_size": 4,
            "explorer_input": {"taskset": tasks},
            "trainer_input": {"auxiliary_buffers": {"sft_dataset": {"path": str(answers), **more}}},
        },
        "explorer": {"rollout_model": {"engine_type": "transformers", "cpu_threads": 1}},
        "trainer": {"total_steps": 2, "cpu_threads": 1},
    }
    file = tmp_path / "mix.yaml"
    file.write_text(yaml.safe_dump(values))
    return file


def metric(run: Path, name: str) -> dict[int, float]:
    return dict(series(read(run / "metrics.jsonl"), name))


@pytest.mark.parametrize("kind", ["mix", "mix_chord"])
def test_each_batch_has_its_share_of_an_experts_rows(
    tmp_path: Path, tiny_model: Path, kind: str
) -> None:
    file = config(tmp_path, tiny_model, kind)
    run = execute(file, [], in_process=True).run_dir
    assert metric(run, "experience/rows") == {1: 20.0, 2: 20.0}, (
        "16 of the policy and a fifth of all of the expert"
    )
    assert metric(run, "experience/response_tokens") == {1: 24.0, 2: 24.0}, (
        "16 of one token, 4 of a digit and its end"
    )
    losses = metric(run, "actor/expert/sft_loss")
    assert len(losses) == 2 and min(losses.values()) > 0
    if kind == "mix":
        on = execute(file, ["trainer.total_steps=3"], in_process=True)
        assert on.resumed_from is not None and on.resumed_from.step == 2
        assert metric(run, "experience/rows")[3] == 20.0


def test_check_asks_for_the_data_set(tmp_path: Path, tiny_model: Path) -> None:
    file = config(tmp_path, tiny_model)
    report = check(file)
    assert report.ok
    assert "each train batch has 16 rows of the policy and 4 of sft_dataset" in report.notes
    missing = check(file, ["algorithm.sample_strategy_args.sft_dataset_name=other"])
    assert "buffer.trainer_input.auxiliary_buffers.other" in [e.key for e in missing.errors]


def test_check_looks_at_the_experts_rows(tmp_path: Path, tiny_model: Path) -> None:
    key = "buffer.trainer_input.auxiliary_buffers.sft_dataset"
    file = config(tmp_path, tiny_model)
    (tmp_path / "two.jsonl").write_text(
        "".join((tmp_path / "answers.jsonl").read_text().splitlines(keepends=True)[:2])
    )
    for wrong, where, why in (
        ("format.response_key=answer", f"{key}.format.response_key", "the row has no key 'answer'"),
        (f"path={tmp_path}/none.jsonl", f"{key}.path", "does not exist"),
        (f"path={tmp_path}/two.jsonl", key, "has 2 rows, and each train batch takes 4 of them"),
    ):
        report = check(file, [f"{key}.{wrong}"])
        assert [(e.key, why in e.message) for e in report.errors] == [(where, True)], report.errors

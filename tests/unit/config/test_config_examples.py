"""Every example of the repository passes `rft check`, with its model and data where they are on
this machine.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from rft.preflight.check import check
from rft.testing import tiny, tiny_vision

EXAMPLES = Path(__file__).parents[3] / "examples"
# a judge is not asked; an environment, or a workflow, scores itself
NO_GOLD = ("judge", "judge_local", "frozen_lake", "repair")
# those are simulated: test_forecast.py
FILES = sorted(
    f
    for f in EXAMPLES.rglob("*.yaml")
    if f.parent.name != "clusters" and f.name != "base.yaml"  # which others extend
)


def roomy(folder: Path) -> Path:
    """The tiny model with as many positions as real ones have; its tokens are bytes."""
    config = tiny.make(folder) / "config.json"
    config.write_text(
        json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 32768})
    )
    return folder


of_each_file = pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(EXAMPLES)))


@pytest.mark.extra
@of_each_file
def test_its_keys(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES.parent)
    schema = check(path, schema_only=True)
    assert not schema.errors and schema.plan is not None


@pytest.mark.e2e
@pytest.mark.extra
@of_each_file
def test_example(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES.parent)
    if path.parent.name == "command_line_agents":  # played by tests/integration
        program = tmp_path / path.stem
        program.touch(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("VERIFIERS_PYTHON", sys.executable)
    make = tiny_vision.make if path.parent.name == "colour" else roomy
    options = [f"model.model_path={make(tmp_path / 'model')}"]
    if path.parent.name == "judge_local":  # a question in bytes is longer than in words
        options.append("explorer.auxiliary_models.0.max_model_len=2048")
    report = check(path, options)
    assert not report.errors and report.plan is not None
    if report.plan.serve is not None:  # its clients bring the tasks
        assert not report.tasksets
        return
    assert report.tasksets and all(t.rows for t in report.tasksets)
    sets = report.plan.explorer.tasksets
    worlds = all(t.reward is None and "gym:" not in t.path for t in sets)  # their workflow scores
    unscored = report.plan.trainer.offline_data is not None or path.parent.name in NO_GOLD or worlds
    gold = {None} if unscored else {1.0}  # what is imitated is not scored
    assert {row.gold_reward for t in report.tasksets for row in t.rows} == gold

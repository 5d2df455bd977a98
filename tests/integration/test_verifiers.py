"""Environments of verifiers (v1) are played and trained on by their own harnesses, in a Python of their
own; skipped where VERIFIERS_PYTHON does not name it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from rft.buffer.experience_export import export
from rft.buffer.query import open_run
from rft.engine.scripted import ScriptedEngine
from rft.launch.execute import execute
from rft.preflight.check import check
from rft.testing import run_workflow_async

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "verifiers"
PYTHON = Path(os.environ.get("VERIFIERS_PYTHON", "no Python"))
LENGTHS = """
import verifiers.v1 as vf

__all__ = ["Lengths"]


class LengthsTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def length(self, trace: vf.Trace) -> float:
        if self.data.prompt == "7":
            raise ValueError("seven cannot be judged")
        return sum((trace.last_reply or "").encode()) / 1000


class Lengths(vf.Taskset[LengthsTask]):
    def load(self):
        for number in range(64):
            yield LengthsTask(vf.TaskData(prompt=str(number)))
"""


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    if not PYTHON.is_file():
        pytest.skip("VERIFIERS_PYTHON names no Python with verifiers: make agents test-agents")
    monkeypatch.chdir(ROOT)


def workflow_args(**changed: Any) -> dict[str, Any]:
    """Return those of the example."""
    plan = check(EXAMPLE / "config.yaml", schema_only=True).plan
    assert plan is not None
    return plan.explorer.tasksets[0].workflow_args | changed


@pytest.mark.parametrize(("answer", "reward"), [("It is 72.", 1.0), ("It is 13.", 0.0)])
async def test_the_example_plays(answer: str, reward: float) -> None:
    engine = ScriptedEngine(answer=lambda messages: answer)
    result = await run_workflow_async(
        "agent_command_workflow",
        {"prompt": "3"},
        engine,
        workflow_args=workflow_args(),
        timeout_s=120,
    )
    (experience,) = result.group.rows
    assert experience.reward == reward and experience.response_text == answer
    (call,) = engine.calls
    assert call.messages[-1]["content"] == "Which is the largest of [72, 13, 59, 65]? End with it."


@pytest.fixture
def lengths(tmp_path: Path) -> dict[str, Any]:
    """Arguments of the workflow for an environment that rewards what a tiny model can do."""
    (tmp_path / "lengths.py").write_text(LENGTHS)
    runtime = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    env = {"taskset": {"id": "lengths"}, "agent": runtime}
    command = [str(PYTHON), str(EXAMPLE / "play.py"), json.dumps(env)]
    return workflow_args(command=command, env={"PYTHONPATH": str(tmp_path)})


async def test_an_environment_that_fails_is_a_failed_run(lengths: dict[str, Any]) -> None:
    result = await run_workflow_async(
        "agent_command_workflow",
        {"prompt": "7"},
        ScriptedEngine(answer=lambda messages: "7"),
        workflow_args=lengths,
        timeout_s=120,
        may_fail=True,
    )
    assert "seven cannot be judged" in result.group.rows[0].reason


def test_it_is_trained_on(lengths: dict[str, Any], tiny_model: Path, tmp_path: Path) -> None:
    config = yaml.safe_load((EXAMPLE / "config.yaml").read_text())
    config["buffer"]["explorer_input"]["taskset"]["workflow_args"] = lengths
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    more = (
        f"model.model_path={tiny_model}",
        f"checkpoint_root_dir={tmp_path / 'runs'}",
        "model.max_prompt_tokens=60",
        "model.max_response_tokens=4",
        "explorer.rollout_model.engine_type=transformers",
        "algorithm.repeat_times=2",
        "buffer.batch_size=2",
        "trainer.total_steps=3",
    )
    run = execute(tmp_path / "config.yaml", list(more), in_process=True).run_dir
    with open_run(run) as questions:
        assert export(questions, tmp_path / "rows.parquet") == 3 * 2 * 2
    rows = pq.read_table(tmp_path / "rows.parquet").to_pylist()
    assert {row["used_step"] for row in rows} == {1, 2, 3}
    assert len({row["reward"] for row in rows}) > 1

"""kill -9 of an engine of the policy and of a reward model in mid-run: both come back, no group is
lost, none has another size.
"""

from __future__ import annotations

from pathlib import Path

import psutil

from rft.monitor.read import read, series
from rft.testing import tiny
from tests.helpers import runs

STEPS = 12


def log(root: Path, name: str) -> str:
    return str((runs.folder(root) / "logs" / f"{name}.log").read_text())


def test_engines_that_are_killed_come_back(tiny_model: Path, tmp_path: Path) -> None:
    judge = tiny.make(tmp_path / "rm", labels=1)
    aux = (
        f"explorer.auxiliary_models=[{{name: rm, model_path: {judge}, task: score, engine_type: "
        f"transformers, cpu_threads: 1}}]"
    )
    arguments = runs.arguments(
        tiny_model,
        tmp_path / "runs",
        *runs.SMALL,
        f"trainer.total_steps={STEPS}",
        "explorer.rollout_model.engine_num=2",
        "explorer.rollout_model.cpu_threads=1",
        "buffer.explorer_input.default_reward_fn_type=reward_model",
        aux,
    )
    run = runs.Run(*arguments)
    run.wait_for("step 3/")
    pids = runs.state(tmp_path / "runs")["parts"]
    assert isinstance(pids, dict)
    psutil.Process(pids["engine-1"]).kill()
    run.wait_for("step 7/")
    psutil.Process(pids["aux-rm-0"]).kill()
    assert run.end() == 0, run.output
    assert "engine 1 was restarted" in log(tmp_path / "runs", "coordinator")
    assert "is brought back" in log(tmp_path / "runs", "explorer")
    ok, found = runs.audit(runs.folder(tmp_path / "runs"))
    assert ok and found["balanced"] and found["used_twice"] == 0, found
    assert found["used"] == STEPS * 4 * 4, found
    records = read(runs.folder(tmp_path / "runs") / "metrics.jsonl")
    assert sum(v for _, v in series(records, "rollout/failed")) == 0
    assert [s for s, _ in series(records, "actor/lr")] == list(range(1, STEPS + 1))

"""kill -9 of everything, Ctrl-C in every phase: nothing lost, nothing trained twice, nothing left,
and the same command goes on.
"""

import psutil
import pytest

from rft.launch import leftovers
from rft.monitor.read import read, series
from tests.helpers import runs

STEPS = ("trainer.total_steps=12", "trainer.save_interval=3")


def test_kill_nine_of_every_process_then_the_same_command(tiny_model, tmp_path):
    before = leftovers.snapshot()
    arguments = runs.arguments(tiny_model, tmp_path, *runs.SMALL, *STEPS)
    run = runs.Run(*arguments)
    run.wait_for("step 7/")
    family = [*runs.parts(runs.state(tmp_path)["run_id"]), psutil.Process(run.process.pid)]
    assert len(family) > 5
    runs.kill(family)
    assert run.end() != 0

    again = runs.Run(*arguments)
    assert again.end() == 0, again.output
    assert "step 12/" in again.output
    ok, found = runs.audit(runs.folder(tmp_path))
    assert ok, found
    assert found["balanced"] and found["used_twice"] == 0
    assert found["used"] == 12 * 4 * 4, found
    steps = [step for step, _ in series(read(runs.folder(tmp_path) / "metrics.jsonl"), "actor/lr")]
    assert steps[-1] == 12 and set(steps) == set(range(1, 13)), (
        "it went on from a checkpoint and did every step"
    )
    assert runs.left(before) == []


@pytest.mark.parametrize(
    "phase", ["starting", pytest.param("exploring", marks=pytest.mark.slow), "training"]
)
def test_ctrl_c(tiny_model, tmp_path, phase):
    before = leftovers.snapshot()
    arguments = runs.arguments(
        tiny_model, tmp_path, *runs.SMALL, *STEPS, "trainer.total_steps=4000"
    )
    run = runs.Run(*arguments)
    run.wait_for({"starting": "watch ", "exploring": "step 1/", "training": "step 4/"}[phase])
    run.interrupt()
    assert run.end() == 130, run.output
    assert "Interrupted" in run.output or "stopped" in run.output
    assert runs.left(before) == []
    assert runs.state(tmp_path)["phase"] == "interrupted"
    if phase == "training":
        ok, found = runs.audit(runs.folder(tmp_path))
        assert ok and found["balanced"] and found["used_twice"] == 0, found


def test_ctrl_c_twice_ends_at_once(tiny_model, tmp_path):
    run = runs.Run(*runs.arguments(tiny_model, tmp_path, *runs.SMALL, "trainer.total_steps=4000"))
    run.wait_for("step 2/")
    run.interrupt()
    run.interrupt()
    assert run.end() == 130, run.output

"""kill -9 of everything, Ctrl-C in every phase: nothing lost, nothing trained twice, nothing left, and the same command goes on."""

import importlib.util
import json
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from rft.launch import leftovers
from rft.monitor.read import read, series

spec = importlib.util.spec_from_file_location("runs", Path(__file__).parents[1] / "integration" / "runs.py")
runs = importlib.util.module_from_spec(spec)
spec.loader.exec_module(runs)

STEPS = ("trainer.total_steps=12", "trainer.save_interval=3")


def audit(root):
    done = subprocess.run(
        [sys.executable, str(runs.ROOT / "scripts" / "audit.py"), str(runs.folder(root)), "--json"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.returncode, json.loads(done.stdout)


def test_kill_nine_of_every_process_then_the_same_command(tiny_model, tmp_path):
    before = leftovers.snapshot()
    arguments = runs.arguments(tiny_model, tmp_path, *runs.SMALL, *STEPS)
    run = runs.Run(*arguments)
    run.wait_for("step 7/")
    family = [*runs.parts(runs.state(tmp_path)["run_id"]), psutil.Process(run.process.pid)]
    assert len(family) > 5
    for process in family:
        with suppress(psutil.NoSuchProcess):  # it went with one that was killed before it
            process.kill()
    assert run.end() != 0

    again = runs.Run(*arguments)
    assert again.end() == 0, again.output
    assert "step 12/" in again.output
    code, found = audit(tmp_path)
    assert code == 0, found
    assert found["balanced"] and found["used_twice"] == 0
    assert found["used"] == 12 * 4 * 4, found
    steps = [step for step, _ in series(read(runs.folder(tmp_path) / "metrics.jsonl"), "actor/lr")]
    assert steps[-1] == 12 and set(steps) == set(range(1, 13)), "it went on from a checkpoint and did every step"
    assert leftovers.compare(before) == []


@pytest.mark.parametrize("phase", ["starting", pytest.param("exploring", marks=pytest.mark.slow), "training"])
def test_ctrl_c(tiny_model, tmp_path, phase):
    before = leftovers.snapshot()
    arguments = runs.arguments(tiny_model, tmp_path, *runs.SMALL, *STEPS, "trainer.total_steps=4000")
    run = runs.Run(*arguments)
    run.wait_for({"starting": "view ", "exploring": "step 1/", "training": "step 4/"}[phase])
    sent = run.interrupt()
    assert run.end(60) == 130, run.output
    assert time.monotonic() - sent < 20
    assert "Interrupted" in run.output or "stopped" in run.output
    assert leftovers.compare(before) == []
    assert runs.state(tmp_path)["phase"] == "interrupted"
    if phase == "training":
        code, found = audit(tmp_path)
        assert code == 0 and found["balanced"] and found["used_twice"] == 0, found


def test_ctrl_c_twice_ends_at_once(tiny_model, tmp_path):
    run = runs.Run(*runs.arguments(tiny_model, tmp_path, *runs.SMALL, "trainer.total_steps=4000"))
    run.wait_for("step 2/")
    run.interrupt()
    sent = run.interrupt()
    assert run.end(60) == 130, run.output
    assert time.monotonic() - sent < 15

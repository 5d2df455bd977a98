"""R2: a raylet or GCS that is stopped or killed is named, and neither it nor Ctrl-C leaves anything."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rft.launch import leftovers
from tests.helpers import runs

STALL_S = 10


@pytest.fixture
def run(tiny_model: Path, tmp_path: Path) -> Iterator[runs.Run]:
    """A run on Ray in the middle; nothing of it may be left."""
    before = leftovers.snapshot()
    started = runs.Run(
        *runs.arguments(tiny_model, tmp_path, *runs.SMALL),
        "trainer.total_steps=4000",
        f"cluster.stall_timeout={STALL_S}",
    )
    started.wait_for("step 2/")
    yield started
    if started.process.poll() is None:
        runs.kill(runs.family(started.process.pid).values())
        started.end()
    assert runs.left(before) == []


def strike(run: runs.Run, name: str, action: signal.Signals) -> psutil.Process:
    process = runs.family(run.process.pid)[name]
    process.send_signal(action)
    return process


@pytest.mark.parametrize(
    ("name", "action", "state"),
    [
        ("raylet", signal.SIGSTOP, "is stopped"),
        ("gcs_server", signal.SIGKILL, "has ended"),
        pytest.param("raylet", signal.SIGKILL, "has ended", marks=pytest.mark.slow),
        pytest.param("gcs_server", signal.SIGSTOP, "is stopped", marks=pytest.mark.slow),
    ],
)
def test_a_failing_ray_ends_the_run_by_name(
    run: runs.Run, tmp_path: Path, name: str, action: signal.Signals, state: str
) -> None:
    process = strike(run, name, action)
    assert run.end(120) == 4, run.output
    assert f"{name} (pid {process.pid}) {state}" in run.output, run.output
    assert "run the same command again" in run.output
    assert runs.state(tmp_path)["phase"] == "failed"
    ok, account = runs.audit(runs.folder(tmp_path))
    assert ok and account["balanced"] and account["used_twice"] == 0, account


@pytest.mark.parametrize(("presses", "limit_s"), [(1, 20.0), (2, 10.0)])
def test_ctrl_c_ends_a_run_whose_raylet_is_stopped(
    run: runs.Run, presses: int, limit_s: float
) -> None:
    strike(run, "raylet", signal.SIGSTOP)
    for _ in range(presses):
        pressed = run.interrupt()
    assert run.end(120) == 130, run.output
    assert time.monotonic() - pressed < limit_s, run.output

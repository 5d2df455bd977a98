"""`mode: train` and `mode: explore` as separate commands on a Ray that they share, in any order,
killed and started again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rft.launch import leftovers
from rft.monitor.read import read, series
from tests.helpers import runs

EXAMPLE = runs.ROOT / "examples" / "two_processes"
START_S = 400  # of three commands on a machine that does other things, too


@pytest.fixture(scope="module")
def cluster() -> Iterator[runs.Cluster]:
    cluster = runs.Cluster()
    yield cluster
    cluster.end()


class Gate:
    """Runs of `gated_workflow` wait at its socket until it is open."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="gate-", dir="/tmp")  # a short name
        self.path = f"{self._folder.name}/socket"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen(4096)
        self._thread = threading.Thread(target=self._let_in, daemon=True)

    @property
    def overrides(self) -> tuple[str, ...]:
        given = "buffer.explorer_input"
        args = f"workflow_args={{socket: {self.path}}}"
        return (
            f"{given}.default_workflow_type=gated_workflow",
            f"{given}.taskset.{args}",
            f"{given}.eval_tasksets.0.{args}",
            f"--plugin-dir={runs.ROOT / 'scripts' / 'plugins'}",
        )

    def open(self) -> None:
        self._thread.start()

    def _let_in(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                connection, _ = self._listener.accept()
                with connection:
                    connection.send(b".")

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        if self._thread.ident is not None:
            self._thread.join()
        self._folder.cleanup()


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.close()


class Job:
    """The commands of one run."""

    def __init__(
        self, launch: Any, cluster: runs.Cluster, model: Path, root: Path, *overrides: str
    ) -> None:
        self._launch = launch
        self._cluster = cluster
        self.root = root
        self._given = (
            f"model.model_path={model}",
            f"checkpoint_root_dir={root}",
            f"cluster.ray_address={cluster.address}",
            "cluster.stall_timeout=null",
            "buffer.batch_size=8",
            *overrides,
        )

    def train(self, *more: str) -> Any:
        return self._launch(
            "run",
            "-c",
            str(EXAMPLE / "train.yaml"),
            *self._given,
            *more,
            **self._cluster.environment,
        )

    def explore(self, name: str, *more: str) -> Any:
        given = (*self._given, f"explorer.name={name}", *more)
        return self._launch(
            "run", "-c", str(EXAMPLE / "explore.yaml"), *given, **self._cluster.environment
        )

    @property
    def folder(self) -> Path:
        return self.root / "rft" / "examples" / "two_processes"

    def log(self, name: str = "coordinator") -> str:
        return (self.folder / "logs" / f"{name}.log").read_text()

    def wait_for_explorers(self, *names: str) -> None:
        """Until all of them have joined the trainer."""
        wanted = [f"explorer {name} on" for name in names]
        path = self.folder / "logs" / "coordinator.log"
        deadline = time.monotonic() + START_S
        while not (path.exists() and all(text in self.log() for text in wanted)):
            assert time.monotonic() < deadline, f"not all of {names} have joined within {START_S} s"
            time.sleep(0.1)

    def balanced(self) -> str:
        done = subprocess.run(
            [sys.executable, str(runs.ROOT / "scripts" / "audit.py"), str(self.folder)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def within_bound(self, steps: int, bound: int = 2) -> None:
        found = dict(series(read(self.folder / "metrics.jsonl"), "experience/staleness/max"))
        assert set(found) == set(range(1, steps + 1)) and max(found.values()) <= bound


def parts_left() -> list[str]:
    """Processes of any run of this test session; the Ray itself is nobody's run."""
    mark = os.environ.get(leftovers.MARK)
    found = []
    for process in psutil.process_iter():
        try:
            environment = process.environ()
        except psutil.Error:
            continue
        if leftovers.RUN_ID in environment and environment.get(leftovers.MARK) == mark:
            found.append(f"{process.pid} {process.name()}")
    return found


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("method", "engine"),
    [
        ("memory", "transformers"),
        ("nccl", "transformers"),
        pytest.param("nccl", "vllm", marks=pytest.mark.slow),
    ],
)
def test_an_explorer_before_and_one_after_the_trainer(
    method, engine, launch, cluster, gate, tiny_model, tmp_path
):
    """No run is played before both explorers are there, however long one takes to start."""
    way = (f"synchronizer.sync_method={method}", f"explorer.rollout_model.engine_type={engine}")
    job = Job(
        launch,
        cluster,
        tiny_model,
        tmp_path,
        "trainer.total_steps=8",
        "explorer.eval_interval=4",
        *way,
        *gate.overrides,
    )
    early = job.explore("early")
    early.wait_for("watch rft status", START_S)
    trainer = job.train()
    late = job.explore("late")
    job.wait_for_explorers("early", "late")
    gate.open()
    codes = [x.end(START_S) for x in (trainer, early, late)]
    assert codes == [0, 0, 0], f"{trainer.output}\n{early.output}\n{late.output}"
    assert "acked 512 = used 512" in job.balanced()  # 8 steps x 8 tasks x 8 runs
    job.within_bound(8)
    log = job.log()
    assert (
        "explorer early on" in log and "explorer late on" in log and log.count("explore batch") == 8
    )
    assert sorted(p.name for p in (job.folder / "explorers").iterdir()) == ["early", "late"]
    evaluated = [
        step for step, _ in series(read(job.folder / "metrics.jsonl"), "eval/copy_eval/mean@1")
    ]
    assert evaluated[-1] == 8 and len(evaluated) == len(set(evaluated))
    assert parts_left() == []


@pytest.mark.timeout(1800)
def test_another_configuration_is_refused_with_what_differs(launch, cluster, tiny_model, tmp_path):
    job = Job(launch, cluster, tiny_model, tmp_path, "trainer.total_steps=8")
    trainer = job.train()
    other = job.explore(
        "other", "seed=7", "synchronizer.max_staleness=4", "explorer.max_concurrent_runs=3"
    )
    assert other.end(START_S) == 2
    assert "seed: is 7 here and 42 in the process that trains" in other.output
    assert (
        "synchronizer.max_staleness: is 4 here and 2" in other.output
        and "max_concurrent_runs" not in other.output
    )
    trainer.wait_for("watch rft status", START_S)
    trainer.interrupt()
    assert trainer.end(START_S) == 130


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_an_explorer_is_killed_and_started_again(launch, cluster, tiny_model, tmp_path):
    """It is the only one, so the trainer waits for it."""
    more = ("explorer.eval_interval=1000", "synchronizer.sync_method=nccl")
    job = Job(launch, cluster, tiny_model, tmp_path, "trainer.total_steps=25", *more)
    trainer = job.train()
    killed = job.explore("only")
    killed.wait_for("step 3/", START_S)
    os.kill(killed.process.pid, signal.SIGKILL)
    killed.end(START_S)
    again = job.explore("only")
    codes = [x.end(START_S) for x in (trainer, again)]
    assert codes == [0, 0], f"{trainer.output}\n{again.output}"
    log = job.log()
    assert "explorer only is gone" in log and log.count("has joined") == 2
    assert ("are assigned again" in log) == (", again" in log), (
        "whether it had a batch when it was killed is chance"
    )
    assert "acked 1600 = used 1600" in job.balanced()  # 25 steps x 8 tasks x 8 runs
    job.within_bound(25)
    assert parts_left() == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_an_engine_of_an_explorer_is_killed_while_it_receives_a_broadcast(
    launch, tiny_model, tmp_path
):
    """It dies at the 85th tensor, in the last of five versions of 20 each; one that joined in time
    for all five dies with it.
    """
    cluster = runs.Cluster(RFT_FAULT="sync.received:85=kill")
    try:
        way = (
            "synchronizer.sync_method=nccl",
            "synchronizer.nccl.bucketed_broadcast=false",
            "synchronizer.sync_style=fixed",
        )
        job = Job(
            launch,
            cluster,
            tiny_model,
            tmp_path,
            *way,
            "synchronizer.sync_interval=1",
            "trainer.total_steps=4",
        )
        one = job.explore("one")
        other = job.explore("other")
        trainer = job.train()
        codes = [x.end(START_S) for x in (trainer, one, other)]
    finally:
        cluster.end()
    assert codes == [0, 0, 0], f"{trainer.output}\n{one.output}\n{other.output}"
    told = job.log()
    assert (
        "version 1:4: engine" in told
        and "was restarted" in told
        and "no problems" in job.balanced()
    )
    job.within_bound(4)
    assert parts_left() == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_trainer_is_killed_and_all_are_started_again(launch, cluster, tiny_model, tmp_path):
    job = Job(
        launch, cluster, tiny_model, tmp_path, "trainer.total_steps=40", "trainer.save_interval=5"
    )
    trainer = job.train()
    explorer = job.explore("only")
    trainer.wait_for("step 12/", START_S)
    os.kill(trainer.process.pid, signal.SIGKILL)
    trainer.end(START_S)
    assert explorer.end(START_S) == 4 and "has ended" in explorer.output, explorer.output
    assert parts_left() == []
    explorer = job.explore("only")
    trainer = job.train()
    assert [x.end(START_S) for x in (trainer, explorer)] == [0, 0], (
        f"{trainer.output}\n{explorer.output}"
    )
    assert "no problems" in job.balanced()
    job.within_bound(40)

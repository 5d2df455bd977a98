"""kill -9 of anything, at random moments of a run with agents in runtimes: nothing is lost, and nothing
is left.
"""

from __future__ import annotations

import json
import random
import subprocess
import threading
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import psutil
import pytest

from rft.extras.sandbox.local_runtime import MachineDriver
from rft.extras.sandbox.processes import SandboxUnavailable
from rft.launch import leftovers
from rft.testing import tiny
from rft.types.runtimes import RuntimeSpec
from tests.extras.sandbox import containers
from tests.helpers import copy_folders, runs

TINY = runs.ROOT / "tests" / "integration" / "tiny_config.yaml"
KILLS = 20
# what the run survives, then what ends it
INSIDE = ("agent", "runtime", "engine")
PARTS = (*INSIDE, "trainer", "buffer", "explorer", "command")


def _found(part: str, run: runs.Run, run_id: object) -> list[psutil.Process]:
    command = psutil.Process(run.process.pid)
    if part == "command":
        return [command]
    if part not in ("agent", "runtime"):
        return [p for p in runs.parts(run_id) if runs.role(p) == part]
    own = command.children(recursive=True)
    explorers = [p for p in own if runs.role(p) == "explorer"]
    for monitor in (m for e in explorers for m in _marked(f"rft-{e.pid}-", psutil.process_iter())):
        own += [monitor, *_below(monitor)]
    return _marked("/root/agent.py", own) if part == "agent" else _runtimes(own)


def _below(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _runtimes(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those of this checkout's rft, and monitors of containers."""
    rooms = [p for p in _marked("local_room", processes) if str(runs.ROOT) in _line(p)]
    return [*rooms, *(p for p in processes if _line(p).split(" ")[0].endswith("conmon"))]


def _marked(mark: str, processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    return [p for p in processes if mark in _line(p)]


def _line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("sandbox", ["local", "container"])
def test_twenty_kills_lose_nothing_and_leave_nothing(
    sandbox: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        MachineDriver().start(RuntimeSpec()).kill()
    except SandboxUnavailable as e:
        pytest.skip(str(e))
    image = "x"
    if sandbox == "container":
        engine = containers.command(monkeypatch)
        image = containers.image(engine, tmp_path)
    before = leftovers.snapshot()
    taskset = copy_folders.write(tmp_path / "tasks", "train", tiny.copy_tasks(n=64), image=image)
    taskset["workflow_args"]["sandbox"] = sandbox
    arguments = [
        *("run", "-c", str(copy_folders.config(tmp_path, TINY, taskset))),
        *(f"model.model_path={tiny_model}", f"checkpoint_root_dir={tmp_path}"),
        *("trainer.total_steps=4000", "trainer.save_interval=1", "buffer.total_epochs=1000"),
    ]
    folder = tmp_path / "project" / "group" / "name"
    dice = random.Random(0)
    over = threading.Event()
    killed: Counter[str] = Counter()
    run = runs.Run(*arguments)
    while killed.total() < KILLS:
        run.wait_for("step ", 600)
        over.wait(dice.uniform(0, 5))
        assert run.process.poll() is None, run.output
        part = PARTS[killed.total() % len(PARTS)]
        there = _found(part, run, json.loads((folder / "state.json").read_text())["run_id"])
        if not there:
            continue
        runs.kill([dice.choice(there)])
        killed[part] += 1
        if part not in INSIDE:
            assert run.end(180) != 0
            run = runs.Run(*arguments)
    run.wait_for("step ", 600)
    run.interrupt()
    run.end(120)
    ok, found = runs.audit(folder)
    print(f"{dict(killed)} killed, audit {found}")
    assert ok and found["balanced"] and found["used_twice"] == 0, found
    assert found["used"] > 0
    assert runs.left(before) == []
    assert _runtimes(list(psutil.process_iter())) == []
    if sandbox == "container":
        line = [*engine, "ps", "--all", "--quiet", "--filter", "name=rft-"]
        assert subprocess.run(line, capture_output=True, check=True, text=True).stdout == ""

"""kill -9 at random moments of a run whose agents are in runtimes, and of its processes."""

from __future__ import annotations

import contextlib
import json
import random
import re
import subprocess
import tempfile
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from rft.launch import leftovers
from rft.testing import tiny
from tests.extras.sandbox import copy_folders
from tests.helpers import runs

TINY = runs.ROOT / "tests" / "integration" / "tiny_config.yaml"
INSIDE = ("agent", "first process", "monitor", "engine")  # the run survives these
PARTS = ("explorer", *INSIDE, "everything", "command", "trainer", "buffer")
STEP_S = 600.0
STARTS = 5
MANY = 4000  # steps of a run that is killed
_CONTAINER = re.compile(r"rft-\d+-\d+-")
MOST_S = 6.0  # between a step of the run and the kill


@dataclass
class Killed:
    """What happened; `left`: processes, containers and files after the same command's last run."""

    parts: Counter[str] = field(default_factory=Counter)
    lives: int = 1
    balanced: bool = False
    acknowledged: int = 0
    used: int = 0
    used_twice: int = 0
    left: list[str] = field(default_factory=list)


def play(
    folder: Path, *, kills: int, sandbox: str, engine: Sequence[str] = (), seed: int = 0
) -> Killed:
    """Kill `kills` processes, part by part; start the run again where it ended; let it finish.

    `engine`: the container engine's command, for `sandbox: container`.
    """
    model = tiny.make(folder / "model")
    taskset = copy_folders.write(folder / "tasks", "train", tiny.copy_tasks(n=64))
    taskset["workflow_args"]["sandbox"] = sandbox
    arguments = [
        *("run", "-c", str(copy_folders.config(folder, TINY, taskset))),
        *(f"model.model_path={model}", f"checkpoint_root_dir={folder}"),
        *("trainer.save_interval=1", "buffer.total_epochs=1000", "buffer.batch_size=1"),
    ]
    run_dir = folder / "project" / "group" / "name"
    before = leftovers.snapshot()
    files = _files()
    held = _containers(engine) if engine else set()
    dice = random.Random(seed)
    killed = Killed()
    run = _started(arguments, MANY)
    while killed.parts.total() < kills:
        threading.Event().wait(dice.uniform(0, MOST_S))
        assert run.process.poll() is None, run.output
        part = PARTS[killed.parts.total() % len(PARTS)]
        processes = _found(part, run, run_dir)
        if part != "everything" and processes:
            processes = [dice.choice(processes)]
        if not _kill(processes):
            continue  # it had just ended
        killed.parts[part] += 1
        if part not in INSIDE:
            assert run.end(STEP_S) != 0, run.output
            killed.lives += 1
            run = _started(arguments, MANY)
    run.interrupt()
    run.end(STEP_S)
    last = max(int(step) for step in re.findall(r"(?m)^step (\d+)/", run.output))
    run = _started(arguments, last + 2)
    assert run.end(STEP_S) == 0, run.output
    ok, counted = runs.audit(run_dir)
    killed.balanced = ok and bool(counted["balanced"])
    killed.acknowledged = counted["acked"]
    killed.used = counted["used"]
    killed.used_twice = counted["used_twice"]
    killed.left = [*runs.left(before), *(f"file {path}" for path in sorted(_files() - files))]
    killed.left += [f"process {' '.join(_line(p))}" for p in _monitors(psutil.process_iter())]
    if engine:
        killed.left += [f"container {name}" for name in sorted(_containers(engine) - held)]
    return killed


def _started(arguments: Sequence[str], steps: int) -> runs.Run:
    """Return a run that has made a step; where Ray came up too late for itself, start it again."""
    for attempt in range(1, STARTS + 1):
        run = runs.Run(*arguments, f"trainer.total_steps={steps}")
        try:
            run.wait_for(f"/{steps}  ", STEP_S)
            break
        except AssertionError:
            if attempt == STARTS or "timed out during startup" not in run.output:
                raise
    return run


def _found(part: str, run: runs.Run, run_dir: Path) -> list[psutil.Process]:
    """Return the processes of a part: of a runtime, of the run on Ray, or all."""
    command = psutil.Process(run.process.pid)
    run_id = json.loads((run_dir / "state.json").read_text())["run_id"]
    if part == "command":
        return [command]
    if part not in ("everything", *INSIDE[:3]):
        return [p for p in runs.parts(run_id) if runs.role(p) == part]
    family = [command, *_below(command)]
    monitors = _monitors(family)  # the run adopts Podman's
    inside = [child for p in monitors for child in _below(p)]
    if part == "everything":
        return [*family, *monitors, *inside]
    if part == "monitor":
        return monitors
    if part == "agent":
        return [p for p in inside if "/root/agent.py" in _line(p)]
    return [p for p in inside if p.ppid() in {m.pid for m in monitors} and _is_first(p)]


def _monitors(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Return the processes that hold a runtime: Podman's, or a room of this checkout's rft."""
    found = []
    for process in processes:
        line = _line(process)
        of_room = "local_room" in " ".join(line) and str(runs.ROOT) in line
        of_podman = any(map(_CONTAINER.match, line)) and line[0].endswith("conmon")
        if (of_podman or of_room) and not _is_first(process):
            found.append(process)
    return found


def _is_first(process: psutil.Process) -> bool:
    """Return whether it is the first process of a runtime's process space."""
    line = " ".join(_line(process))
    parent = _line(process.parent()) if "local_room" in line else []
    return "exec 3<&0" in line or "local_room" in " ".join(parent)


def _kill(processes: Sequence[psutil.Process]) -> int:
    """Return how many were there."""
    count = 0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
            count += 1
    return count


def _below(process: psutil.Process) -> list[psutil.Process]:
    """Return the descendants, without a look at any other process: an agent is soon gone."""
    found = []
    for children in Path(f"/proc/{process.pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for pid in children.read_text().split():
                with contextlib.suppress(psutil.NoSuchProcess):
                    child = psutil.Process(int(pid))
                    found += [child, *_below(child)]
    return found


def _line(process: psutil.Process | None) -> list[str]:
    try:
        return process.cmdline() if process else []
    except psutil.Error:
        return []


def _files() -> set[str]:
    return {str(path) for path in Path(tempfile.gettempdir()).iterdir()}


def _containers(engine: Sequence[str]) -> set[str]:
    """Return the names of containers and snapshots, also of what the engine has half made."""
    names = []
    for words in (["ps", "--all", "--external"], ["images"]):
        column = "{{.Repository}}" if words == ["images"] else "{{.Names}}"
        line = [*engine, *words, "--format", column]
        names += subprocess.run(line, capture_output=True, check=True, text=True).stdout.split()
    return {name for name in names if name != "localhost/rft-task"}  # kept for other runs

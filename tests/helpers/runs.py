"""Starting `rft` as a person does, for tests: a real process with its own run folder."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import psutil

from rft.buffer.audit import as_json, audit_run
from rft.launch import leftovers
from rft.launch.ray_calls import title_of

ROOT = Path(__file__).parents[2]
TINY = ROOT / "examples" / "tiny" / "config.yaml"
SMALL = (  # three quick steps
    "buffer.batch_size=4",
    "algorithm.repeat_times=4",
    "explorer.eval_on_startup=false",
    "explorer.eval_interval=1000",
)


def left(before: leftovers.Snapshot) -> list[str]:
    """What is left of everything that came after `before`; empty = clean.

    Semaphores have no owner's name.  Beside other workers of pytest-xdist, which kill programs too,
    they are looked for at the end alone.
    """
    alone = "PYTEST_XDIST_WORKER" not in os.environ
    return [line for line in leftovers.compare(before) if alone or "/sem.mp-" not in line]


class Run:
    """One `rft` process; its lines are kept while it runs, and can be waited for.  `within`: a
    command that runs it.
    """

    def __init__(
        self, *arguments: str, env: dict[str, str] | None = None, within: Sequence[str] = ()
    ) -> None:
        self.lines: list[str] = []
        self._news = threading.Condition()
        self.process = subprocess.Popen(
            [*within, sys.executable, "-m", "rft.cli.main", *arguments],
            cwd=ROOT,
            env={**os.environ, **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._news:
                self.lines.append(line)
                self._news.notify_all()
        with self._news:
            self._news.notify_all()

    def wait_for(self, text: str, timeout_s: float = 180) -> None:
        """Until a line contains `text`; fails with everything printed if the process ends first."""
        with self._news:
            seen = self._news.wait_for(
                lambda: any(text in line for line in self.lines) or not self._reader.is_alive(),
                timeout_s,
            )
            assert seen and any(text in line for line in self.lines), (
                f"no {text!r} within {timeout_s} s in:\n{self.output}"
            )

    def end(self, timeout_s: float = 800) -> int:
        """The exit code.  One that takes longer is killed, and its parts with it."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        self._reader.join(120)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code

    def interrupt(self) -> float:
        """Ctrl-C, as a terminal sends it: to the whole process group.  Returns when it was sent
        (monotonic seconds).
        """
        os.killpg(self.process.pid, signal.SIGINT)
        return time.monotonic()

    @property
    def output(self) -> str:
        return "".join(self.lines)


class Ray:
    """A node of Ray, as a person starts one.  `within`: a command that runs it."""

    def __init__(self, *options: str, env: dict[str, str], within: Sequence[str] = ()) -> None:
        command = [
            *within,
            sys.executable,
            "-m",
            "ray.scripts.scripts",
            "start",
            "--num-cpus=8",
            "--block",
            *options,
        ]
        for _ in range(3):  # Ray waits only 30 s for its own processes
            self.process = subprocess.Popen(
                command,
                env={**os.environ, **env},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
            assert self.process.stdout is not None
            said = []
            for line in self.process.stdout:
                said.append(line)
                if "Ray runtime started" in line:
                    return
            self._end_session()
            if "timed out during startup" not in "".join(said):
                break
        raise AssertionError("".join(said))

    def _end_session(self) -> None:
        """End what a failed start left, which is no child of it any more."""
        left = [
            p
            for p in psutil.process_iter()
            if p.pid != self.process.pid and _session(p) == self.process.pid
        ]
        for process in left:
            process.kill()
        psutil.wait_procs(left, timeout=20)
        self.process.wait(60)

    def end(self) -> None:
        family = psutil.Process(self.process.pid).children(recursive=True)
        self.process.terminate()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.process.wait(60)
        _, alive = psutil.wait_procs(family, timeout=20)
        for process in alive:
            process.kill()
        psutil.wait_procs(alive, timeout=20)


def _session(process: psutil.Process) -> int | None:
    try:
        return os.getsid(process.pid)
    except ProcessLookupError:
        return None


def ray_environment() -> dict[str, str]:
    """Of a Ray that several commands share, and of these commands."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(16),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_enable_worker_prestart": "0",
        "PYTHONPATH": str(ROOT),
    }


class Cluster:
    """A Ray with a token on loopback, as a person starts one."""

    def __init__(self, **environment: str) -> None:
        """`environment`: of all processes that it starts."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.address = f"127.0.0.1:{port}"
        self.environment = {**ray_environment(), "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
        self._folder = tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp")
        options = (
            "--head",
            f"--port={port}",
            "--node-ip-address=127.0.0.1",
            "--include-dashboard=false",
        )
        more = ("--object-store-memory=100000000", f"--temp-dir={self._folder.name}")
        self._ray = Ray(*options, *more, env={**self.environment, **environment})

    def end(self) -> None:
        self._ray.end()
        self._folder.cleanup()


def arguments(model: Path, root: Path, *overrides: str) -> list[str]:
    """`rft run` of the tiny example in `root`."""
    return [
        "run",
        "-c",
        str(TINY),
        f"model.model_path={model}",
        f"checkpoint_root_dir={root}",
        *overrides,
    ]


def parity(root: Path) -> str:
    """Of an override: a reward that half of all answers earn from the first step on, so that every
    step moves the weights.
    """
    reward = (
        "def parity(task, transcript):\n    return float(sum(transcript.answer.encode()) % 2)\n"
    )
    (root / "parity.py").write_text(reward)
    return f"buffer.explorer_input.default_reward_fn_type={root / 'parity.py'}:parity"


def folder(root: Path) -> Path:
    return root / "rft" / "examples" / "tiny"


def state(root: Path) -> dict[str, object]:
    return dict(json.loads((folder(root) / "state.json").read_text()))


def audit(run: Path) -> tuple[bool, dict[str, Any]]:
    """Whether the account of a run balances by its files alone, and what was counted."""
    found = audit_run(run)
    return found.ok, json.loads(as_json(found))


def kill(processes: Iterable[psutil.Process]) -> None:
    """kill -9 of all of them."""
    for process in processes:
        # it went with one that was killed before it
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def parts(run_id: object) -> list[psutil.Process]:
    """Every living process that the run started."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("RFT_RUN_ID") == run_id:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


def role(process: psutil.Process) -> str:
    """Which part of a run on Ray it is, as its title says: engine, explorer, buffer, trainer,
    coordinator, aux; empty if none.
    """
    try:
        found = re.match(
            r"ray::(engine|explorer|buffer|trainer|coordinator|aux)", " ".join(process.cmdline())
        )
    except psutil.Error:
        return ""
    return found[1] if found else ""


def family(command: int) -> dict[str, psutil.Process]:
    """The living processes of a run on a Ray of its own by name: command, parts, Ray's, and vLLM's
    engine core.
    """
    me = psutil.Process(command)
    found = {"command": me}
    for process in me.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            line = " ".join(process.cmdline())
            core = "engine core" if process.name().startswith("VLLM::Engine") else ""
            part = re.match(r"ray::(engine|explorer|buffer|trainer|coordinator)_?\d*\b", line)
            if name := title_of(process) or core or (part[1] if part else ""):
                found.setdefault(name, process)
    return found

"""Starting `rft` as a person does, for tests: a real process with its own run folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
TINY = ROOT / "examples" / "tiny" / "config.yaml"
SMALL = (  # three quick steps
    "buffer.batch_size=4",
    "algorithm.repeat_times=4",
    "explorer.eval_on_startup=false",
    "explorer.eval_interval=1000",
)


class Run:
    """One `rft` process; its lines are kept while it runs, and can be waited for."""

    def __init__(self, *arguments: str, env: dict[str, str] | None = None) -> None:
        self.lines: list[str] = []
        self._news = threading.Condition()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rft.cli.main", *arguments],
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
            seen = self._news.wait_for(lambda: any(text in line for line in self.lines) or not self._reader.is_alive(), timeout_s)
            assert seen and any(text in line for line in self.lines), f"no {text!r} within {timeout_s} s in:\n{self.output}"

    def end(self, timeout_s: float = 240) -> int:
        """The exit code.  One that takes longer is killed, and its parts with it."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        self._reader.join(10)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code

    def interrupt(self) -> float:
        """Ctrl-C, as a terminal sends it: to the whole process group.  Returns when it was sent (monotonic seconds)."""
        os.killpg(self.process.pid, signal.SIGINT)
        return time.monotonic()

    @property
    def output(self) -> str:
        return "".join(self.lines)


def arguments(model: Path, root: Path, *overrides: str) -> list[str]:
    """`rft run` of the tiny example in `root`."""
    return ["run", "-c", str(TINY), f"model.model_path={model}", f"checkpoint_root_dir={root}", *overrides]


def folder(root: Path) -> Path:
    return root / "rft" / "examples" / "tiny"


def state(root: Path) -> dict[str, object]:
    return dict(json.loads((folder(root) / "state.json").read_text()))


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

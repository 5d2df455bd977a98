"""The folder of a run: its lock, its state and its paths.

Invariants: one process at a time owns a run folder; its files are written atomically; only the
run's user may read it.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from rft.errors import ConfigError, Interrupted, SetupError
from rft.files.disk import full, is_full, read_regular, write_whole
from rft.files.strict_json import parse_json
from rft.launch.leftovers import began
from rft.secrets import redact

STATE = "state.json"
MAX_STATE = 16 << 20
ENDED = ("done", "failed", "interrupted")  # phases
_TIMES = ("time", "started", "before_s")
INTERRUPTED = "stopped on request; run the same command again to resume from the last checkpoint"
PRIVATE = 0o077  # umask of every process of a run


class RunDir:
    """A run folder, locked by this process while the object is open."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run_id = uuid.uuid4().hex[:12]  # id of the processes that this process starts
        self._started = time.time()
        self._before_s = 0.0  # work time of earlier processes of the run
        self._how: dict[str, str] = {}
        self._lock: int | None = None
        self._umask = -1  # earlier umask, while the folder is locked

    @classmethod
    def claim(cls, path: Path) -> Self:
        """Create the folder and lock it.  Raises SetupError naming its owner or the disk error."""
        run = cls(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            path.chmod(0o700)
            run._umask = os.umask(PRIVATE)
            run.logs.mkdir(exist_ok=True)
            run._lock = os.open(run.lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(run._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(run._lock, 0)
            os.pwrite(run._lock, f"{os.getpid()} {began(os.getpid())}".encode(), 0)
        except BlockingIOError:
            run._unlock()
            holder, *_ = run.lock_file.read_text().split() or ["unknown"]
            raise SetupError(
                f"run folder {path} is in use by process {holder}. Wait for it, stop it, or give "
                f"this run another `name`."
            ) from None
        except OSError as e:
            run._unlock()
            if is_full(e):
                raise full(e, str(run.lock_file)) from e
            raise SetupError(
                f"run folder {path} cannot be written: {e.strerror}. Choose another "
                f"checkpoint_root_dir."
            ) from e
        return run

    def release(self) -> None:
        try:
            if self._lock is not None:
                os.ftruncate(self._lock, 0)
        finally:
            self._unlock()

    def _unlock(self) -> None:
        if self._umask >= 0:
            os.umask(self._umask)
            self._umask = -1
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @property
    def lock_file(self) -> Path:
        return self.path / ".lock"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def state(self, phase: str, **facts: Any) -> None:
        """Write the state of the run, for `rft status`."""
        me = {
            "pid": os.getpid(),
            "began": began(os.getpid()),
            "node": os.uname().nodename,
            "folder": self.path.stat().st_ino,
        }
        start = {"started": self._started, "before_s": self._before_s, **self._how}
        write_json(
            self.path / STATE,
            {"phase": phase, **me, **start, "time": time.time(), "run_id": self.run_id, **facts},
        )

    def goes_on(self, command: str) -> None:
        """Record that this process, started by `command`, continues the run.

        Raises like `read_state`.
        """
        before = self.read_state()
        self._how = {"command": command, "cwd": str(Path.cwd())}
        self._before_s = float(before.get("before_s", 0.0)) + max(
            0.0, self.last_sign(before) - before.get("started", math.inf)
        )

    def last_sign(self, state: Mapping[str, Any]) -> float:
        """Return when the process that wrote `state` last worked, in seconds since the epoch.

        That is its recorded end, else the change of its newest file.
        """
        if state.get("phase") in ENDED:
            return float(state.get("time", 0.0))
        files = (self.path / STATE, self.path / "metrics.jsonl", *self.logs.rglob("*.log"))
        return max((f.stat().st_mtime for f in files if f.exists()), default=0.0)

    def worked_s(self, state: Mapping[str, Any]) -> float | None:
        """Return the work time of the run's processes, without pauses; None if unknown."""
        if "started" not in state:
            return None
        ends = time.time() if self.phase(state)[1] is not None else self.last_sign(state)
        return float(state.get("before_s", 0.0)) + max(0.0, ends - float(state["started"]))

    @contextmanager
    def record_outcome(self) -> Iterator[None]:
        """Write how the run in the block failed or was interrupted, and release the folder."""
        try:
            yield
        except (Interrupted, KeyboardInterrupt):
            self._ended("interrupted", INTERRUPTED)
            raise
        except BaseException as e:
            self._ended("failed", f"{type(e).__name__}: {e}")
            raise
        finally:
            self.release()

    def _ended(self, phase: str, reason: str) -> None:
        """Write the end; if that fails, keep the run's own error."""
        try:
            self.state(phase, reason=reason)
        except OSError as e:
            print(
                f"{self.path / STATE} does not say how the run ended: {e.strerror}", file=sys.stderr
            )

    def read_state(self) -> dict[str, Any]:
        """Read the last state; empty without a file.  Raises ConfigError for a damaged file."""
        file = self.path / STATE
        try:
            state = parse_json(read_regular(file, MAX_STATE).decode("utf-8"))
            if not isinstance(state, dict) or not all(
                isinstance(state.get(n, 0.0), int | float) for n in _TIMES
            ):
                raise ValueError("it is not what a run has written")
            if not isinstance(parts := state.get("parts", {}), dict) or not all(
                type(pid) is int for pid in parts.values()
            ):
                raise ValueError("its parts are not what a run has written")
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as e:
            raise ConfigError(
                f"{file} is damaged: {e}; remove it: a run resumes from its checkpoints without it"
            ) from None
        return state

    def phase(self, state: Mapping[str, Any]) -> tuple[str, int | None]:
        """Return (phase, pid of the owner here or None); "died" if its process ended unrecorded."""
        me = os.uname().nodename
        phase = str(state.get("phase", "unknown"))
        here = state.get("node", me) == me
        holder = self._holder() if here else None
        ended = holder is None if here else not self._locked()
        return "died" if ended and phase in (
            "starting",
            "waiting for the trainer",
            "running",
            "stopping",
        ) else phase, holder

    def copied_from_one_that_lives(self, state: Mapping[str, Any]) -> bool:
        """Return whether the writer of `state` lives, which makes this folder a copy."""
        if state.get("node", os.uname().nodename) != os.uname().nodename:
            return state.get("folder") != self.path.stat().st_ino
        return state.get("pid") != os.getpid() and lives(state.get("pid"), state.get("began"))

    def _holder(self) -> int | None:
        """Return the living process named in the lock file, or None.

        Trying the lock itself could make a run fail that starts at this moment.
        """
        try:
            pid, since = (*map(int, self.lock_file.read_text().split()), None, None)[:2]
        except (FileNotFoundError, ValueError):
            return None
        return pid if lives(pid, since) else None

    def _locked(self) -> bool:
        """Return whether a process of another machine has the lock; True if unknown."""
        try:
            with self.lock_file.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as e:
            return not isinstance(e, FileNotFoundError)
        return False


def lives(pid: object, since: int | None) -> bool:
    """Return whether process `pid`, which `began` at `since` (None: unknown), is alive."""
    if not isinstance(pid, int):
        return False
    start = began(pid)
    return start is not None and since in (None, start)


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically, with secrets redacted."""
    write_whole(path, redact(json.dumps(value, indent=1, default=str)))

"""The folder of a run: who owns it, what it holds, where it can go on from.

Invariant: one process at a time owns a run folder; everything in it is written aside and renamed, so a reader never sees half a file.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path
from typing import Any, Self

from rft.errors import SetupError
from rft.logs import redact


class RunDir:
    """A run folder, locked by this process while the object is open."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run_id = ""  # of the processes that this run started
        self._lock: int | None = None

    @classmethod
    def claim(cls, path: Path) -> Self:
        """Create the folder if need be and lock it.  Raises SetupError naming the process that holds it, or why it cannot be written."""
        run = cls(path)
        try:
            run.logs.mkdir(parents=True, exist_ok=True)
            run._lock = os.open(run.lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as e:
            raise SetupError(f"run folder {path} cannot be written: {e.strerror}. Choose another checkpoint_root_dir.") from e
        try:
            fcntl.flock(run._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = run.lock_file.read_text().strip() or "unknown"
            os.close(run._lock)
            raise SetupError(
                f"run folder {path} is in use by process {holder}. Wait for it, stop it, or give this run another `name`."
            ) from None
        os.ftruncate(run._lock, 0)
        os.pwrite(run._lock, str(os.getpid()).encode(), 0)
        return run

    def release(self) -> None:
        if self._lock is not None:
            os.ftruncate(self._lock, 0)
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
        """What the run is doing, for `rft status`."""
        write_json(
            self.path / "state.json", {"phase": phase, "pid": os.getpid(), "time": time.time(), "run_id": self.run_id, **facts}
        )

    def read_state(self) -> dict[str, Any]:
        try:
            return dict(json.loads((self.path / "state.json").read_text()))
        except FileNotFoundError:
            return {}


def write_json(path: Path, value: Any) -> None:
    """Written aside, fsynced, renamed; secrets redacted."""
    text = redact(json.dumps(value, indent=1, default=str))
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with aside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    aside.rename(path)

"""The folder of the run that rewards are called for, for those that keep a file there.  None
outside of a run.
"""

from __future__ import annotations

from contextvars import ContextVar
from pathlib import Path

run_folder: ContextVar[Path | None] = ContextVar("run_folder", default=None)

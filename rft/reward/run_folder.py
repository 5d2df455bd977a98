"""The folder of the current run, for rewards that keep files there; None outside a run."""

from __future__ import annotations

from contextvars import ContextVar
from pathlib import Path

run_folder: ContextVar[Path | None] = ContextVar("run_folder", default=None)

"""`rft` called as a person calls it, inside this process: what it prints and its exit code.  For
tests.

Importing torch costs a process more than a tiny run does, so tests that need no process of their
own share theirs. Independent of the commands.  Not for Ctrl-C: the program ends its process then.
"""

from __future__ import annotations

import contextlib
import io
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rft.cli.main import main
from rft.plugins import REGISTRY


@dataclass(frozen=True)
class Done:
    """How a call ended.  `output` is everything printed, both streams in order."""

    code: int
    output: str
    cpu_s: float  # seconds of computing, so that it does not matter what else the machine does


def rft(*arguments: Any) -> Done:
    """`rft ARGUMENTS`, e.g. rft("run", "-c", path, "seed=1")."""
    out = io.StringIO()
    began = time.process_time()
    code = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            main([str(a) for a in arguments])
        except SystemExit as e:
            code = e.code if isinstance(e.code, int) else int(e.code is not None)
    return Done(code, out.getvalue(), time.process_time() - began)


def forget_plugins(folder: Path) -> None:
    """Plugins that were loaded from below `folder` are not there for the tests that follow."""
    for key, plugin in list(REGISTRY._plugins.items()):
        if plugin.source.startswith(str(folder)):
            del REGISTRY._plugins[key]

"""pytest plugin: a test session that leaves a process, shared memory, a temporary folder or an open
listener behind fails.

Everything the session starts inherits a mark, so what other people run on the machine meanwhile
does not count.  With several workers (pytest-xdist) each has its own mark and its own temporary
folder, and tells the session what it left there; shared memory, which bears no mark, is looked for
once, after all of them.
"""

from __future__ import annotations

import os
import uuid
from typing import Any

import pytest

from rft.launch import leftovers

_BEFORE = pytest.StashKey[leftovers.Snapshot]()
_LEFT = pytest.StashKey[list[str]]()
_MARKED = ("process", "listener", "temporary folder")


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[_LEFT] = []
    os.environ.setdefault(leftovers.MARK, uuid.uuid4().hex)
    session.config.stash[_BEFORE] = leftovers.snapshot()


@pytest.hookimpl(trylast=True)  # when the workers have ended
def pytest_sessionfinish(session: pytest.Session) -> None:
    left = session.config.stash[_LEFT]
    found = leftovers.compare(session.config.stash[_BEFORE])
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["left"] = [line for line in found if line.startswith(_MARKED)]
        return
    left += found
    if left and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    node.config.stash[_LEFT] += getattr(node, "workeroutput", {}).get(
        "left", [f"worker {node.gateway.id} died and said nothing"]
    )


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if left := config.stash.get(_LEFT, []):
        terminalreporter.section("left on the machine by these tests", red=True)
        for line in left:
            terminalreporter.line(line)

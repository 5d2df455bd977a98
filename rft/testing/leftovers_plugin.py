"""pytest plugin: a test session that leaves a process, shared memory, a temporary folder or an open listener behind fails.

Everything the session starts inherits a mark, so what other people run on the machine meanwhile does not count.
"""

from __future__ import annotations

import os
import uuid

import pytest

from rft.launch import leftovers

_BEFORE = pytest.StashKey[leftovers.Snapshot]()
_LEFT = pytest.StashKey[list[str]]()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    os.environ.setdefault(leftovers.MARK, uuid.uuid4().hex)
    session.config.stash[_BEFORE] = leftovers.snapshot()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    left = session.config.stash[_LEFT] = leftovers.compare(session.config.stash[_BEFORE])
    if left and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if left := config.stash.get(_LEFT, []):
        terminalreporter.section("left on the machine by these tests", red=True)
        for line in left:
            terminalreporter.line(line)

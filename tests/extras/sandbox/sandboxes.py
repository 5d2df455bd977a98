"""Sandboxes of every level, for the tests of programs."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rft.extras.sandbox.code_sandbox import SandboxUnavailable, open_server
from rft.extras.sandbox.processes import LEVELS, ForkServer


@pytest.fixture(scope="session")
def anybodys_python() -> str:
    """A Python of this version that every account can run: this one, or the system's.  Skips
    without one.
    """
    own = Path(sys.executable).resolve()
    if all(folder.stat().st_mode & 0o001 for folder in own.parents):
        return sys.executable
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return shutil.which(name, path="/usr/bin:/usr/local/bin") or pytest.skip(
        f"no {name} that another account can run"
    )


@pytest.fixture(scope="session")
def strongest() -> str:
    """The first level that this machine gives: what does not depend on the level is tried there."""
    try:
        server = open_server(LEVELS, sys.executable)
    except SandboxUnavailable as e:
        pytest.skip(str(e))
    server.close()
    return server.level


@pytest.fixture(scope="module", params=LEVELS)
def server(request: pytest.FixtureRequest) -> Iterator[ForkServer]:
    python = sys.executable
    if request.param == "landlock" and os.geteuid() == 0:  # whose programs run as another user
        python = request.getfixturevalue("anybodys_python")
    try:
        server = open_server([request.param], python)
    except SandboxUnavailable as e:
        pytest.skip(str(e))
    yield server
    pid = server.pid
    server.close()
    assert pid is not None and not psutil.pid_exists(pid)

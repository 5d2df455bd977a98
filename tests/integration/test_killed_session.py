"""A test session that is killed leaves neither what it has started nor its temporary folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rft.launch import leftovers
from tests.helpers import guardian, runs

SESSION = """
import subprocess, sys, tempfile

def test_starts_what_goes_on():
    code = "import signal; signal.pause()"
    child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    print("\\nhas", child.pid, tempfile.gettempdir(), flush=True)
    child.wait()
"""


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_session_leaves_nothing(by: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "test_session.py").write_text(SESSION)
    ours = (leftovers.MARK, "RFT_TESTS_TMP", "PYTEST_XDIST_WORKER")
    session = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-s", "-p", "tests.conftest", str(tmp_path)],
        cwd=runs.ROOT,
        env={name: text for name, text in os.environ.items() if name not in ours},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert session.stdout is not None
    with session, session.stdout:
        words = next((line.split() for line in session.stdout if line.startswith("has ")), [])
        assert words, session.wait()
        began, folder = leftovers.began(words[1]), Path(words[2])
        assert began and folder.is_dir() and folder != Path(os.environ["TMPDIR"])
        session.send_signal(by)
    assert session.returncode == -by
    until = time.monotonic() + guardian.LIMIT_S
    while folder.exists() and time.monotonic() < until:
        threading.Event().wait(0.1)
    assert not folder.exists()
    assert leftovers.began(words[1]) != began

"""Watching folders: what cannot be watched leaves nothing open, and a folder that goes away ends no
watch.
"""

from __future__ import annotations

import os
import select
import sys
from pathlib import Path

import pytest

from rft.errors import SetupError
from rft.monitor.changes import FolderChanges

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="inotify")


def test_what_cannot_be_watched_leaves_nothing_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(SetupError, match="cannot be watched"):
        FolderChanges(tmp_path, tmp_path / "missing")
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_folder_that_goes_away_ends_no_watch(tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    changes = FolderChanges(tmp_path, inner, recursive=False)
    try:
        (inner / "file").touch()
        changes.wait()
        (inner / "file").unlink()
        inner.rmdir()
        (tmp_path / "file").touch()
        assert select.select([changes], [], [], 10)[0]
        changes.wait()
    finally:
        changes.close()

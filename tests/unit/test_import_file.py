"""Files of plugins, imported by several threads at once: by runs of one group, whose environment a
path names.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from threading import Event

import pytest

from rft.plugins import import_file

SLOW = """
from tests.unit.test_import_file import ENTERED, GO
ENTERED.set()
GO.wait(30)
found = 7
"""
ENTERED = Event()
GO = Event()


def test_a_file_is_whole_for_whoever_asks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "tests.unit.test_import_file", sys.modules[__name__])
    (tmp_path / "slow.py").write_text(SLOW)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(import_file, tmp_path / "slow.py")
        assert ENTERED.wait(30)
        second = pool.submit(lambda: hasattr(import_file(tmp_path / "slow.py"), "found"))
        wait({second}, timeout=0.2)  # as long as it takes where nothing holds it up
        GO.set()
        assert first.result().found == 7 and second.result(), (
            "not a module that is still being imported"
        )

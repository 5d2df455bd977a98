"""examples/serve: the program that plays sessions may be started at the same moment as the service,
as its configuration says.
"""

from __future__ import annotations

import runpy
import sys
import time
from pathlib import Path

import pytest

PLAY = Path(__file__).parents[3] / "examples" / "serve" / "play.py"


def test_it_waits_for_the_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def begins(_: float) -> None:
        """While it waits, the service begins to listen."""
        (tmp_path / "serve.json").write_text('{"base_url": "http://127.0.0.1:9/v1"}')

    monkeypatch.setattr(time, "sleep", begins)
    monkeypatch.setenv("RFT_SERVE_KEY", "k" * 32)
    monkeypatch.setattr(sys, "argv", [str(PLAY), str(tmp_path), "0"])
    runpy.run_path(str(PLAY))
    assert (tmp_path / "serve.json").exists()

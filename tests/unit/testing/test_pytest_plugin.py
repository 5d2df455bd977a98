"""The fixtures work in somebody else's project, and cost those nothing that do not ask for them."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PLUGIN = "rft.testing.pytest_plugin"
TESTS = """
import sys

def test_without():
    assert not [m for m in sys.modules if m.startswith(("rft.workflow", "numpy", "torch"))]

def test_scripted(run_workflow, scripted_model):
    assert run_workflow("simple_workflow", {"prompt": "2+2?", "truth": "4"}, scripted_model("4"), reward="exact_answer").reward == 1.0

def test_recorded(run_workflow, recorded_model, scripted_model):
    model = recorded_model(scripted_model("4"))
    assert run_workflow("simple_workflow", {"prompt": "2+2?", "truth": "4"}, model, reward="exact_answer").reward == 1.0

def test_played(recorded_model):
    assert recorded_model(name="test_recorded").unused == 1

def test_trace(run_workflow, scripted_model):
    assert run_workflow("simple_workflow", {"prompt": "2+2?", "truth": "5"}, scripted_model("4"), reward="exact_answer").reward == 1.0
"""


@pytest.mark.e2e
def test_the_fixtures(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_theirs.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", PLUGIN, "-p", "no:cacheprovider"]
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert "1 failed, 4 passed" in done.stdout and "assistant  4" in done.stdout, (
        done.stdout + done.stderr
    )
    assert (tmp_path / "cassettes" / "test_theirs" / "test_recorded.json").is_file()


def test_it_is_registered_under_the_name_of_its_module() -> None:
    """So naming it in `pytest_plugins` as well does not register it twice."""
    named = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "entry-points"
    ]["pytest11"]
    assert named == {PLUGIN: PLUGIN}

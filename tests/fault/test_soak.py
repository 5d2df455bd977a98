"""The short form of the endurance run, with whatever faults fit into three minutes."""

import subprocess
import sys

import pytest

from tests.helpers.runs import ROOT


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(2400)
def test_three_minutes_of_faults(tmp_path):
    command = [
        sys.executable,
        ROOT / "scripts" / "soak.py",
        "--minutes",
        "3",
        "--seed",
        "7",
        "--keep",
        tmp_path / "kept",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Problems: none." in done.stdout and (tmp_path / "kept" / "measured.json").exists()

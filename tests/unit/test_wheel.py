"""What is installed is what was written: a wheel holds the workflows and examples as data, and
finds them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_wheel_holds_workflows_and_examples(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--wheel-dir",
        str(tmp_path),
        str(ROOT),
    ]
    subprocess.run(command, check=True, timeout=300, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path / "site")
    assert {f"rft/_workflows/{p.name}" for p in (ROOT / "workflows").glob("*.py")} <= names
    assert {
        "rft/_examples/quickstart/config.yaml",
        "rft/_examples/tiny/config.yaml",
        "rft/py.typed",
    } <= names
    assert {
        "rft/extras/migrate/compat/keys/data/verl_keys.tsv",
        "rft/extras/migrate/compat/keys/data/trinity_keys.txt",
    } <= names
    assert {
        "rft/cli/skeletons/workflow/plugin.py.txt",
        "rft/cli/skeletons/config/config.yaml",
    } <= names
    assert not any(n.startswith(("workflows/", "tests/", "scripts/")) for n in names)
    program = (
        "from rft.plugins import REGISTRY, load_all; load_all(); "
        "print(REGISTRY.get('workflow', 'simple_workflow').source)"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=environment,
        check=True,
        timeout=60,
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip().startswith(str(tmp_path / "site" / "rft" / "_workflows"))

"""Where `rft` is started: without folder, output or home; with temporary files nowhere."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.attacks.table import attack

ROOT = Path(__file__).parents[2]
RFT = f"{sys.executable} -m rft.cli.main"
STARTS = {  # shell line, exit code, what standard error says
    "a current folder that is gone": (
        "mkdir gone && cd gone && rmdir ../gone && {rft} check -c x.yaml",
        2,
        "the current folder",
    ),
    "an output that is closed": ("{rft} plugins >&-", 0, ""),
    "an output that is full": ("{rft} plugins >/dev/full", 4, "the output cannot be written"),
    "no stream at all": ("{rft} plugins <&- >&- 2>&-", 0, ""),
    "an error with nowhere to go": ("{rft} check -c x.yaml 2>&- >out", 2, ""),
    "no home": ("HOME=/nonexistent {rft} plugins >out", 0, ""),
    "no environment": ("env -i PYTHONPATH=$PYTHONPATH {rft} plugins >out", 0, ""),
    "an old locale": ("LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 {rft} plugins >out", 0, ""),
    "an output in ASCII": ("PYTHONIOENCODING=ascii PYTHONUTF8=0 {rft} plugins >out", 0, ""),
    "temporary files nowhere": ("TMPDIR=/nonexistent {rft} plugins >out", 0, ""),
    "a terminal of a strange size": ("COLUMNS=x LINES=-1 TERM= {rft} plugins >out", 0, ""),
    "a name that is no text": ("{rft} check -c $'\\xff.yaml' >out", 2, ""),
}


@attack(
    "–",
    "the command is started without a folder, an output, a home, temporary files, in an old locale",
    "works, or one line",
)
@pytest.mark.e2e
@pytest.mark.parametrize("name", STARTS)
def test_starts(name: str, tmp_path: Path) -> None:
    line, code, says = STARTS[name]
    done = subprocess.run(
        ["bash", "-c", line.format(rft=RFT)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        errors="replace",
        timeout=300,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert (
        says in done.stderr and "Traceback" not in done.stderr and done.stderr.count("\n") <= 1
    ), done.stderr

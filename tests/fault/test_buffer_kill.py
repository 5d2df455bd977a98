"""What the audit script says of a run that was killed; the kills themselves are in
test_fault_matrix.py.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

CHILD = Path(__file__).with_name("buffer_child.py")
ROOT = CHILD.parents[2]
ENV = {**os.environ, "PYTHONPATH": str(ROOT)}


def live(run: Path, kind: str, nth: int, *url: str) -> list[list[str]]:
    command = [sys.executable, str(CHILD), str(run), kind, str(nth), *url]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=ENV, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr
    return [line.split() for line in done.stdout.splitlines()]


def test_the_script_tells_by_its_exit_code(tmp_path: Path) -> None:
    live(tmp_path, "sql", 400)
    command = [sys.executable, "scripts/audit.py", str(tmp_path), "--json"]
    good = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=ENV, timeout=60)
    assert (good.returncode, json.loads(good.stdout)["ok"]) == (0, True), good.stderr
    path = max(tmp_path.glob("checkpoints/*/manifest.json"))
    manifest = json.loads(path.read_bytes())
    manifest["consumption"]["num_uses"] += 1
    path.write_text(json.dumps(manifest))
    bad = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=ENV, timeout=60)
    assert bad.returncode == 4
    assert "uses (digest" in json.loads(bad.stdout)["problems"][0]
    none = subprocess.run(
        [*command[:2], str(tmp_path / "nowhere")],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=ENV,
        timeout=60,
    )
    assert (none.returncode, "must hold one buffer" in none.stderr) == (4, True)

"""The tiny example on every storage, by one line of configuration: kill -9 of everything in
mid-run, the same command again, the audit.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.helpers import runs
from tests.helpers.postgres import PostgresServer

BUFFER = "buffer.trainer_input.experience_buffer"
STEPS = ("trainer.total_steps=12", "trainer.save_interval=3")


def audit(root: Path) -> dict[str, object]:
    command = [
        sys.executable,
        "-m",
        "rft.cli.main",
        "buffer",
        "audit",
        str(runs.folder(root)),
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=runs.ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["sql", "file", "queue", "postgresql"])
def test_one_line_changes_the_storage(
    tiny_model: Path, tmp_path: Path, storage: str, request: pytest.FixtureRequest
) -> None:
    line = f"{BUFFER}.storage_type={storage}"
    if storage == "postgresql":
        server: PostgresServer = request.getfixturevalue("postgres")
        line = f"{BUFFER}.path={server.url}"
    arguments = runs.arguments(tiny_model, tmp_path, *runs.SMALL, *STEPS, line)
    run = runs.Run(*arguments)
    run.wait_for("step 7/")
    for process in [*runs.parts(runs.state(tmp_path)["run_id"]), psutil.Process(run.process.pid)]:
        process.kill()
    assert run.end() != 0
    first = audit(tmp_path)
    assert first["ok"] and first["used_twice"] == 0, first

    again = runs.Run(*arguments)
    assert again.end() == 0, again.output
    last = audit(tmp_path)
    assert (
        last["ok"] and last["balanced"] and (last["used_twice"], last["used"]) == (0, 12 * 4 * 4)
    ), last
